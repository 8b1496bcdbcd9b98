"""Remove what nobody can use any more, and images beyond the limit of the cache. Each thing is tried by itself: what is
locked is in use and stays.

From the cache only what came from a source can go, for only that can come again: the least recently used first, never what a
machine holds or a template needs, nor `image.default`. An image is used when a machine starts on it: then its `lock` gets the
time. On the site's store an ordinary user cannot mark that; but each start reads the disk's header, and the access time tells of
that where the file system keeps it (once a day).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from belljar.agent import bundle
from belljar.errors import ImageInUse, LockTimeout
from belljar.host.locks import is_locked, try_lock
from belljar.host.python.interpreter import out_of_use
from belljar.image import Image, layer_name
from belljar.image.boot import initramfs
from belljar.image.intake import intake
from belljar.image.store.store import Store

DOWNLOAD_AGE = 7 * 86400.0  # seconds; a broken download may be resumed that long
WRITING_AGE = 3600.0  # a file that is written in one step has its final name long before
# Folders of files that were made of an image -> how the file of an image is called.
MADE: dict[str, Callable[[Image], str]] = {
    "cache": lambda image: initramfs.boot_digest(image), "modules": lambda image: image.digest, "layers": layer_name,
}  # fmt: skip


def sweep(store: Store, *, dry_run: bool, now: float | None = None) -> Iterator[Path]:
    """Yields what was (or would be) removed: abandoned drafts, nameless images, images beyond the limit of the cache,
    ramdisks, layers and interpreters of other agents, old downloads."""
    moment = time.time() if now is None else now
    yield from intake.abandoned(store, dry_run=dry_run)
    for image in store.own_images():
        if not (image.names or store.users(image.digest)) and _removed(store, image, dry_run, nameless=True):
            yield image.disk.parent
    yield from evict(store, dry_run=dry_run)
    for path in [*_stale(store), *_half_written(store, moment)]:
        if not dry_run:
            path.unlink(missing_ok=True)
        yield path
    for held in sorted((store.folder / "downloads").glob("[!.]*.lock")):
        paths = sorted(held.parent.glob(f"{held.stem}.*"))
        if all(_age(path, moment) > DOWNLOAD_AGE for path in paths) and (lock := try_lock(held)):
            with lock:  # a lock is removed by its holder only
                for path in () if dry_run else paths:
                    path.unlink(missing_ok=True)
            yield from paths


def _stale(store: Store) -> Iterator[Path]:
    """Ramdisks and layers of images that are gone, or with another agent; copies of this host's Python for another agent. A machine
    that runs on one has its files open. Files are listed first: what is made from now on may be of an image that is not seen below."""
    there = {folder: [path for path in _entries(store.folder / folder) if path.name[0] != "."] for folder in MADE}
    images = store.images()
    for folder, name_for in MADE.items():
        names = {name_for(image) for image in images}
        for path in there[folder]:
            if path.name.partition(".")[0] not in names and not is_locked(path.with_suffix(".lock")):
                yield path
    yield from out_of_use(store.folder / "interpreters", bundle.key())


def _half_written(store: Store, now: float) -> Iterator[Path]:
    """Drafts of single files, and of names, whose writers were killed."""
    for folder in (*MADE, "interpreters", "names", "sources", "downloads"):
        for path in _entries(store.folder / folder):
            if path.name[0] == "." and _age(path, now) > WRITING_AGE:
                yield path


def _age(path: Path, now: float) -> float:
    with suppress(FileNotFoundError):
        return now - path.lstat().st_mtime
    return 0.0


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def evict(store: Store, *, dry_run: bool = False, needed: int = 0) -> Iterator[Path]:
    """Yields what was (or would be) removed: the least recently used while all images and *needed* bytes more take over
    `image.cache_limit`. Where that does not suffice, nothing is refused."""
    if not (limit := store.settings.cache_limit):
        return
    ours = sorted(store.own_images(), key=last_used)
    sizes = {image.digest: size(image) for image in ours}
    total = sum(sizes.values()) + needed
    for image in ours:
        is_default = store.settings.default in image.names
        may_go = "published" in image.facts and not is_default and not store.users(image.digest)
        if total > limit and may_go and _removed(store, image, dry_run):
            total -= sizes[image.digest]
            yield image.disk.parent


def last_used(image: Image) -> float:
    """When a machine was started on it last, as far as that is known."""
    with suppress(OSError):
        return max(os.stat(image.disk.parent / "lock").st_mtime, os.stat(image.disk).st_atime)
    return image.created


def size(image: Image) -> int:
    """Bytes of its files."""
    with suppress(OSError):
        return sum(os.stat(path).st_size for path in (image.disk, image.kernel, image.initrd) if path)
    return 0


def _removed(store: Store, image: Image, dry_run: bool, *, nameless: bool = False) -> bool:
    """False where a machine holds it, it was just given a name, or the store is being changed."""
    if dry_run:
        with try_lock(image.disk.parent / "lock") or nullcontext() as lock:
            return lock is not None
    try:
        store.remove(image, nameless=nameless, patience=0)
    except (ImageInUse, LockTimeout):
        return False
    return True
