"""Take away what nobody can use any more. Each thing is tried alone: what is locked is in use and stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.agent import bundle
from belljar.errors import ImageCorrupt, ImageInUse
from belljar.host.interpreter import Interpreter, known, out_of_use
from belljar.host.locks import is_locked, try_lock
from belljar.image import Image, layer_name
from belljar.image.boot import initramfs
from belljar.image.intake import intake

if TYPE_CHECKING:
    from belljar.image.store.store import Store

DOWNLOAD_AGE = 7 * 86400.0  # seconds; a broken download may be resumed that long
WRITING_AGE = 3600.0  # a file that is written in one step has its final name long before


def sweep(store: Store, *, dry_run: bool, now: float | None = None) -> Iterator[Path]:
    """Yields what was (or would be) removed: abandoned drafts, nameless images, images beyond the limits of the cache,
    ramdisks and interpreters of other agents, old downloads."""
    moment = time.time() if now is None else now
    yield from _drafts(store, dry_run)
    yield from _nameless(store, dry_run)
    if store.settings.cache_limit or store.settings.keep_days:
        from belljar.image.store.evict import evict

        yield from evict(store, dry_run=dry_run, now=now)
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
    """Remove it, unless its maker, or another `gc`, is quicker to take its lock."""
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
        if dry_run:
            if _is_held(image.disk.parent / "lock"):
                continue
        else:
            try:
                store.remove(image, nameless=True)
            except ImageInUse:
                continue
        yield image.disk.parent


def _ramdisks(store: Store, dry_run: bool) -> Iterator[Path]:
    there = _finished(store.folder / "cache")  # looked at first: what is made from now on is of an image not seen here
    wanted = set()
    with suppress(ImageCorrupt):
        images = store.images()
        wanted = {initramfs.boot_digest(image) for image in images}
        wanted |= {initramfs.boot_digest(image, _python(store, image)) for image in images}
    for cached in there:
        if cached.name not in wanted:
            if not dry_run:
                cached.unlink(missing_ok=True)
            yield cached


def _layers(store: Store, dry_run: bool) -> Iterator[Path]:
    """Layers of images that are gone, or with another agent. A machine that runs on one has its files open."""
    there = _finished(store.folder / "layers")
    wanted = {layer_name(image, _python(store, image)) for image in store.images()}
    for path in there:
        if path.name.partition(".")[0] not in wanted and not is_locked(path.with_suffix(".lock")):
            if not dry_run:
                path.unlink(missing_ok=True)
            yield path


def _interpreters(store: Store, dry_run: bool) -> Iterator[Path]:
    """Copies of this host's Python for other agents, or of another Python. None is read later than it was asked for."""
    for path in list(out_of_use(store.folder / "interpreters", bundle.source())):
        if not dry_run:
            path.unlink(missing_ok=True)
        yield path


def _python(store: Store, image: Image) -> Interpreter | None:
    """The interpreter that the image's guests get, where there is one."""
    return None if initramfs.fits(image) else known(store.folder / "interpreters", bundle.source())


def _half_written(store: Store, dry_run: bool, now: float) -> Iterator[Path]:
    """Drafts of single files, and of names, whose writers were killed."""
    for folder in ("cache", "layers", "interpreters", "names", "sources", "downloads"):
        for path in _entries(store.folder / folder):
            if path.name.startswith(".") and _age(path, now) > WRITING_AGE:
                if not dry_run:
                    path.unlink(missing_ok=True)
                yield path


def _downloads(store: Store, dry_run: bool, now: float) -> Iterator[Path]:
    """Parts of downloads nobody is at, then locks nobody holds, once they are old. A lock is removed by its holder only."""
    old = [path for path in _entries(store.folder / "downloads") if _age(path, now) > DOWNLOAD_AGE]
    for part in old:
        if part.suffix != ".lock" and not is_locked(part.with_suffix(".lock")):
            if not dry_run:
                part.unlink(missing_ok=True)
            yield part
    for path in old:
        if path.suffix == ".lock" and (lock := try_lock(path)):
            if not dry_run:
                path.unlink(missing_ok=True)
            lock.release()
            yield path


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_held(path: Path) -> bool:
    """Does anybody hold it, be it together with others?"""
    if lock := try_lock(path):
        lock.release()
    return lock is None


def _finished(folder: Path) -> list[Path]:
    """Without what is just being written."""
    return [path for path in _entries(folder) if not path.name.startswith(".")]


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
