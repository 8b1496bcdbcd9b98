"""Which images of a node's cache go, and which stay whatever the limits say."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.site import Site

from belljar.image import Image
from belljar.image.store import sweep
from belljar.image.store.store import Store

DAY = 86400.0
NOW = time.time()


@pytest.fixture
def cache(site: Site) -> Store:
    """A node with three images from its source, used 30, 20 and 10 days ago, and one of its own, used 40 days ago."""
    for name in ("one", "two", "three"):
        site.put(name, name.encode())
    node = site.trusting()
    site.make("mine", b"my own", to=node)
    for name, days in (("one", 30), ("two", 20), ("three", 10), ("mine", 40)):
        node.ensure(name)
        used(node.find(name), NOW - days * DAY)
    return node


def used(image: Image, moment: float) -> None:
    os.utime(image.disk.parent / "lock", (moment, moment))
    os.utime(image.disk, ns=(int(moment * 1e9), image.disk.stat().st_mtime_ns))


def limited(store: Store, **limits: object) -> None:
    store.settings = replace(store.settings, **limits)  # type: ignore[arg-type]


def names(store: Store) -> set[str]:
    return {name for image in store.images() for name in image.names}


def gone(store: Store, *, dry_run: bool = False, **facts: object) -> list[Path]:
    return list(sweep.evict(store, dry_run=dry_run, **facts))  # type: ignore[arg-type]


def test_without_limits_nothing_goes(cache: Store) -> None:
    assert gone(cache) == [] and list(cache.gc()) == []


def test_over_the_limit_the_least_recently_used_goes_first(cache: Store) -> None:
    each = sweep.size(cache.find("one"))
    limited(cache, cache_limit=3 * each + each // 2)
    oldest = cache.find("one").disk.parent
    assert gone(cache) == [oldest]
    assert names(cache) == {"two", "three", "mine"}
    list(sweep.evict(cache, needed=each))
    assert names(cache) == {"three", "mine"}
    list(sweep.evict(cache, needed=100 * each))
    assert names(cache) == {"mine"}


def test_a_machines_start_counts_as_use(cache: Store) -> None:
    before = sweep.last_used(cache.find("one"))
    with cache.hold(cache.find("one"), "m1"):
        pass
    assert sweep.last_used(cache.find("one")) > before


def test_what_is_held_needed_or_the_default_stays(cache: Store) -> None:
    limited(cache, cache_limit=1, default="two")
    one, three = cache.find("one"), cache.find("three")
    needed = [three.digest]
    cache.users = lambda digest: ["template x"] if digest in needed else []
    with cache.hold(one, "m1"):
        used(one, NOW - 30 * DAY)
        assert gone(cache, dry_run=True) == gone(cache) == []
    used(one, NOW - 30 * DAY)
    needed.append(one.digest)
    assert gone(cache) == []
    needed.remove(one.digest)
    assert gone(cache) == [one.disk.parent] and names(cache) == {"two", "three", "mine"}


def test_gc_obeys_the_limits(cache: Store) -> None:
    limited(cache, cache_limit=1)
    would = list(cache.gc(dry_run=True))
    assert list(cache.gc()) == would and names(cache) == {"mine"}


def test_room_is_made_before_an_image_comes(site: Site, cache: Store) -> None:
    each = sweep.size(cache.find("one"))
    site.put("four", b"four")
    limited(cache, cache_limit=4 * each + each // 2)
    cache.ensure("four")
    assert "one" not in names(cache) and {"two", "three", "four", "mine"} <= names(cache)


def test_an_image_that_went_comes_again(cache: Store) -> None:
    limited(cache, cache_limit=1)
    gone(cache)
    limited(cache, cache_limit=0)
    cache.ensure("one")
    assert cache.find("one")
