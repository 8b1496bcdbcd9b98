"""Bring images from the site's repositories into a store: one that a job misses, or all that have changed.

No repository is asked for an image that is here. One process downloads for a store, others wait for it. A name moves to its new
image in one step, once every byte of that was verified; running machines keep their image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tuf.api.exceptions import LengthOrHashMismatchError
from tuf.api.metadata import TargetFile

from belljar.errors import BelljarError, ImageCorrupt, ImageInUse, ImageMismatch, ImageTooLarge, ImageUnknown, NoSpace
from belljar.host.files import free_bytes
from belljar.image import Image
from belljar.image.intake import fetch, intake
from belljar.image.intake.sandbox import CONVERSION, check_qcow2, run
from belljar.image.progress import Progress, shown
from belljar.image.site import Source
from belljar.image.site.client import Catalog, Offer, ask
from belljar.image.store import manifest
from belljar.image.store.manifest import DISK
from belljar.image.store.store import Store
from belljar.image.store.sweep import evict
from belljar.records import dataclass, replace

AGAIN = "Ask the site to publish the image again, if that stays so."
PRESENT, NEW, UPDATED, REPAIRED, KEPT, OFFERED, RETIRED, FAILED = (
    "up to date", "new", "updated", "repaired", "kept", "offered", "retired", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Synced:
    name: str
    digest: str
    source: str
    what: str  # PRESENT, NEW, UPDATED, REPAIRED, KEPT, OFFERED, RETIRED, FAILED
    why: str = ""
    error: str = ""  # of FAILED: the class of the error, see docs/batch/images.md


def pull(store: Store, reference: str) -> Image:
    """The image of this name or digest, brought from the first source that offers it. Raises ImageUnknown when none does."""
    with shown() as progress:
        for line in store.settings.sources:
            catalog = ask(store, line, progress)
            if offer := catalog.find(reference):
                return bring(store, offer, progress)
    hint = "`belljar image sync --dry-run` shows what is offered."
    raise ImageUnknown(f"no image is called {reference!r}, and no source offers one", hint=hint)


def sync(
    store: Store, names: Sequence[str], lines: Sequence[str], *, everything: bool = False, dry_run: bool = False
) -> list[Synced]:
    """Ask every source; bring what is named, else whatever came from there before and has changed, or *everything* that is
    offered. A name that its source has revoked is taken away. The error of one name is in its row, and the others go on."""
    rows: dict[str, Synced] = {}
    with shown() as progress:
        for line in lines:
            try:
                catalog = ask(store, line, progress)
            except BelljarError as exc:
                rows[line] = failed("", line.partition("#")[0].rpartition("@")[2], exc)
                continue
            here, origin = store.own_images(), catalog.source.origin
            ours = [name for image in here for name in image.names if origin(name) in image.facts.get("published", ())]
            is_wide = everything or (dry_run and not names)
            for name in (*catalog.offers, *catalog.refused, *ours) if is_wide else names or ours:
                if name not in rows and (name in catalog.offers or name in ours or name in catalog.refused):
                    rows[name] = _synced(store, catalog, name, everything or name in names, dry_run, progress)
    missing = [name for name in names if name not in rows] if all(row.name for row in rows.values()) else []
    return [*rows.values(), *(Synced(name, "", "", FAILED, "no source offers it", "ImageUnknown") for name in missing)]


def failed(name: str, source: str, exc: BelljarError) -> Synced:
    return Synced(name, "", source, FAILED, f"{exc.message} ({exc.hint})", type(exc).__name__)


def _synced(store: Store, catalog: Catalog, name: str, is_asked: bool, dry_run: bool, progress: Progress) -> Synced:
    """Bring one name up to date, or take it away."""
    source, image = catalog.source.shown, _present(store, name)
    try:
        if offer := catalog.offers.get(name):
            what = _due(store, image, offer, is_asked)
            if not dry_run and what not in (PRESENT, KEPT):
                bring(store, offer, progress)
            why = "another image was given this name here" if what == KEPT else ""
            return Synced(name, offer.image.digest, source, OFFERED if dry_run and what == NEW else what, why)
        catalog.check(name)
        if image is not None and not dry_run:
            store.untag(name)
            with suppress(ImageInUse):  # it goes when no machine runs on it: `gc`
                store.remove(image, force=True, nameless=True)
        return Synced(name, "", source, RETIRED, "its source does not offer it any more")
    except BelljarError as exc:
        return failed(name, source, exc)


def _due(store: Store, image: Image | None, offer: Offer, is_asked: bool) -> str:
    """What is to be done about an offer. A name that was given to another image here stays, unless it was asked for."""
    if image is None:
        return NEW
    is_from_there = offer.source.origin(offer.name) in image.facts.get("published", ())
    if image.digest != offer.image.digest:
        return UPDATED if is_asked or is_from_there else KEPT
    if store.complaint(image):
        return REPAIRED
    return PRESENT if is_from_there or not is_asked else UPDATED


def _present(store: Store, name: str) -> Image | None:
    """What the name has in this very store. The site's store is for the site to sync."""
    with suppress(BelljarError):
        image = store.find(name)
        if name in image.names and image.store == store.folder:
            return image
    return None


