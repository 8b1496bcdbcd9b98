"""The interpreter that the agent travels with: in the ramdisk of each image, and how long it is kept."""

from __future__ import annotations

from collections.abc import Callable

from belljar.host.python.interpreter import interpreter
from belljar.image import Image
from belljar.image.store.store import Store
from belljar.model import Context

Publish = Callable[..., Image]


def test_the_ramdisk_brings_the_agent_with_its_interpreter_by_either_way(store: Store, publish: Publish) -> None:
    image = publish("base")
    usual = store.boot_files(image)
    assert usual.initrd is not None
    ramdisk = usual.initrd.read_bytes()
    assert b"belljar/agent/loader\0" in ramdisk and b"ExecStart=/usr/lib/belljar/loader " in ramdisk
    assert store.boot_files(image) == usual
    injected = store.boot_files(image, Context.INJECT)
    assert injected.initrd == usual.initrd and "belljar.inject" in injected.append


def test_gc_takes_interpreters_of_other_agents_and_leaves_the_present_one(store: Store) -> None:
    old = interpreter(store.work_folder("interpreters"), b"another", lambda: b"import os\n")
    present = store.interpreter()
    assert set(store.gc(dry_run=True)) == {old.path} and old.path.exists()
    assert set(store.gc()) == {old.path}
    assert not old.path.exists() and present.path.exists() and store.interpreter() == present
    assert list(store.gc()) == []
