"""Bring images from the site's sources into a store: one that a job misses, or all that have changed.

No source is asked for an image that is here. One process downloads for a store, others wait for it. A name moves to its new
image in one step; running machines keep their image.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import BelljarError, ImageCorrupt, ImageMismatch, ImageTooLarge, ImageUnfit, ImageUnknown, NoSpace
from belljar.host.files import free_bytes
from belljar.image import Image
from belljar.image.intake import fetch, intake
from belljar.image.intake.sandbox import check_qcow2, run
from belljar.image.progress import Progress, shown
from belljar.image.site import index
from belljar.image.site.index import Entry, Part, Statement
from belljar.image.site.master import Master
from belljar.image.store import manifest
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.image.store.store import Store

UNPACKING_TIMEOUT = 3600
CHECKING_TIMEOUT = 600
LARGEST_BOOT_FILE = 1 << 30
PRESENT, NEW, UPDATED, REPAIRED, KEPT, OFFERED, FAILED = (
    "up to date", "new", "updated", "repaired", "kept", "offered", "failed",
)  # fmt: skip


@dataclass(frozen=True)
class Synced:
    """The result for one name."""

    name: str
    digest: str
    source: str
    what: str  # PRESENT, NEW, UPDATED, REPAIRED, KEPT, OFFERED, FAILED
    why: str = ""
    error: str = ""  # of FAILED: the class of the error, see docs/image-life.md


def pull(store: Store, reference: str, *, now: float | None = None) -> Image:
    """The image of this name or digest, brought from the first source that offers it. Raises ImageUnknown when none does."""
    with shown() as progress:
        for source in store.settings.sources:
            master = Master(store, source)
            made = master.current(progress, youngest=store.settings.sync_interval, now=now)
            if name := _offered(made, reference):
                master.check(made.entries[name], now)
                return bring(store, master, made.entries[name], progress)
    raise ImageUnknown(
        f"no image is called {reference!r}, and no source offers one",
        hint="`belljar image sync --dry-run` shows what is offered.",
    )


def _offered(made: index.Index, reference: str) -> str:
    """The name under which it is offered; "" when it is not. Raises ImageUnfit for a disk that is offered as several images."""
    if reference in made.entries:
        return reference
    wanted = reference.removeprefix("sha256:")
    fits = [one.statement for one in made.entries.values() if one.statement.digest == wanted]
    if len({one.boot_digest for one in fits}) > 1:
        raise ImageUnfit(
            f"{reference}: {' and '.join(sorted(one.name for one in fits))} have this disk, and start it by other kernels",
            hint="Ask for one of them by its name.",
        )
    return fits[0].name if fits else ""


def sync(
    store: Store, names: Sequence[str], sources: Sequence[str], *, everything: bool = False, dry_run: bool = False
) -> list[Synced]:
    """Ask every source; bring what is named, else whatever came from there before and has changed, or *everything* that is
    offered. The error of one name is in its row, and the others go on."""
    found: list[Synced] = []
    taken: set[str] = set()
    with shown() as progress:
        for source in sources:
            master = Master(store, source)
            try:
                made = master.current(progress, youngest=0)
            except BelljarError as exc:
                why = f"{exc.message} ({exc.hint})"
                found.append(Synced("", "", master.place.shown, FAILED, why, type(exc).__name__))
                continue
            ours = master.seen().ours
            offered = list(made.entries) if everything or (dry_run and not names) else [*(names or ours)]
            for name in offered:
                if name in made.entries and name not in taken:
                    taken.add(name)
                    asked = everything or name in names
                    found.append(_synced(store, master, made.entries[name], asked, dry_run, progress))
            if not names and not everything:
                gone = [name for name in ours if name not in made.entries]
                found += [Synced(name, ours[name], master.place.shown, KEPT, "not offered any more") for name in gone]
    all_answered = all(row.name for row in found)
    missing = [name for name in names if name not in taken] if all_answered else []
    return found + [Synced(name, "", "", FAILED, "no source offers it", ImageUnknown.__name__) for name in missing]


def _synced(store: Store, master: Master, entry: Entry, asked: bool, dry_run: bool, progress: Progress) -> Synced:
    """Bring one name up to date. A name that was given to another image here stays, unless it was *asked* for."""
    statement = entry.statement
    row = Synced(statement.name, statement.digest, master.place.shown, PRESENT)
    here = _present(store, statement.name)
    try:
        if here is not None and here.digest == statement.digest and store.complaint(here):
            row = replace(row, what=REPAIRED)
        elif here is not None and here.digest == statement.digest:
            seen = master.seen()
            is_known = seen.versions.get(statement.name, 0) >= statement.version
            if is_known and seen.ours.get(statement.name) == here.digest:
                return row
            row = replace(row, what=PRESENT if _is_as_stated(here, statement) else UPDATED)
        elif here is not None:
            if not asked and not _came_from(master, here, statement.name):
                return replace(row, digest=here.digest, what=KEPT, why="another image was given this name here")
            row = replace(row, what=UPDATED)
        else:
            row = replace(row, what=OFFERED if dry_run else NEW)
        if dry_run:
            return row
        master.check(entry)
        bring(store, master, entry, progress)
    except BelljarError as exc:
        return replace(row, what=FAILED, why=exc.message, error=type(exc).__name__)
    return row


def _present(store: Store, name: str) -> Image | None:
    """What the name has in this very store. The site's store is for the site to sync."""
    with suppress(BelljarError):
        image = store.find(name)
        if name in image.names and image.store == store.folder:
            return image
    return None


