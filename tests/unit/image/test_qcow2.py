"""qcow2 headers: what nobody trusts is refused before QEMU sees it; what we write is what QEMU writes."""

from __future__ import annotations

import struct
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.errors import ImageCorrupt, ImageTooLarge
from belljar.image.intake import sandbox
from belljar.image.intake.sandbox import check_qcow2
from belljar.image.store import qcow2
from belljar.model import GIB, MIB

DATA_NAME, ENCRYPTION = 0x44415441, 0x0537BE77  # kinds of a header's extensions
HOSTILE = {
    "it has a backing file": {8: (">Q", 512), 16: (">I", 11)},
    "a backing file without a length": {8: (">Q", 512)},
    "it is encrypted": {32: (">I", 1)},
    "encrypted with LUKS": {32: (">I", 2)},
    "its data lies in another file": {72: (">Q", qcow2.EXTERNAL_DATA)},
    "marked corrupt": {72: (">Q", qcow2.CORRUPT)},
    "features from the future": {72: (">Q", 1 << 40)},
    "clusters of two bytes": {20: (">I", 1)},
    "clusters of four gigabytes": {20: (">I", 32)},
    "an empty disk": {24: (">Q", 0)},
    "more L1 entries than memory": {36: (">I", 0xFFFFFFFF)},
    "an L1 table that covers less than the disk": {36: (">I", 0)},
    "an L1 table outside of the file": {40: (">Q", 1 << 50)},
    "an L1 table nowhere": {40: (">Q", 0)},
    "a reference table outside of the file": {48: (">Q", 1 << 50)},
    "a reference table without end": {56: (">I", 0xFFFFFFFF)},
    "too many snapshots": {60: (">I", 0xFFFFFFFF)},
    "a header without end": {100: (">I", 0xFFFFFFFF)},
    "a header of nothing": {100: (">I", 0)},
    "version 1": {4: (">I", 1)},
    "version 4": {4: (">I", 4)},
}


def image(path: Path, changes: dict[int, tuple[str, int]] | None = None, size: int = 64 * MIB) -> Path:
    data = bytearray(qcow2.overlay_bytes(b"", size))
    struct.pack_into(">Q", data, 8, 0)
    for at, (form, value) in (changes or {}).items():
        struct.pack_into(form, data, at, value)
    path.write_bytes(data)
    return path


def test_a_plain_image_passes(tmp_path: Path) -> None:
    assert check_qcow2(image(tmp_path / "disk"), GIB) == 64 * MIB


@pytest.mark.parametrize("trick", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, trick: str) -> None:
    with pytest.raises(ImageCorrupt):
        check_qcow2(image(tmp_path / "disk", HOSTILE[trick]), GIB)


@pytest.mark.parametrize("trick", list(HOSTILE)[:6])
def test_what_names_another_file_is_refused_before_qemu_sees_it(
    tmp_path: Path, trick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "run", None)
    with pytest.raises(ImageCorrupt):
        check_qcow2(image(tmp_path / "disk", HOSTILE[trick]), GIB)


@pytest.mark.parametrize("filler", [0, 8, 40])
def test_an_extension_alone_opens_nothing(tmp_path: Path, filler: int) -> None:
    """The name of a file that is not there, and of which the header says nothing: QEMU does not look for it."""
    path = image(tmp_path / "disk")
    data = bytearray(path.read_bytes())
    for kind, is_fine in ((DATA_NAME, True), (ENCRYPTION, False)):
        extensions = struct.pack(">II", 0x6803F857, filler) + bytes(filler) + struct.pack(">II8s", kind, 8, b"/no/file")
        data[104 : 104 + len(extensions)] = extensions
        path.write_bytes(data)
        with nullcontext() if is_fine else pytest.raises(ImageCorrupt):
            assert check_qcow2(path, GIB) == 64 * MIB


def test_an_insane_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageTooLarge):
        check_qcow2(image(tmp_path / "disk", size=2 * GIB), GIB)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200))
def test_no_header_makes_the_reader_do_anything_but_refuse(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = image(tmp_path_factory.getbasetemp() / "fuzz")
    data = bytearray(path.read_bytes())
    data[at : at + len(noise)] = noise
    path.write_bytes(data)
    with suppress(ImageCorrupt, ImageTooLarge):
        assert 0 < qcow2.check_alone(path, GIB) <= GIB
        assert not any(data[8:20]) and not any(data[32:36])


@pytest.mark.parametrize("data", [b"", b"QFI", b"QFI\xfb", b"QFI\xfb" + b"\0" * 60, b"\0" * 200])
def test_a_short_or_foreign_file_is_no_qcow2(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "disk").write_bytes(data)
    with pytest.raises(ImageCorrupt):
        qcow2.virtual_size(tmp_path / "disk")


def test_an_overlay_names_its_image_and_its_size(tmp_path: Path) -> None:
    path = tmp_path / "overlay"
    qcow2.write_overlay(path, Path("/images/base.qcow2"), 3 * GIB)
    data = path.read_bytes()
    at, length = struct.unpack_from(">QI", data, 8)
    assert data[at : at + length] == b"/images/base.qcow2"
    assert qcow2.virtual_size(path) == 3 * GIB
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_overlay_never_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "overlay").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        qcow2.write_overlay(tmp_path / "overlay", Path("/base"), GIB)
    assert (tmp_path / "overlay").read_bytes() == b"precious"


def test_a_path_too_long_for_qcow2_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ImageCorrupt, match="too long"):
        qcow2.write_overlay(tmp_path / "overlay", Path("/" + "x" * 1100), GIB)
