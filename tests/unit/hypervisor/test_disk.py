"""The files of a disk, read from headers a test wrote byte by byte."""

import struct
from pathlib import Path

import pytest

from belljar.errors import ImageCorrupt
from belljar.hypervisor.qemu.process.launch import Wiring


def layers(top: Path) -> list[Path]:
    with Wiring((0, 0)) as wires:
        return list(wires.disk(top))


def qcow2(path: Path, backing: str = "", length: int | None = None) -> Path:
    name = backing.encode()
    size = len(name) if length is None else length
    path.write_bytes(struct.pack(">4sIQI", b"QFI\xfb", 3, 512 if backing else 0, size).ljust(512, b"\0") + name)
    return path


def test_the_overlay_comes_first_and_the_base_last(tmp_path: Path) -> None:
    base = qcow2(tmp_path / "base")
    middle = qcow2(tmp_path / "middle", str(base))
    assert layers(qcow2(tmp_path / "top", str(middle))) == [tmp_path / "top", middle, base]


def test_a_relative_name_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    base = qcow2(tmp_path / "base")
    assert layers(qcow2(tmp_path / "top", "base")) == [tmp_path / "top", base]


def test_a_circle_ends(tmp_path: Path) -> None:
    qcow2(tmp_path / "a", str(tmp_path / "b"))
    qcow2(tmp_path / "b", str(tmp_path / "a"))
    with pytest.raises(ImageCorrupt, match="files deep"):
        layers(tmp_path / "a")


@pytest.mark.parametrize("content", [b"", b"QFI", b"\0" * 4096, b"#!/bin/sh\n" * 100])
def test_what_is_no_qcow2_file_is_not_guessed_at(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "base").write_bytes(content)
    with pytest.raises(ImageCorrupt, match="not a qcow2 file"):
        layers(qcow2(tmp_path / "top", "base"))


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="gone: missing"):
        layers(qcow2(tmp_path / "top", "gone"))


def test_an_endless_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="bytes long"):
        layers(qcow2(tmp_path / "top", "x", length=1 << 30))