def _is_as_stated(here: Image, statement: Statement) -> bool:
    """Is it this disk, with this kernel and these facts?"""
    same = (here.digest, here.boot_digest) == (statement.digest, statement.boot_digest)
    return same and all(here.facts.get(name) == fact for name, fact in statement.facts.items())


def _came_from(master: Master, here: Image, name: str) -> bool:
    """Did the name get this image from there? The image knows it too: a sync may have died before it noted that."""
    is_noted = here.digest == master.seen().ours.get(name)
    return is_noted or (here.source == master.place.shown and _version(here, name) > 0)


def bring(store: Store, master: Master, entry: Entry, progress: Progress) -> Image:
    """The image of a statement that was verified, with its name. Downloads it unless it is here. Raises ImageMismatch,
    ImageCorrupt, ImageTooLarge, DownloadFailed, NoSpace; then nothing has changed."""
    statement = entry.statement
    check_sizes(entry, store.settings.max_size)
    what = f"bring the image {statement.name}"
    with intake.alone(store, fetch.key(f"image {statement.digest}"), what, progress):
        image = _here(store, master, entry)
        if image is not None:
            with suppress(ImageUnknown):  # removed just now
                image = store.tag(image, statement.name)
                master.note(statement.name, statement.version, statement.digest)
                return image
        _make_room(store, master, entry)
        image = _fetched(store, master, entry, progress)
        progress.step(f"Image {statement.name} is ready ({statement.digest:.12})")
        master.note(statement.name, statement.version, statement.digest)
        return image


def _make_room(store: Store, master: Master, entry: Entry) -> None:
    """Keep to the cache's limit. Raises NoSpace where the image does not fit all the same, before a byte of it comes."""
    parts = entry.statement.parts.values()
    needed = sum(part.size for part in parts)
    if store.settings.cache_limit:
        from belljar.image.store.sweep import make_room

        make_room(store, needed)
    if master.place.folder is None:
        needed += sum(part.blob_size for part in parts)
    if (free := free_bytes(store.folder)) < needed:
        raise NoSpace(f"{store.folder}: {entry.statement.name} takes {needed} bytes, {free} are free")


def _here(store: Store, master: Master, entry: Entry) -> Image | None:
    """The image, where this store has it whole, and as it is stated. A digest is of the disk alone, and a publisher of
    one name must not change the kernel of another: raises ImageUnfit where the disk has other names and starts otherwise."""
    statement = entry.statement
    try:
        image = store.resolve(statement.digest)
    except BelljarError:
        return None
    if image.store != store.folder:
        return None
    if statement.name not in image.names and store.verify(image):
        return None  # it was damaged since it was stored
    if others := [name for name in image.names if name != statement.name]:
        manifest.same_start(replace(image, names=tuple(others)), _stated(image, statement))
        return image
    if image.boot_digest != statement.boot_digest:
        return None
    if statement.version > _version(image, statement.name):  # its publisher has changed the facts
        facts = _facts(entry, master.signer(entry))
        manifest.set_facts(image.disk.parent, {**dict.fromkeys(image.facts), **facts}, mode=store.file_mode)
    return image


def _stated(image: Image, statement: Statement) -> Image:
    """The image as the statement has it."""
    return replace(image, boot_digest=statement.boot_digest, facts=dict(statement.facts))


