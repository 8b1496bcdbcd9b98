"""Names that follow a tag of a registry: `belljar image sync` asks what the tag is now, and moves the name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from belljar.errors import BelljarError
from belljar.image import Image
from belljar.image.container import disk, sources
from belljar.image.intake import intake
from belljar.image.progress import Progress, shown
from belljar.image.site.sync import PRESENT, UPDATED, Synced, failed
from belljar.image.store.store import Store


def names(store: Store) -> dict[str, tuple[str, Image]]:
    """The names of this very store that follow a tag: which, and the image that it was when it was asked last."""
    followed = {}
    for image in store.own_images():
        for name, _, source in (str(origin).partition(" ") for origin in image.facts.get("origins", ())):
            if name in image.names and source.startswith("docker:") and not sources.DIGEST.search(source):
                followed[name] = source, image
    return followed


def sync(
    store: Store, followed: Mapping[str, tuple[str, Image]], asked: Sequence[str] = (), *, dry_run: bool = False
) -> list[Synced]:
    """Bring up to date what follows a tag, or what is *asked* of it. The error of one name is in its row, and the others go on."""
    chosen = [name for name in asked or followed if name in followed]
    with shown() as progress:
        return [_synced(store, name, *followed[name], dry_run, progress) for name in chosen]


def _synced(store: Store, name: str, source: str, image: Image, dry_run: bool, progress: Progress) -> Synced:
    progress.step(f"Asking for {source}")
    try:
        with intake.draft(store, name) as folder:
            digest = sources.version(source, store.settings, folder)
        is_present = disk.stored(store, digest) == image
        if not is_present and not dry_run:
            image = disk.bring(store, source, name)
        return Synced(name, image.digest, f"{source}@{digest}", PRESENT if is_present else UPDATED)
    except BelljarError as exc:
        return failed(name, source, exc)
