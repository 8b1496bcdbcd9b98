"""Files that lie, against QEMU itself: what the check lets pass opens nothing else, ends, and stays within its limits."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.errors import BelljarError, ImageCorrupt, ImageMismatch, ImageTooLarge
from belljar.host import commands
from belljar.image.intake import sources
from belljar.image.intake.sandbox import check_qcow2, run
from belljar.image.progress import Progress
from belljar.image.store import qcow2
from belljar.model import GIB, MIB

SIZE = 4 * MIB
LARGEST = 64 * MIB
OPTIONS = {
    "plain": (), "small clusters": ("-o", "cluster_size=512"), "version 2": ("-o", "compat=0.10"), "compressed": ("-c",),
    "zstd": ("-c", "-o", "compression_type=zstd"), "extended": ("-o", "extended_l2=on,cluster_size=128k"),
    "narrow counts": ("-o", "refcount_bits=1"), "wide counts": ("-o", "refcount_bits=64"), "lazy": ("-o", "lazy_refcounts=on"),
}  # fmt: skip


class Seeds(dict[str, bytes]):
    """Megabytes that are not worth printing when a test fails."""

    def __repr__(self) -> str:
        return "the seeds"


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Seeds:
    """A small disk in every form QEMU writes."""
    folder = tmp_path_factory.mktemp("seeds")
    raw = folder / "raw"
    raw.write_bytes(bytes(510) + b"\x55\xaa" + os.urandom(64 << 10) + bytes(SIZE - 512 - (64 << 10)))
    found = Seeds()
    for name, options in OPTIONS.items():
        argv = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, str(raw), str(folder / "disk")]
        commands.run(argv, timeout=30)
        found[name] = (folder / "disk").read_bytes()
    return found


def opened(path: Path) -> dict[str, object]:
    """What QEMU makes of it, in the sandbox; an empty one when it refuses."""
    try:
        printed = run(["qemu-img", "info", "-U", "--output=json", "-f", "qcow2", "{0}"], [path], 20, MIB)
    except (ImageCorrupt, ImageTooLarge):  # too large: the list of snapshots that a header promises
        return {}
    value = json.loads(printed)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("form", OPTIONS)
def test_every_form_qemu_writes_passes(seeds: Seeds, tmp_path: Path, form: str) -> None:
    path = tmp_path / "disk"
    path.write_bytes(seeds[form])
    assert check_qcow2(path, LARGEST) == SIZE and opened(path)["virtual-size"] == SIZE


def test_what_belljar_writes_passes(tmp_path: Path) -> None:
    data = bytearray(qcow2.overlay_bytes(b"", GIB))
    struct.pack_into(">Q", data, 8, 0)
    (tmp_path / "disk").write_bytes(data)
    assert check_qcow2(tmp_path / "disk", GIB) == GIB


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_passes_opens_no_other_file_whatever_its_header_says(
    seeds: Seeds, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The header and what follows it are changed; where the check lets it pass, QEMU sees no other file in it."""
    disk = bytearray(seeds[data.draw(st.sampled_from(sorted(OPTIONS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 136) | st.integers(136, 600))
        noise = data.draw(
            st.binary(min_size=1, max_size=8) | st.sampled_from([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\1"])
        )
        disk[at : at + len(noise)] = noise
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(disk)
    try:
        size = qcow2.check_alone(path, LARGEST)
    except (ImageCorrupt, ImageTooLarge):
        return
    seen = opened(path)
    assert not {"backing-filename", "full-backing-filename", "encrypted"} & set(seen)
    specific = seen.get("format-specific", {})
    assert isinstance(specific, dict)
    assert not {"data-file", "encrypt"} & set(specific.get("data", {}))
    if seen:
        assert seen["virtual-size"] == size <= LARGEST


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_an_import_of_anything_ends_in_a_disk_or_a_refusal(
    seeds: Seeds, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Tables, counts and clusters are changed too."""
    disk = bytearray(seeds[data.draw(st.sampled_from(sorted(OPTIONS)))])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(disk) - 9)) & ~7
        struct.pack_into(
            ">Q", disk, at, data.draw(st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 1 << 62, 1 << 63, len(disk)]))
        )
    folder = tmp_path_factory.mktemp("import")
    (folder / "blob").write_bytes(disk[: data.draw(st.integers(0, len(disk)) | st.just(len(disk)))])
    try:
        sources.to_raw(folder / "blob", folder, LARGEST, Progress())
        raw = folder / "disk.raw"
    except BelljarError as exc:
        assert isinstance(exc, (ImageCorrupt, ImageTooLarge, ImageMismatch)), exc
    else:
        assert 0 < raw.stat().st_size <= LARGEST


# -- lies made by hand -------------------------------------------------------------------------------------------------


def lie(form: str) -> Callable[[bytearray], None]:
    """Change a plain disk in one way."""

    def change(disk: bytearray) -> None:
        (bits,) = struct.unpack_from(">I", disk, 20)
        l1_at, counts_at = struct.unpack_from(">QQ", disk, 40)
        (l2,) = struct.unpack_from(">Q", disk, l1_at)
        l2_at = l2 & ((1 << 56) - 1)
        if form == "l1 points at itself":
            struct.pack_into(">Q", disk, l1_at, l1_at | 1 << 63)
        elif form == "l1 points at the header":
            struct.pack_into(">Q", disk, l1_at, 1 << 63)
        elif form == "l2 points behind the end":
            struct.pack_into(">Q", disk, l2_at, 1 << 50 | 1 << 63)
        elif form == "all clusters are one":
            for index in range(SIZE >> bits):
                struct.pack_into(">Q", disk, l2_at + 8 * index, struct.unpack_from(">Q", disk, l2_at)[0])
        elif form == "counts of nothing":
            at = struct.unpack_from(">Q", disk, counts_at)[0]
            disk[at : at + 64] = bytes(64)
        elif form == "no counts":
            struct.pack_into(">Q", disk, counts_at, 0)
        elif form == "a compressed cluster behind the end":
            struct.pack_into(">Q", disk, l2_at, 1 << 62 | len(disk) + (1 << 20))

    return change


LIES = (
    "l1 points at itself", "l1 points at the header", "l2 points behind the end", "all clusters are one", "counts of nothing",
    "no counts", "a compressed cluster behind the end",
)  # fmt: skip


@pytest.mark.parametrize("form", LIES)
def test_tables_and_counts_that_lie_are_refused(seeds: Seeds, tmp_path: Path, form: str) -> None:
    disk = bytearray(seeds["plain"])
    lie(form)(disk)
    (tmp_path / "blob").write_bytes(disk)
    with pytest.raises(ImageCorrupt):
        sources.to_raw(tmp_path / "blob", tmp_path, LARGEST, Progress())


HEADERS: dict[str, tuple[int, str, int]] = {
    "an L1 table that ends behind the file": (36, ">I", 1 << 20),
    "an L1 table in the header": (40, ">Q", 8),
    "an L1 table between clusters": (40, ">Q", (3 << 16) + 8),
    "a reference table of no clusters": (56, ">I", 0),
    "a reference table of 256 MiB": (56, ">I", 4096),
    "a reference table in the header": (48, ">Q", 8),
    "counts of 2 ** 200 bits": (96, ">I", 200),
    "snapshots behind the end": (60, ">I", 3),
    "a header that ends within a word": (100, ">I", 107),
    "a compression without its mark": (104, ">B", 1),
    "a compression nobody knows": (104, ">B", 77),
}


@pytest.mark.parametrize("trick", HEADERS)
def test_headers_that_lie_are_refused(seeds: Seeds, tmp_path: Path, trick: str) -> None:
    disk = bytearray(seeds["plain"])
    at, form, value = HEADERS[trick]
    struct.pack_into(form, disk, at, value)
    (tmp_path / "disk").write_bytes(disk)
    with pytest.raises(ImageCorrupt):
        check_qcow2(tmp_path / "disk", LARGEST)


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["create", "-u", "-f", "qcow2", "-F", "raw", "-b", "/etc/shadow", "{disk}", "4M"], "backing file"),
        (["create", "-u", "-f", "qcow2", "-F", "raw", "-b", 'json:{"driver":"raw","file.filename":"/etc/shadow"}', "{disk}", "4M"], "backing file"),
        (["create", "-f", "qcow2", "-o", "data_file={folder}/secret,data_file_raw=on", "{disk}", "4M"], "another file"),
        (["create", "-f", "qcow2", "--object", "secret,id=s,data=abc", "-o", "encrypt.format=aes,encrypt.key-secret=s", "{disk}", "4M"], "encrypted"),
        (["create", "-f", "qcow2", "-o", "cluster_size=2M", "{disk}", "1E"], "the limit is"),
        (["create", "-f", "vmdk", "{disk}", "4M"], "neither a qcow2 file nor a disk"),
    ],
)  # fmt: skip
def test_what_qemu_img_itself_makes_hostile_is_refused(tmp_path: Path, argv: list[str], what: str) -> None:
    disk = tmp_path / "blob"
    (tmp_path / "secret").write_bytes(b"a secret of the host")
    words = [word.replace("{disk}", str(disk)).replace("{folder}", str(tmp_path)) for word in argv]
    commands.run(["qemu-img", *words], timeout=60)
    with pytest.raises((ImageCorrupt, ImageTooLarge), match=what):
        sources.to_raw(disk, tmp_path, LARGEST, Progress())
    assert not (tmp_path / "disk.raw").exists()
