"""Files as tar streams: what is packed comes out the same, and a hostile stream writes nothing outside of its place."""

import io
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from belljar.agent.transfer.tar import pack
from belljar.agent.transfer.untar import unpack

MIB = 1 << 20


def packed(source: Path) -> bytes:
    parts: list[bytes] = []
    pack(os.fsencode(source), parts.append)
    return b"".join(parts)


def unpacked(data: bytes, target: Path, name: bytes = b"name", mask: int = 0o7777) -> None:
    unpack(io.BytesIO(data).read, os.fsencode(target), name, mask)


def copied(source: Path, target: Path) -> None:
    unpacked(packed(source), target)


def facts(root: Path) -> dict[bytes, tuple[Any, ...]]:
    """Everything that is to survive, by path below *root*."""
    found: dict[bytes, tuple[Any, ...]] = {}
    names: dict[tuple[int, int], bytes] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        key, now = os.fsencode(path.relative_to(root)), path.lstat()
        same = names.setdefault((now.st_dev, now.st_ino), key)
        content: object = None
        if stat.S_ISREG(now.st_mode):
            content = path.read_bytes()
        elif stat.S_ISLNK(now.st_mode):
            content = os.readlink(os.fsencode(path))
        mode = now.st_mode if not stat.S_ISLNK(now.st_mode) else stat.S_IFLNK
        found[key] = (mode, content, now.st_mtime_ns, same)
    return found


# -- what is packed comes out the same -----------------------------------------------------------------------------------


def test_modes_times_links_and_odd_names_are_kept(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "a/b/file").write_bytes(b"content")
    os.link(tree / "a/b/file", tree / "hard")
    (tree / "soft").symlink_to("../outside/\udcff")
    for name in (b"\xff\xfe", b"two\nlines", b" ", b"-rf", "\N{SNOWMAN}".encode(), b"x" * 255, b"back\\slash"):
        (tree / os.fsdecode(name)).write_bytes(name)
    (tree / "empty").mkdir()
    for path, mode, moment in ((tree / "a/b/file", 0o640, 1), (tree / "empty", 0o500, -5), (tree / "a", 0o711, 2**33)):
        path.chmod(mode)
        os.utime(path, ns=(moment * 10**9 + 123456789, moment * 10**9 + 123456789))
    copied(tree, tmp_path / "copy")
    assert facts(tmp_path / "copy") == facts(tree)


def test_a_folder_that_may_not_be_written_to_keeps_its_files(tmp_path: Path) -> None:
    (tmp_path / "tree/shut").mkdir(parents=True)
    (tmp_path / "tree/shut/file").write_bytes(b"x")
    (tmp_path / "tree/shut").chmod(0o555)
    copied(tmp_path / "tree", tmp_path / "copy")
    assert facts(tmp_path / "copy") == facts(tmp_path / "tree")


HOLES = [
    [(0, 4096)], [(8 * MIB - 5, 5)], [(MIB, 4096), (3 * MIB, 70000), (8 * MIB - 4096, 4096)], [(0, 10), (5 * MIB, 1)], [],
]  # fmt: skip


@pytest.mark.parametrize("parts", HOLES)
def test_holes_stay_holes(tmp_path: Path, parts: list[tuple[int, int]]) -> None:
    source, copy = tmp_path / "sparse", tmp_path / "copy"
    with source.open("wb") as file:
        file.truncate(8 * MIB)
        for offset, length in parts:
            file.seek(offset)
            file.write(os.urandom(length))
    data = packed(source)
    assert len(data) < sum(length for _, length in parts) + 100_000
    unpacked(data, copy)
    assert copy.read_bytes() == source.read_bytes()
    assert copy.stat().st_blocks <= source.stat().st_blocks + 64
