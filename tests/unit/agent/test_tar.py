"""Files as tar streams: what is packed comes out the same, and a hostile stream writes nothing outside of its place."""

import contextlib
import io
import os
import stat
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from belljar.agent.guest.system import Refused
from belljar.agent.transfer import tar
from belljar.agent.transfer.tar import CHUNK, DEEPEST, Packer
from belljar.agent.transfer.untar import TarSource, unpack

MIB = 1 << 20


def pack(source: bytes, write: Callable[[bytes], object], skip: tuple[bytes, ...] = (), since: int = 0) -> None:
    Packer(write, skip, since).pack(source)


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


@pytest.mark.parametrize(
    "parts",
    [*HOLES, [(5 * MIB + 100, 3 * CHUNK + 17)], [(0, 2 * CHUNK), (3 * CHUNK, 1), (8 * MIB - CHUNK - 1, CHUNK + 1)]],
)
def test_holes_stay_holes_where_the_file_system_does_not_tell_where_they_are(
    tmp_path: Path, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """squashfs, for one: all of a file is data, says lseek, and it has few blocks, says stat."""
    size, seek = 8 * MIB, os.lseek
    untold = {os.SEEK_DATA: lambda at: at, os.SEEK_HOLE: lambda at: size}
    monkeypatch.setattr(os, "lseek", lambda fd, at, how: untold[how](at) if how in untold else seek(fd, at, how))
    source, copy = tmp_path / "sparse", tmp_path / "copy"
    with source.open("wb") as file:
        file.truncate(size)
        for offset, length in parts:
            file.seek(offset)
            file.write(os.urandom(length))
    data = packed(source)
    assert len(data) < sum(length + 2 * CHUNK for _, length in parts) + 100_000
    unpacked(data, copy)
    assert copy.read_bytes() == source.read_bytes()


@given(st.lists(st.sampled_from([b"\0", b"\0\0\0\0", b"x", b"xy\0z"]), max_size=40))
def test_what_is_found_by_reading_is_all_that_is_not_zero(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    fd = os.memfd_create("data")
    os.write(fd, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar, "CHUNK", 4)
        parts = tar.parts_by_reading(fd, len(data))
    os.close(fd)
    back = bytearray(len(data))
    for (begin, length), (following, _) in pairwise([*parts, (len(data) + 1, 0)]):
        assert length > 0 and begin + length < following, "in order, and joined where they touch"
        back[begin : begin + length] = data[begin : begin + length]
    assert bytes(back) == data and sum(length for _, length in parts) <= 4 * len(data.replace(b"\0", b""))


def test_a_file_that_may_be_compressed_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "half").open("wb") as file:
        file.write(os.urandom(2 * MIB))
        file.truncate(4 * MIB)
    monkeypatch.setattr(os, "lseek", lambda fd, at, how: at if how == os.SEEK_DATA else 4 * MIB)
    read, seen = os.pread, list[int]()
    monkeypatch.setattr(os, "pread", lambda fd, size, at: seen.append(at) or read(fd, size, at))
    assert len(packed(tmp_path / "half")) > 4 * MIB and len(seen) == len(set(seen))


def test_other_tar_programs_read_what_is_packed(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with (tmp_path / "tree/sparse").open("wb") as file:
        file.seek(4 * MIB)
        file.write(b"end")
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xC", tmp_path / "out"], input=packed(tmp_path / "tree"), check=True, timeout=20)
    assert (tmp_path / "out/r/sparse").read_bytes() == bytes(4 * MIB) + b"end"


content = st.binary(max_size=1200)
names = st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & {0, 47} and name not in (b".", b".."))
trees = st.recursive(content, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=8)


@given(trees, st.lists(st.integers(1, 700), min_size=1, max_size=5))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_tree_comes_out_as_it_went_in_however_the_stream_is_cut(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("trees")
    plant(folder / "tree", tree)
    data, at = packed(folder / "tree"), 0

    def read(limit: int) -> bytes:
        nonlocal at
        size = min(limit, sizes[at % len(sizes)])
        at += size
        return data[at - size : at]

    unpack(read, os.fsencode(folder / "copy"), b"name")
    assert facts(folder / "copy") == facts(folder / "tree")


def plant(path: Path, tree: Any) -> None:
    if isinstance(tree, bytes):
        path.write_bytes(tree)
        return
    path.mkdir()
    for name, inner in tree.items():
        plant(path / os.fsdecode(name), inner)


def test_special_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    os.mkfifo(tmp_path / "tree/pipe")
    (tmp_path / "tree/file").write_bytes(b"x")
    copied(tmp_path / "tree", tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["file"]


def test_who_names_a_link_means_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to("real")
    copied(tmp_path / "link", tmp_path / "copy")
    assert not (tmp_path / "copy").is_symlink() and (tmp_path / "copy").read_bytes() == b"x"


# -- where it goes -------------------------------------------------------------------------------------------------------


def test_a_file_goes_into_a_folder_that_is_there_and_replaces_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"new")
    (tmp_path / "folder").mkdir()
    (tmp_path / "old").write_bytes(b"old")
    copied(tmp_path / "file", tmp_path / "folder")
    copied(tmp_path / "file", tmp_path / "old")
    assert ((tmp_path / "folder/name").read_bytes(), (tmp_path / "old").read_bytes()) == (b"new", b"new")


def test_missing_folders_on_the_way_are_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    copied(tmp_path / "file", tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").read_bytes() == b"x"


def test_a_folder_is_merged_into_one_that_is_there_and_leaves_its_mode(tmp_path: Path) -> None:
    (tmp_path / "tree/both").mkdir(parents=True)
    (tmp_path / "tree/both/new").write_bytes(b"new")
    (tmp_path / "there/both").mkdir(parents=True, mode=0o701)
    (tmp_path / "there/both/old").write_bytes(b"old")
    (tmp_path / "there/both").chmod(0o701)
    copied(tmp_path / "tree", tmp_path / "there")
    assert {path.name for path in (tmp_path / "there/both").iterdir()} == {"new", "old"}
    assert stat.S_IMODE((tmp_path / "there/both").stat().st_mode) == 0o701


def test_no_set_uid_bit_comes_out_of_a_guest(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "file").chmod(0o6755)
    unpacked(packed(tmp_path / "file"), tmp_path / "copy", mask=0o777)
    assert stat.S_IMODE((tmp_path / "copy").stat().st_mode) == 0o755


def test_what_goes_away_while_it_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder after its name was sent; a file after it was looked at, once as the first of two names."""
    source, parts = tmp_path / "source", []
    for name in ("folder/in", "gone", "stays"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    os.link(source / "gone", source / "other")
    look, fleeting = os.lstat, {b"gone", b"other"}

    def write(data: bytes) -> None:
        parts.append(data)
        if b"r/folder/" in data:
            os.unlink(source / "folder/in")
            os.rmdir(source / "folder")

    def looked(path: bytes) -> os.stat_result:
        found = look(path)
        if os.path.basename(path) in fleeting:
            fleeting.clear()
            os.unlink(path)
        return found

    monkeypatch.setattr(os, "lstat", looked)
    pack(os.fsencode(source), write)
    monkeypatch.undo()
    unpacked(b"".join(parts), tmp_path / "target")
    (left,) = {"gone", "other"} & set(os.listdir(source))
    assert sorted(os.listdir(tmp_path / "target")) == sorted(["folder", left, "stays"])
    assert (tmp_path / "target" / left).read_text() == "gone" and not os.listdir(tmp_path / "target/folder")


def test_a_link_that_goes_away_while_it_is_packed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/gone").symlink_to("anywhere")
    (tmp_path / "source/stays").write_text("x")
    read = os.readlink

    def gone(path: bytes) -> bytes:
        os.unlink(path)
        return read(path)

    monkeypatch.setattr(os, "readlink", gone)
    copied(tmp_path / "source", tmp_path / "copy")
    assert os.listdir(tmp_path / "copy") == ["stays"]


@pytest.mark.parametrize("path", ["/no/such/file", "/dev/null/below"])
def test_a_source_that_is_missing_is_told_as_missing(path: str) -> None:
    with pytest.raises(Refused) as caught:
        packed(Path(path))
    assert caught.value.kind == "missing"


def test_a_device_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="neither a file nor a folder"):
        packed(Path("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Refused, match="not replaced"):
        copied(tmp_path / "file", tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(Refused) as caught:
        unpack(full_disk, os.fsencode(tmp_path / "copy"), b"name")
    assert caught.value.kind == "space"


def full_disk(limit: int) -> bytes:
    raise OSError(28, "No space left on device")


# -- hostile streams -----------------------------------------------------------------------------------------------------

Change = Callable[[tarfile.TarInfo], None]


def member(name: str, kind: bytes = tarfile.REGTYPE, **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.mode = kind, 0o755
    data = changes.pop("data", b"")
    info.size = len(data)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, data


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    whole = b""
    for info, data in members:
        whole += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)
    return whole + bytes(1024)


ROOT = member("r", tarfile.DIRTYPE)
HOSTILE = {
    "parent": [ROOT, member("r/../../escaped", data=b"x")],
    "absolute": [ROOT, member("/escaped", data=b"x")],
    "dot": [ROOT, member("r/./x", data=b"x")],
    "other root": [ROOT, member("escaped", data=b"x")],
    "through a link": [ROOT, member("r/link", tarfile.SYMTYPE, linkname=".."), member("r/link/escaped", data=b"x")],
    "through an absolute link": [ROOT, member("r/link", tarfile.SYMTYPE, linkname="/tmp"), member("r/link/escaped", data=b"x")],
    "folder over a link": [
        ROOT,
        member("r/link", tarfile.SYMTYPE, linkname=".."),
        member("r/link", tarfile.DIRTYPE),
        member("r/link/escaped", data=b"x"),
    ],
    "the root as a link": [member("r", tarfile.SYMTYPE, linkname=".."), member("r/escaped", data=b"x")],
    "hard link out": [ROOT, member("r/stolen", tarfile.LNKTYPE, linkname="r/../secret")],
    "hard link to an absolute path": [ROOT, member("r/stolen", tarfile.LNKTYPE, linkname="/etc/passwd")],
    "hard link through a link": [
        ROOT,
        member("r/link", tarfile.SYMTYPE, linkname=".."),
        member("r/stolen", tarfile.LNKTYPE, linkname="r/link/secret"),
    ],
    "hard link to a link": [
        ROOT,
        member("r/link", tarfile.SYMTYPE, linkname="../secret"),
        member("r/stolen", tarfile.LNKTYPE, linkname="r/link"),
    ],
    "device": [ROOT, member("r/device", tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "pipe": [ROOT, member("r/pipe", tarfile.FIFOTYPE)],
    "two roots": [ROOT, ROOT],
    "root last": [member("r/x", data=b"x"), ROOT],
    "too deep": [ROOT, *(member("r" + "/d" * depth, tarfile.DIRTYPE) for depth in range(1, DEEPEST + 3))],
    "nothing": [],
    "file over a folder": [ROOT, member("r/x", tarfile.DIRTYPE), member("r/x", data=b"x")],
    "map of holes backwards": [ROOT, member("r/x", data=b"2\n100\n5\n0\n5\n".ljust(522, b"\0"), pax_headers={
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "r/x", "GNU.sparse.realsize": "1000"})],
    "map of holes too large": [ROOT, member("r/x", data=b"99999999999\n".ljust(512, b"0"), pax_headers={
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "r/x", "GNU.sparse.realsize": "1000"})],
    "header too large": [ROOT, member("r/x", pax_headers={"comment": "x" * (2 * MIB)})],
    "name too long": [ROOT, member("r/" + "x" * 9000, data=b"x")],
    "name with a NUL": [ROOT, member("r/x", pax_headers={"path": "r/a\0b"})],
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder to unpack into, with a secret beside it that stays as it is."""
    (tmp_path / "out").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    yield tmp_path / "out/target"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "secret"]
    assert (tmp_path / "secret").read_bytes() == b"secret" and (tmp_path / "secret").stat().st_nlink == 1
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name != "target"] == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_stream_is_refused_and_touches_nothing_outside(place: Path, name: str) -> None:
    with pytest.raises(Refused):
        unpacked(archive(*HOSTILE[name]), place)


def test_a_header_that_is_read_in_parts_is_bounded_as_one() -> None:
    source = TarSource(lambda most: b"x" * most)
    for size in (512, MIB, 512, MIB // 2, MIB // 2, 512):
        assert len(source.read(size)) == size
    source.read(MIB)
    with pytest.raises(Refused, match="too large"):
        source.read(MIB)


def test_a_link_in_the_place_itself_is_not_followed_by_the_stream(place: Path) -> None:
    place.mkdir()
    (place / "link").symlink_to("..")
    with pytest.raises(Refused):
        unpacked(archive(ROOT, member("r/link", tarfile.DIRTYPE), member("r/link/escaped", data=b"x")), place)


def test_a_stream_that_breaks_off_is_never_taken_for_whole(tmp_path: Path, place: Path) -> None:
    whole = archive(ROOT, member("r/a", data=b"x" * 700), member("r/b", data=b"y"))
    for length in range(0, len(whole) - 1023, 128):
        with pytest.raises(Refused):
            unpacked(whole[:length], place)
    unpacked(whole, place)


@given(st.binary(max_size=3000), st.integers(0, 4000))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_garbage_is_refused_with_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes, at: int
) -> None:
    folder = tmp_path_factory.mktemp("garbage")
    whole = archive(ROOT, member("r/a", data=b"x" * 700), member("r/b", tarfile.SYMTYPE, linkname="a"))
    data = whole[:at] + garbage + whole[at + len(garbage) :]
    with contextlib.suppress(Refused):
        unpacked(data, folder / "target")
    assert [path.name for path in folder.iterdir()] in ([], ["target"])


# -- files that do not tell their size -------------------------------------------------------------------------------------


def test_a_file_of_the_kernel_is_read_to_its_end(tmp_path: Path) -> None:
    """Files of /proc stat as 0 bytes."""
    copied(Path("/proc/version"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == Path("/proc/version").read_bytes() != b""
    copied(Path("/proc/sys/kernel/random"), tmp_path / "folder")
    assert (tmp_path / "folder/boot_id").read_bytes() == Path("/proc/sys/kernel/random/boot_id").read_bytes()


def test_a_file_that_has_no_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MOST_UNTOLD", 16)
    with pytest.raises(Refused, match=r"/proc/version: tells no size and has more than 16 bytes") as caught:
        packed(Path("/proc/version"))
    assert caught.value.kind == "refused"


def test_a_file_of_the_kernel_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^/proc/self/mem: "):
        packed(Path("/proc/self/mem"))
