"""Large files by a disk that both sides have: what is packed comes out the same, and a hostile stream reads nothing beside it."""

import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.agent.test_tar import MIB, facts, unpacked

from belljar.agent.guest.system import Refused
from belljar.agent.transfer import tar
from belljar.agent.transfer.tar import BESIDE, BLOCK, CHUNK, Exchange, Packer, has_large
from belljar.agent.transfer.untar import unpack


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "disk", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 4 * BESIDE)
    yield fd
    os.close(fd)


def large(path: Path, size: int = BESIDE + 777) -> Path:
    """Random at both ends, a hole in the middle, and no whole number of blocks."""
    with path.open("wb") as file:
        file.write(os.urandom(BESIDE))
        file.seek(size + 8 * MIB)
        file.write(os.urandom(777))
    path.chmod(0o440)
    os.utime(path, ns=(123456789, 123456789))
    return path


def by_disk(source: Path, disk: int) -> bytes:
    parts: list[bytes] = []
    Packer(parts.append, exchange=Exchange(disk, False)).pack(os.fsencode(source))
    return b"".join(parts)


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_large_file_goes_by_the_disk_and_its_stream_stays_small(tmp_path: Path, disk: int, is_direct: bool) -> None:
    (tmp_path / "tree").mkdir()
    large(tmp_path / "tree/a")
    large(tmp_path / "tree/b")
    (tmp_path / "tree/small").write_bytes(b"by the stream")
    stream = by_disk(tmp_path / "tree", disk)
    assert len(stream) < CHUNK and has_large(os.fsencode(tmp_path / "tree"))
    unpack(io.BytesIO(stream).read, os.fsencode(tmp_path / "copy"), b"x", exchange=Exchange(disk, is_direct))
    assert facts(tmp_path / "copy") == facts(tmp_path / "tree")
    assert (tmp_path / "copy/a").stat().st_blocks * BLOCK < BESIDE + 2 * MIB, "the hole is still one"


def test_what_the_disk_has_no_room_for_goes_by_the_stream(tmp_path: Path, disk: int) -> None:
    source = large(tmp_path / "file")
    os.ftruncate(disk, BESIDE)
    stream = by_disk(source, disk)
    assert len(stream) > BESIDE
    unpack(io.BytesIO(stream).read, os.fsencode(tmp_path / "copy"), b"x", exchange=Exchange(disk, False))
    assert facts(tmp_path / "copy") == facts(source)


def test_a_file_system_without_direct_access_is_used_through_its_cache(
    tmp_path: Path, disk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, changes, write = by_disk(large(tmp_path / "file"), disk), list[bool](), os.pwritev

    def refuse(fd: int, data: Any, offset: int) -> int:
        if changes[-1]:
            raise OSError(errno.EINVAL, "no O_DIRECT here, as 9p says at the first write")
        return write(fd, data, offset)

    monkeypatch.setattr(tar, "set_direct", lambda fd, on: changes.append(on) or True)
    monkeypatch.setattr(os, "pwritev", refuse)
    unpack(io.BytesIO(stream).read, os.fsencode(tmp_path / "copy"), b"x", exchange=Exchange(disk, True))
    assert facts(tmp_path / "copy") == facts(tmp_path / "file")
    assert True in changes and False in changes


class Liar(Exchange):
    def put(self, file: int, parts: object) -> int:
        return self.left  # where nothing was put


@pytest.mark.parametrize(("place", "kind"), [(4 * BESIDE, "broken"), (10**16, "unsafe"), (1 << 62, "unsafe")])
def test_a_stream_that_points_beside_the_disk_is_refused(tmp_path: Path, disk: int, place: int, kind: str) -> None:
    liar, parts = Liar(disk, False), list[bytes]()
    liar.left = place
    Packer(parts.append, exchange=liar).pack(os.fsencode(large(tmp_path / "file")))
    with pytest.raises(Refused) as refused:
        unpack(io.BytesIO(b"".join(parts)).read, os.fsencode(tmp_path / "copy"), b"x", exchange=Exchange(disk, False))
    assert refused.value.kind == kind


def test_a_stream_that_points_to_a_disk_where_there_is_none_is_refused(tmp_path: Path, disk: int) -> None:
    stream = by_disk(large(tmp_path / "file"), disk)
    with pytest.raises(Refused, match="no place for it"):
        unpacked(stream, tmp_path / "copy")