def _version(image: Image, name: str) -> int:
    """The version of this name the image was brought as; 0 when it came in another way."""
    published, _, version = str(image.facts.get("published", "")).rpartition(" ")
    return int(version) if published == name and version.isdecimal() else 0


def check_sizes(entry: Entry, largest: int) -> None:
    """Raise ImageTooLarge for a statement about more than may come here."""
    statement = entry.statement
    size = max(statement.virtual_size, *(part.size for part in statement.parts.values()))
    packed = max(part.blob_size for part in statement.parts.values())
    if max(size, packed) > largest:
        raise ImageTooLarge(f"{statement.name}: {max(size, packed)} bytes, the limit is {largest}")
    for name, part in statement.parts.items():
        if name != manifest.DISK and part.size > LARGEST_BOOT_FILE:
            raise ImageTooLarge(
                f"{statement.name}: a {name} of {part.size} bytes", hint="That is too large for a boot file."
            )


def _fetched(store: Store, master: Master, entry: Entry, progress: Progress) -> Image:
    statement = entry.statement
    downloads: list[Path] = []
    with intake.draft(store, statement.name) as folder:
        for name, part in statement.parts.items():
            blob = _blob(store, master, part, downloads, progress)
            _unpack(blob, folder / name, part, progress)
        progress.step("Checking the disk")  # whoever signed it may have been wrong
        size = check_qcow2(folder / manifest.DISK, store.settings.max_size, CHECKING_TIMEOUT)
        if size != statement.virtual_size:
            stated = f"a disk of {size} bytes, stated were {statement.virtual_size}"
            raise ImageCorrupt(stated, hint="Publish the image again.")
        progress.step("Taking its digest")
        signer = master.signer(entry)
        what = manifest.Facts(
            source=master.place.shown, append=statement.append, created=time.time(), os=statement.os,
            virtual_size=statement.virtual_size, facts=_facts(entry, signer),
        )  # fmt: skip
        ordered = {name: part.sha256 for name, part in statement.parts.items()}
        image = store.publish(folder, what, statement.name, ordered=ordered)
    for path in downloads:
        path.unlink(missing_ok=True)
    return image


def _facts(entry: Entry, signer: str) -> dict[str, Any]:
    statement = entry.statement
    ours = {
        "published": f"{statement.name} {statement.version}",
        "signer": signer or "nobody",
        "made_from": statement.made_from,
    }
    return {**statement.facts, **ours}


def _blob(store: Store, master: Master, part: Part, downloads: list[Path], progress: Progress) -> Path:
    """The packed file: in the folder of the source, or downloaded."""
    if (folder := master.place.folder) is not None:
        path = folder / index.BLOBS / part.blob
        try:
            size = path.stat().st_size
        except OSError as exc:
            raise ImageCorrupt(f"{path}: {exc.strerror}", hint="Publish the image again.") from exc
        if size != part.blob_size:
            raise ImageMismatch(f"{path}: {size} bytes, ordered were {part.blob_size}", hint="Publish the image again.")
        return path
    url = master.place.of(index.BLOBS, part.blob)
    downloads.append(_downloaded(store, url, part, progress))
    return downloads[-1]


def _downloaded(store: Store, url: str, part: Part, progress: Progress) -> Path:
    """Downloaded and compared with its digest. Raises ImageMismatch, and what `fetch.download` raises."""
    settings = replace(store.settings, max_size=part.blob_size)
    path = fetch.download(url, store.work_folder("downloads"), settings, progress, is_pinned=True)
    if (found := manifest.sha256_of(path)) != part.blob:
        path.unlink(missing_ok=True)  # it must not be resumed
        raise ImageMismatch(
            f"{fetch.shown(url)}: ordered sha256 {part.blob}, got {found}",
            hint="Publish the image again, if that stays so.",
        )
    return path


def _unpack(blob: Path, out: Path, part: Part, progress: Progress) -> None:
    """Unpack into a new file of exactly the size that was stated."""
    progress.step(f"Unpacking {out.name}")
    program = ["zstd", "-dcq", "--memory=1024MB"] if part.form == index.ZSTD else ["cat"]
    try:
        run(program, [], UNPACKING_TIMEOUT, part.size, stdin=blob, stdout=out)
    except (ImageCorrupt, ImageTooLarge) as exc:
        raise ImageMismatch(f"{out.name}: {exc.message}", hint="Publish the image again.") from exc
    if (size := out.stat().st_size) != part.size:
        raise ImageMismatch(f"{out.name}: {size} bytes, ordered were {part.size}", hint="Publish the image again.")
