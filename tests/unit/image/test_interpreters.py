"""The interpreter that images without a Python that fits are brought: with which ramdisk, in which layer, and how long it is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from belljar.host.python.interpreter import interpreter
from belljar.image import Image, layer_name
from belljar.image.store.store import Store
from belljar.model import Context

Publish = Callable[..., Image]


@pytest.mark.parametrize(
    ("version", "is_carried"), [("", True), ("2.7", True), ("3.5", True), ("3.6", False), ("3", False)]
)
def test_an_image_without_a_python_that_fits_gets_ours_with_the_ramdisk(
    store: Store, publish: Publish, version: str, is_carried: bool
) -> None:
    image = publish("base")
    image = replace(image, facts={"agent_in_initrd": True, "python": version, "init": "/sbin/init"})
    usual = store.boot_files(image)
    assert usual.initrd is not None
    assert (b"belljar/python/loader\0" in usual.initrd.read_bytes()) is is_carried
    assert store.boot_files(image) == usual
    injected = store.boot_files(image, Context.INJECT)
    assert injected.initrd == usual.initrd and "belljar.inject" in injected.append
    by_ours = b"ExecStart=/usr/lib/belljar/python/loader "
    assert (by_ours in usual.initrd.read_bytes()) is is_carried
    assert (store.python_for(image) is not None) is is_carried


def test_the_layer_of_an_image_that_is_brought_a_python_is_another_one(store: Store, publish: Publish) -> None:
    image = replace(publish("base"), facts={"python": "2.7"})
    assert layer_name(image, store.python_for(image)) != layer_name(image)


def test_gc_takes_interpreters_of_other_agents_and_leaves_the_present_one(store: Store, publish: Publish) -> None:
    needy = replace(publish("base"), facts={"python": "2.7"})
    old = interpreter(store.work_folder("interpreters"), b"import os\n")
    link = next(path for path in old.path.parent.iterdir() if path.is_symlink())
    present = store.python_for(needy)
    assert present is not None
    assert set(store.gc(dry_run=True)) == {old.path, link} and old.path.exists()
    assert set(store.gc()) == {old.path, link}
    assert not old.path.exists() and present.path.exists() and store.python_for(needy) == present
    assert list(store.gc()) == []
