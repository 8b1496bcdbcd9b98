"""Remove what nobody can use any more, and images beyond the limit of the cache. Each thing is tried by itself: what is
locked is in use and stays.

From the cache only what came from a source can go, for only that can come again: the least recently used first, never what a
machine holds, a template needs, or `image.keep` names. An image is used when a machine starts on it: then its `lock` gets the
time. On the site's store an ordinary user cannot mark that; but each start reads the disk's header, and the access time tells of
that where the file system keeps it (once a day).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.agent import bundle
from belljar.errors import ImageCorrupt, ImageInUse
from belljar.host.locks import is_locked, try_lock
from belljar.host.python.interpreter import out_of_use
from belljar.image import Image, layer_name
from belljar.image.boot import initramfs
from belljar.image.intake import intake

if TYPE_CHECKING:
    from belljar.image.store.store import Store

DOWNLOAD_AGE = 7 * 86400.0  # seconds; a broken download may be resumed that long
WRITING_AGE = 3600.0  # a file that is written in one step has its final name long before


def sweep(store: Store, *, dry_run: bool, now: float | None = None) -> Iterator[Path]:
    """Yields what was (or would be) removed: abandoned drafts, nameless images, images beyond the limit of the cache,
    ramdisks and interpreters of other agents, old downloads."""
    moment = time.time() if now is None else now
    yield from _drafts(store, dry_run)
    yield from _nameless(store, dry_run)
    yield from evict(store, dry_run=dry_run)
    yield from _ramdisks(store, dry_run)
    yield from _layers(store, dry_run)
    yield from _interpreters(store, dry_run)
    yield from _half_written(store, dry_run, moment)
    yield from _downloads(store, dry_run, moment)


def _drafts(store: Store, dry_run: bool) -> Iterator[Path]:
    for draft in _entries(store.folder / "drafts"):
        if not is_locked(draft / "maker") and (dry_run or _dropped(draft)):
            yield draft


def _dropped(draft: Path) -> bool:
    """Remove it, unless its maker or another `gc` takes its lock first."""
    if draft.name.startswith(intake.REMOVED):
        intake.drop(draft)
        return True
    with suppress(FileNotFoundError):
        if lock := try_lock(draft / "maker"):
            try:
                intake.drop(draft)
                return True
            finally:
                lock.release()
    return False


def _nameless(store: Store, dry_run: bool) -> Iterator[Path]:
    for image in store.images():
        if image.store != store.folder or image.names or store.users(image.digest):
            continue
        if _removed(store, image, dry_run, nameless=True):
            yield image.disk.parent


def _ramdisks(store: Store, dry_run: bool) -> Iterator[Path]:
    there = _finished(
        store.folder / "cache"
    )  # listed first: what is made from now on may be of an image that is not listed below
    wanted = set()
    with suppress(ImageCorrupt):
        wanted = {initramfs.boot_digest(image) for image in store.images()}
    for cached in there:
        if cached.name not in wanted:
            yield _unlinked(cached, dry_run)


def _layers(store: Store, dry_run: bool) -> Iterator[Path]:
    """Layers of images that are gone, or with another agent. A machine that runs on one has its files open."""
    there = _finished(store.folder / "layers")
    wanted = {layer_name(image) for image in store.images()}
    for path in there:
        if path.name.partition(".")[0] not in wanted and not is_locked(path.with_suffix(".lock")):
            yield _unlinked(path, dry_run)


def _interpreters(store: Store, dry_run: bool) -> Iterator[Path]:
    """Copies of this host's Python for other agents, or of another Python. They are read only while an image is made."""
    for path in list(out_of_use(store.folder / "interpreters", bundle.key())):
        yield _unlinked(path, dry_run)


def _half_written(store: Store, dry_run: bool, now: float) -> Iterator[Path]:
    """Drafts of single files, and of names, whose writers were killed."""
    for folder in ("cache", "layers", "interpreters", "names", "sources", "downloads"):
        for path in _entries(store.folder / folder):
            if path.name.startswith(".") and _age(path, now) > WRITING_AGE:
                yield _unlinked(path, dry_run)


def _downloads(store: Store, dry_run: bool, now: float) -> Iterator[Path]:
    """Old parts of downloads that no process holds, then old locks. A lock is removed by its holder only."""
    old = [path for path in _entries(store.folder / "downloads") if _age(path, now) > DOWNLOAD_AGE]
    for part in old:
        if part.suffix != ".lock" and not is_locked(part.with_suffix(".lock")):
            yield _unlinked(part, dry_run)
    for path in old:
        if path.suffix == ".lock" and (lock := try_lock(path)):
            _unlinked(path, dry_run)
            lock.release()
            yield path


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _unlinked(path: Path, dry_run: bool) -> Path:
    if not dry_run:
        path.unlink(missing_ok=True)
    return path


def _finished(folder: Path) -> list[Path]:
    """Without what is just being written."""
    return [path for path in _entries(folder) if not path.name.startswith(".")]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def evict(store: Store, *, dry_run: bool, needed: int = 0) -> Iterator[Path]:
    """Yields what was (or would be) removed: the least recently used while all images and *needed* bytes more take over
    `image.cache_limit`."""
    if not (limit := store.settings.cache_limit):
        return
    ours = [image for image in store.images() if image.store == store.folder]
    total = sum(map(size, ours)) + needed
    for image in sorted(filter(lambda one: _may_go(store, one), ours), key=last_used):
        freed = size(image)
        if total > limit and _removed(store, image, dry_run):
            total -= freed
            yield image.disk.parent


def make_room(store: Store, needed: int) -> None:
    """Make room within the limit for *needed* bytes. Where that does not suffice, nothing is refused."""
    for _ in evict(store, dry_run=False, needed=needed):
        pass


def last_used(image: Image) -> float:
    """When a machine was started on it last, as far as that is known."""
    times = []
    with suppress(OSError):
        times.append(os.stat(image.disk.parent / "lock").st_mtime)
    with suppress(OSError):
        times.append(os.stat(image.disk).st_atime)
    return max(times, default=image.created)


def size(image: Image) -> int:
    """Bytes of its files."""
    total = 0
    for path in (image.disk, image.kernel, image.initrd):
        with suppress(OSError):
            total += os.stat(path).st_size if path else 0
    return total


def _may_go(store: Store, image: Image) -> bool:
    kept = (*store.settings.keep, store.settings.default)
    is_kept = any(fnmatchcase(name, pattern) for name in image.names for pattern in kept)
    return "published" in image.facts and not is_kept and not store.users(image.digest)


def _removed(store: Store, image: Image, dry_run: bool, *, nameless: bool = False) -> bool:
    """False where a machine holds it, or it was just given a name."""
    if dry_run:
        if lock := try_lock(image.disk.parent / "lock"):
            lock.release()
        return lock is not None
    try:
        store.remove(image, nameless=nameless)
    except ImageInUse:
        return False
    return True
