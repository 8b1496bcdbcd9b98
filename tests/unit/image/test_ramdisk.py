"""From a distribution's kernel and modules to a ramdisk that starts the agent: archive, kernel file, modules, scripts."""

from __future__ import annotations

import bz2
import gzip
import lzma
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.image.image_parts import bzimage, elf, pvh_note, xz

from belljar.errors import ImageCorrupt
from belljar.host import commands
from belljar.host.python.elf import INTERP
from belljar.image.boot import cpio, initramfs, kernel, modules
from belljar.image.store.store import Store
from belljar.model import MIB

PVH_KERNEL = elf((1, b"text"), (4, struct.pack("<III4sI", 4, 4, 1, b"GNU\0", 0) + pvh_note()))
MODULE = elf((1, b"module"))
FOLDER = "/lib/modules/6.1.0"


def members(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(name, mode, content) of an archive, as the kernel reads it."""
    at = 0
    while data[at : at + 6] == b"070701":
        fields = [int(data[at + 6 + 8 * index : at + 14 + 8 * index], 16) for index in range(13)]
        name = data[at + 110 : at + 110 + fields[11] - 1].decode()
        start = at + -(-(110 + fields[11]) // 4) * 4
        if name == cpio.TRAILER:
            return
        yield name, fields[1], data[start : start + fields[6]]
        at = start + -(-fields[6] // 4) * 4


def test_an_archive_is_what_cpio_reads(tmp_path: Path) -> None:
    entries = [
        cpio.folder("a"),
        cpio.file("a/odd", b"12345", 0o755),
        ("a/link", stat.S_IFLNK | 0o777, b"odd", (0, 0)),
        cpio.file("empty", b""),
    ]
    data = cpio.archive(entries)
    assert [(name, content) for name, _, content in members(data)] == [
        ("a", b""),
        ("a/odd", b"12345"),
        ("a/link", b"odd"),
        ("empty", b""),
    ]
    listing = commands.run(["cpio", "--list", "--verbose", "--quiet"], timeout=10, stdin=data).out.decode()
    assert [line.split()[0] for line in listing.splitlines()] == [
        "drwxr-xr-x",
        "-rwxr-xr-x",
        "lrwxrwxrwx",
        "-rw-r--r--",
    ]


def test_an_archive_is_the_same_each_time() -> None:
    entries = [("console", stat.S_IFCHR | 0o600, b"", (5, 1)), cpio.file("x", b"y")]
    assert cpio.archive(entries) == cpio.archive(entries)


@pytest.mark.parametrize("pack", [xz, gzip.compress], ids=["xz", "gzip"])
def test_the_kernel_proper_is_taken_out_of_its_packing(pack: object) -> None:
    data = bzimage(PVH_KERNEL, pack=pack)  # type: ignore[arg-type]
    assert kernel.directly_bootable(data) == PVH_KERNEL
    assert kernel.release(data) == "6.1.0-9-amd64"


def test_a_kernel_packed_with_zstd_is_unpacked_by_its_program() -> None:
    def pack(data: bytes) -> bytes:
        return commands.run(["zstd", "-q", "-c"], timeout=10, stdin=data).out + struct.pack("<I", len(data))

    assert kernel.directly_bootable(bzimage(PVH_KERNEL, pack=pack)) == PVH_KERNEL


def test_a_kernel_without_the_pvh_note_is_booted_as_it_is() -> None:
    assert kernel.directly_bootable(bzimage(elf((1, b"text")))) is None
    assert kernel.directly_bootable(bzimage(b"no elf")) is None
    assert kernel.directly_bootable(bzimage(PVH_KERNEL, pack=bz2.compress)) is None
    assert kernel.directly_bootable(bzimage(PVH_KERNEL, pack=lambda data: b"?" + data)) is None


def kernel_at(place: int, size: int) -> bytes:
    """A kernel of one segment that is loaded to *place* and takes *size*."""
    header = bytearray(64)
    header[:5] = b"\x7fELF\x02"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 1)
    return bytes(header) + struct.pack("<IIQQQQQQ", 1, 5, 0, 0, place, 0, size, 1)


def test_the_least_memory_follows_from_kernel_and_ramdisk() -> None:
    """The first is Debian 12's, which came up with 96 MiB and not with 88."""
    debian = kernel_at(0x3079000, 26140 << 10)
    assert kernel.least_memory(debian, b"070701" + bytes(7604 << 10)) == 96 * MIB
    assert kernel.least_memory(debian, b"\xfd7zXZ" + bytes(7604 << 10)) == 112 * MIB, "packed: it is larger inside"
    packed = bytearray(bzimage(b"x"))
    struct.pack_into("<QI", packed, 0x258, 16 * MIB, 40 * MIB)
    assert kernel.least_memory(bytes(packed), b"") == 64 * MIB


@pytest.mark.parametrize(
    "data", [b"", b"no kernel", kernel_at(1 << 40, 1), kernel_at(0, 0), kernel_at(0, 1 << 63)[:70]]
)
def test_of_what_is_no_kernel_no_least_memory_is_known(data: bytes) -> None:
    assert kernel.least_memory(data, b"") == 0


@pytest.mark.parametrize("harm", [0, 10, 512, 2600, -20])
def test_a_truncated_kernel_is_never_booted_directly(harm: int) -> None:
    assert kernel.directly_bootable(bzimage(PVH_KERNEL)[:harm]) is None


def test_what_is_no_kernel_has_no_release() -> None:
    assert kernel.release(b"") == kernel.release(MODULE) == "" and not kernel.is_bzimage(b"")
    with pytest.raises(ImageCorrupt):
        kernel.unpack(MODULE)


DEP = """\
kernel/drivers/virtio/virtio.ko:
kernel/drivers/virtio/virtio_ring.ko: kernel/drivers/virtio/virtio.ko
kernel/drivers/virtio/virtio_pci.ko{end}: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/drivers/block/virtio_blk.ko: kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/fs/ext4/ext4.ko: kernel/fs/jbd2/jbd2.ko
kernel/fs/jbd2/jbd2.ko:
kernel/net/9p/9pnet.ko:
kernel/net/9p/9pnet_virtio.ko: kernel/net/9p/9pnet.ko kernel/drivers/virtio/virtio_ring.ko kernel/drivers/virtio/virtio.ko
kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko
kernel/crypto/crc32c-generic.ko:
"""


def reader(end: str = "", data: bytes = MODULE) -> modules.Reader:
    def read(path: str) -> bytes:
        if path == f"{FOLDER}/modules.dep":
            return DEP.format(end=end).encode()
        assert path.startswith(f"{FOLDER}/kernel/")
        return data if end and path.endswith(end) else MODULE

    return read


def test_modules_come_after_what_they_need_and_once() -> None:
    chosen = modules.select(reader(), FOLDER, "ext4")
    assert chosen.groups["always"] == [
        "virtio.ko",
        "virtio_ring.ko",
        "virtio_pci.ko",
        "virtio_blk.ko",
        "crc32c_generic.ko",
        "jbd2.ko",
        "ext4.ko",
    ]
    assert "net" not in chosen.groups  # this kernel has no virtio_net
    assert set(chosen.files) == {name for names in chosen.groups.values() for name in names}


@pytest.mark.parametrize(("end", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_packed_modules_are_unpacked(end: str, pack: object) -> None:
    chosen = modules.select(reader(end, pack(MODULE)), FOLDER, "ext4")  # type: ignore[operator]
    assert chosen.files["virtio_pci.ko"] == MODULE


@pytest.mark.parametrize(("end", "data"), [(".xz", b"no xz"), (".gz", b"no gzip"), (".xz", lzma.compress(b"no elf"))])
def test_a_module_that_is_none_is_refused(end: str, data: bytes) -> None:
    with pytest.raises(ImageCorrupt):
        modules.select(reader(end, data), FOLDER, "ext4")


def test_the_ramdisk_has_a_shell_drivers_and_an_init_to_start(store: Store) -> None:
    first = initramfs.image_part(b"busybox", modules.select(reader(), FOLDER, "ext4"))
    found = {
        name: (mode, content)
        for data in (first, initramfs.agent_part(store.interpreter()))
        for name, mode, content in members(data)
    }
    assert stat.S_IMODE(found["init"][0]) == 0o755 and found["init"][1].startswith(b"#!/bin/sh")
    assert stat.S_IMODE(found["belljar/init"][0]) == 0o755 and stat.S_IMODE(found["belljar/agent/loader"][0]) == 0o755
    assert stat.S_IMODE(found["inject/belljar-agent.service"][0]) == 0o644 and "belljar/agent/agent.pyc" in found
    assert found["bin/sh"][1] == b"busybox" and found["bin/busybox"][1] == b"busybox"
    assert found["modules/always"][1].splitlines()[0] == b"virtio.ko" and found["modules/virtio.ko"][1] == MODULE
    assert all(name.rpartition("/")[0] in ("", *found) for name in found)


def test_every_program_init_calls_is_in_the_ramdisk() -> None:
    builtin = {"read", "echo", "exec", "load", "give_up", "export"}
    words = {line.split()[0] for line in (initramfs.INSIDE / "init").read_text().splitlines() if line.strip()}
    programs = {
        word
        for word in words
        if word
        in {
            "mount",
            "insmod",
            "switch_root",
            "poweroff",
            "sleep",
            "mkdir",
            "cp",
            "ln",
            "ifconfig",
            "rm",
            "mv",
            "cat",
            "mknod",
        }
    }
    assert programs <= set(initramfs.APPLETS) | builtin


@pytest.mark.parametrize("script", ["init", "guest-init"])
def test_the_scripts_are_sound_for_every_shell(script: str) -> None:
    for shell in (["sh"], ["busybox", "sh"]):
        commands.run([*shell, "-n", str(initramfs.INSIDE / script)], timeout=10)


def test_only_a_static_program_can_be_the_ramdisks_shell() -> None:
    assert initramfs.is_static(elf((1, b"code")))
    assert not initramfs.is_static(elf((1, b"code"), (INTERP, b"/lib64/ld-linux-x86-64.so.2\0")))
    assert not initramfs.is_static(b"#!/bin/sh") and not initramfs.is_static(b"")
