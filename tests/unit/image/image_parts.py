"""Kernels and modules that are hardly more than heads, and small disks that hold them."""

from __future__ import annotations

import io
import json
import lzma
import os
import struct
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from belljar.host import commands
from belljar.image.store.store import Store
from belljar.jobs.disks import survey
from belljar.model import MIB

SECTOR = 512


def elf(*segments: tuple[int, bytes]) -> bytes:
    """A 64-bit x86 ELF file of these (kind, bytes)."""
    table, at = b"", 64 + 56 * len(segments)
    for kind, data in segments:
        table += struct.pack("<IIQQQQQQ", kind, 4, at, 0, 0, len(data), len(data), 4)
        at += len(data)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 0x3E, 1, 0, 64, 0, 0, 64, 56, len(segments), 0, 0, 0
    )
    return head + table + b"".join(data for _, data in segments)


def pvh_note() -> bytes:
    return struct.pack("<III4sI", 4, 4, 18, b"Xen\0", 0x1000000)


def xz(data: bytes) -> bytes:
    """As the kernel's makefile packs it: the unpacked size stands behind it."""
    return lzma.compress(data) + struct.pack("<I", len(data))


def bzimage(payload: bytes, release: str = "6.1.0-9-amd64", *, pack: Callable[[bytes], bytes] = xz) -> bytes:
    """A kernel as distributions ship it, around *payload*."""
    packed = pack(payload)
    setup = bytearray(512 * 5)
    setup[0x1F1] = 4
    setup[0x1FE:0x200] = b"\x55\xaa"
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", setup, 0x20E, 0x300)
    text = f"{release} (builder@example) #1 SMP\0".encode()
    setup[0x500 : 0x500 + len(text)] = text
    struct.pack_into("<II", setup, 0x248, 0, len(packed))
    return bytes(setup) + packed


def system(
    folder: Path, release: str = "6.1.0-9-amd64", *, dep: str = "kernel/virtio_blk.ko:\nkernel/ext4.ko:\n"
) -> Path:
    """The root folder of a system with one kernel, its modules, python3 and a busybox."""
    usr = folder / "usr"
    modules = usr / "lib/modules" / release
    for path in (folder / "boot", usr / "bin", modules / "kernel", folder / "var/lib/dpkg", folder / "run"):
        path.mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "lib").symlink_to("usr/lib")
    (folder / "boot" / f"vmlinuz-{release}").write_bytes(bzimage(elf((1, b"text"), (4, pvh_note())), release))
    (modules / "modules.dep").write_text(dep)
    (modules / "modules.builtin").write_text("kernel/fs/9p/9p.ko\n")
    for name in ("virtio_blk", "ext4"):
        (modules / "kernel" / f"{name}.ko").write_bytes(elf((1, name.encode())))
    (usr / "bin/busybox").write_bytes(elf((1, b"busybox")))
    (usr / "bin/python3").symlink_to("python3.11")
    (usr / "lib/os-release").write_text('NAME=Small\nPRETTY_NAME="Small Linux 1"\n')
    (folder / "var/lib/dpkg/status").write_text(
        "Package: a\nStatus: install ok installed\n\nPackage: b\nStatus: install ok installed\n"
    )
    return folder


def ext4(path: Path, root: Path | None = None, *, size: int = 4 * MIB, offset: int = 0) -> Path:
    """A file system at *offset* of the file *path*, with what lies in *root*."""
    if not path.exists():
        path.touch()
    os.truncate(path, max(path.stat().st_size, offset + size))
    argv = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", f"offset={offset},nodiscard"]
    commands.run([*argv, *(["-d", str(root)] if root else []), str(path), f"{size // 1024}k"], timeout=30)
    return path


def mbr(path: Path, *starts: int) -> None:
    """Write a partition table with Linux partitions that begin at these sectors."""
    with open(path, "r+b") as file:
        for index, start in enumerate(starts):
            file.seek(446 + 16 * index)
            file.write(struct.pack("<B3sB3sII", 0, b"", 0x83, b"", start, 8192))
        file.seek(510)
        file.write(b"\x55\xaa")


def gpt(path: Path, *, kind: bytes = bytes([15]) * 16, **starts: int) -> None:
    """Write a GUID partition table; p1=2048 is the first partition, beginning at sector 2048."""
    mbr(path)
    last = path.stat().st_size // SECTOR - 1
    table = bytearray(128 * 128)
    for name, start in starts.items():
        struct.pack_into("<16s16sQQ", table, 128 * (int(name[1:]) - 1), kind, bytes([1]) * 16, start, start + 1023)
    whole = 0, 1, last, 34, last - 33, bytes(16), 2, 128, 128, zlib.crc32(table)
    head = struct.pack("<8sIIIIQQQQ16sQIII", b"EFI PART", 0x10000, 92, 0, *whole)
    head = head[:16] + struct.pack("<I", zlib.crc32(head)) + head[20:]
    with open(path, "r+b") as file:
        file.seek(446)
        file.write(struct.pack("<B3sB3sII", 0, b"", 0xEE, b"", 1, last))
        file.seek(SECTOR)
        file.write(head.ljust(SECTOR, b"\0") + table)


def surveyor(root: Path, **place: Any) -> Callable[[Path, int, Path], None]:
    """Writes the archive a machine would send of the system in *root*, with what it says of its place; without: a build's."""

    def write(disk: Path, size: int, target: Path) -> None:
        with tarfile.open(target, "w") as tar:
            if place:
                said = json.dumps(place).encode()
                head = tarfile.TarInfo("survey.json")
                head.size = len(said)
                tar.addfile(head, io.BytesIO(said))
            tar.add(root, ".")

    return write


class Looking:
    """A workshop whose machines find what lies in *root* on every disk."""

    def __init__(self, root: Path, target: Path) -> None:
        self._root, self._target = root, target

    async def survey(self, disk: Any, modules: Any, sink: Any) -> None:
        surveyor(self._root, number=0, fstype="ext4")(disk.disk, disk.virtual_size, self._target)
        await sink.write(self._target.read_bytes())


def runtime(store: Store, root: Path | None = None) -> Any:
    """What verbs for images use of a runtime; with a *root*, machines of the image `base` look into disks."""
    settings = SimpleNamespace(image=replace(store.settings, default="base"))
    workshop = Looking(root, store.folder.parent / "told.tar") if root else None
    runtime = SimpleNamespace(images=store, settings=settings, workshop=lambda: workshop)
    store.surveyor = lambda *disk: survey(runtime, *disk)  # type: ignore[arg-type]
    return runtime
