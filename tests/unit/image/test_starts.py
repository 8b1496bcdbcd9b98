"""How an image is started in each context, and how that is changed: one kernel, one ramdisk, a few words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from belljar.image import Image
from belljar.image.boot import initramfs
from belljar.image.images import Images
from belljar.image.store.store import firmware_of
from belljar.model import Context, Firmware

Publish = Callable[..., Image]


def test_belljars_own_init_needs_no_words(store: Images, publish: Publish) -> None:
    image = publish("mine")
    usual = store.boot_files(image)
    assert store.boot_files(image, Context.RAMDISK) == usual and (usual.append, usual.init) == ("quiet", "")
    assert usual.digest == initramfs.boot_digest(image)


def test_the_images_own_init_has_the_same_ramdisk_and_another_digest(store: Images, publish: Publish) -> None:
    image = publish("mine")
    usual = store.boot_files(image)
    others = {context: store.boot_files(image, context) for context in initramfs.OWN_INIT}
    assert {files.initrd for files in others.values()} == {usual.initrd}
    assert all(files.append.startswith("quiet belljar.init=/sbin/init") for files in others.values())
    assert [context for context, files in others.items() if "belljar.inject" in files.append] == [Context.INJECT]
    assert len({usual.digest, *(files.digest for files in others.values())}) == 3


def test_an_init_elsewhere_is_named(store: Images, publish: Publish) -> None:
    image = publish("mine")
    odd = replace(image, facts={**image.facts, "init": "/usr/lib/systemd/systemd"})
    files = store.boot_files(odd, Context.CLOUD_INIT)
    assert files.append.endswith("belljar.init=/usr/lib/systemd/systemd") and files.init == "/usr/lib/systemd/systemd"


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, Firmware.BIOS),
        ({"firmware": []}, Firmware.BIOS),
        ({"firmware": ["bios", "uefi"]}, Firmware.BIOS),
        ({"firmware": ["uefi"]}, Firmware.UEFI),
        ({"firmware": ["bios", "uefi"], "use_firmware": "uefi"}, Firmware.UEFI),
        ({"firmware": "nonsense", "use_firmware": "nonsense"}, Firmware.BIOS),
    ],
)
def test_the_firmware_is_the_one_asked_for_or_the_one_there_is(
    store: Images, publish: Publish, facts: dict[str, object], kind: Firmware
) -> None:
    image = replace(publish("disk", direct=False), facts=facts)
    assert firmware_of(image) is kind
    files = store.boot_files(image, Context.CLOUD_INIT)
    assert (files.kernel, files.append, files.firmware) == (None, "", kind)