def bring(store: Store, offer: Offer, progress: Progress) -> Image:
    """The image that is offered, with its name. Downloads it unless it is here. Raises ImageMismatch, ImageCorrupt, ImageTooLarge,
    ImageUnfit, DownloadFailed, NoSpace; then nothing has changed."""
    with intake.alone(store, fetch.key(f"image {offer.image.digest}"), f"bring the image {offer.name}", progress):
        if image := _here(store, offer):
            with suppress(ImageUnknown):  # removed just now
                return store.tag(image, offer.name)
        _make_room(store, offer)
        return _fetched(store, offer, progress)


def _here(store: Store, offer: Offer) -> Image | None:
    """The image, where this store has it whole."""
    try:
        image = store.resolve(offer.image.digest)
    except BelljarError:
        return None
    if image.store != store.folder or (offer.name not in image.names and store.verify(image)):
        return None  # the site's, or damaged since it was stored
    published = sorted({*image.facts.get("published", ()), offer.source.origin(offer.name)})
    manifest.set_facts(image.disk.parent, {"published": published}, mode=store.file_mode)
    return image


def _make_room(store: Store, offer: Offer) -> None:
    """Raises ImageTooLarge, and NoSpace where the image does not fit though what the cache's limit wants gone is gone."""
    unpacked = offer.image.sizes.values()
    packed = [target.length for target in offer.targets.values()]
    if (size := max(offer.image.virtual_size, *unpacked, *packed)) > store.settings.max_size:
        raise ImageTooLarge(f"{offer.name}: {size} bytes, the limit is {store.settings.max_size}")
    list(evict(store, needed=sum(unpacked)))
    needed = sum(unpacked) + (0 if offer.source.folder else sum(packed))
    if (free := free_bytes(store.folder)) < needed:
        raise NoSpace(f"{store.folder}: {offer.name} takes {needed} bytes, {free} are free")


def _fetched(store: Store, offer: Offer, progress: Progress) -> Image:
    image, source = offer.image, offer.source
    packed = {part: _packed(store, source, target, progress) for part, target in offer.targets.items()}
    with intake.draft(store, offer.name) as folder:
        for part, size in image.sizes.items():
            progress.step(f"Unpacking {part}")
            try:
                words = ["zstd", "-dcq", "--memory=1024MB"]
                run(words, [], CONVERSION, size, stdin=packed[part], stdout=folder / part)
            except (ImageCorrupt, ImageTooLarge) as exc:
                raise ImageMismatch(f"{part}: {exc.message}", hint=AGAIN) from exc
        progress.step("Checking the disk")  # whoever signed it may have been wrong
        virtual_size = check_qcow2(folder / DISK, store.settings.max_size)
        progress.step("Taking its digest")
        properties = {**offer.facts, "published": [source.origin(offer.name)], "signer": f"role {offer.role}"}
        properties["made_from"] = image.made_from
        what = manifest.Facts(source.shown, image.append, time.time(), image.os, virtual_size, properties)
        stored = store.publish(folder, what, offer.name, ordered=offer.image.digest)
    for path in () if source.folder else packed.values():
        path.unlink(missing_ok=True)
    return stored


def _packed(store: Store, source: Source, target: TargetFile, progress: Progress) -> Path:
    """The packed file, verified: in the folder of the source, or downloaded, where a broken download goes on."""
    file = f"targets/{target.get_prefixed_paths()[0]}"
    if source.folder:
        path = source.folder / file
    else:
        settings = replace(store.settings, max_size=target.length)
        path = fetch.download(f"{source.address}/{file}", store.work_folder("downloads"), settings, progress)
    try:
        with open(path, "rb") as data:
            target.verify_length_and_hashes(data)
    except OSError as exc:
        raise ImageCorrupt(f"{path}: {exc.strerror}", hint=AGAIN) from exc
    except LengthOrHashMismatchError as exc:
        if not source.folder:
            path.unlink()  # it must not be resumed
        raise ImageMismatch(f"{source.shown}/{file}: {exc}", hint=AGAIN) from exc
    return path
