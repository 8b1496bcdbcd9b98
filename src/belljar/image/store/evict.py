"""Which images of the node's cache go when there are too many or they are too old: least recently used first.

Only what came from a source can go, for only that can come again; never what a machine holds, a template needs, or
`image.keep` names. An image is used when a machine starts on it: then its `lock` gets the time. On the site's store an
ordinary user cannot mark that; but each start reads the disk's header, and the access time tells of that where the file system
keeps it (once a day).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.errors import ImageInUse
from belljar.host.locks import try_lock
from belljar.image import Image

if TYPE_CHECKING:
    from belljar.image.store.store import Store

DAY = 86400.0


def evict(store: Store, *, dry_run: bool, now: float | None = None, needed: int = 0) -> Iterator[Path]:
    """Yields what was (or would be) removed: images unused for `image.keep_days`, then others while all images and *needed*
    bytes more take over `image.cache_limit`."""
    now = time.time() if now is None else now
    settings = store.settings
    ours = [image for image in store.images() if image.store == store.folder]
    total = sum(map(size, ours)) + needed
    for image in sorted(filter(lambda one: _may_go(store, one), ours), key=last_used):
        is_old = bool(settings.keep_days) and now - last_used(image) > settings.keep_days * DAY
        is_too_much = bool(settings.cache_limit) and total > settings.cache_limit
        freed = size(image)
        if (is_old or is_too_much) and _removed(store, image, dry_run):
            total -= freed
            yield image.disk.parent


def make_room(store: Store, needed: int) -> None:
    """Remove what the limit wants gone before *needed* bytes come. A cache that stays too large is no reason to refuse."""
    for _ in evict(store, dry_run=False, needed=needed):
        pass


def last_used(image: Image) -> float:
    """When a machine was started on it last, as far as that can be seen."""
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


def _removed(store: Store, image: Image, dry_run: bool) -> bool:
    if dry_run:
        if lock := try_lock(image.disk.parent / "lock"):
            lock.release()
        return lock is not None
    try:
        store.remove(image)
    except ImageInUse:
        return False
    return True
