"""Images that are named by an address or a path: imported when they are first wanted, and again when the source has another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.image_parts import ext4

from belljar.errors import DownloadFailed, ImageUnknown, InputMissing
from belljar.host.locks import try_lock
from belljar.image import is_source, name_of
from belljar.image.images import Images
from belljar.image.intake import fetch
from belljar.image.store.store import NAME, check_name
from belljar.model import MIB

NOW = 1_800_000_000.0


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def disks(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Two disks that differ."""
    folder = tmp_path_factory.mktemp("raw")
    return ext4(folder / "one", size=2 * MIB).read_bytes(), ext4(folder / "two", size=3 * MIB).read_bytes()


@pytest.mark.parametrize(
    ("reference", "is_one"),
    [
        ("https://lhcb.example.org/cernvm4.iso", True),
        ("http://x/y", True),
        ("/srv/images/a b.qcow2", True),
        ("debian12", False),
        ("sha256-0123456789", False),
        ("file:///etc/passwd", False),
        ("ftp://x/y", False),
        ("../x", False),
    ],
)
def test_what_is_a_source(reference: str, is_one: bool) -> None:
    assert is_source(reference) is is_one


@pytest.mark.parametrize("source", ["https://x/cernvm4.iso", "http://x/?a=b&c=../..", "/srv/a b/", "/" + "x" * 300])
def test_a_source_has_a_name_of_its_own_in_the_store(source: str) -> None:
    check_name(name_of(source))
    assert NAME.fullmatch(name_of(source)) and name_of(source) != name_of(source + "2")


def test_an_image_is_found_by_its_address_once_it_is_imported(
    store: Images, server: Server, disks: tuple[bytes, bytes]
) -> None:
    url = server.put("/disk.raw", disks[0])
    with pytest.raises(ImageUnknown, match="the image of http://"):
        store.resolve(url)
    store.ensure(url, now=NOW)
    assert store.resolve(url).virtual_size == 2 * MIB and store.resolve(url).source == url
    asked = len(server.requests)
    store.ensure(url, now=NOW + store.settings.sync_interval - 1)
    assert len(server.requests) == asked  # nobody is asked so soon again


def test_it_is_imported_again_when_the_server_has_another(
    store: Images, server: Server, disks: tuple[bytes, bytes]
) -> None:
    url = server.put("/disk.raw", disks[0])
    store.ensure(url, now=NOW)
    first = store.resolve(url)
    later = NOW + store.settings.sync_interval
    store.ensure(url, now=later)
    assert store.resolve(url).digest == first.digest
    server.put("/disk.raw", disks[1], etag='"v2"')
    store.ensure(url, now=later)
    assert store.resolve(url).digest == first.digest  # not asked yet
    store.ensure(url, now=later + store.settings.sync_interval)
    assert store.resolve(url).virtual_size == 3 * MIB
    assert store.find(first.digest).names == ()  # `gc` takes it when nobody uses it


def test_a_file_is_imported_again_when_it_changes(store: Images, tmp_path: Path, disks: tuple[bytes, bytes]) -> None:
    path = tmp_path / "disk.raw"
    path.write_bytes(disks[0])
    store.ensure(str(path), now=NOW)
    path.write_bytes(disks[1])
    os.utime(path, (NOW, NOW))
    store.ensure(str(path), now=NOW + 3600)
    assert store.resolve(str(path)).virtual_size == 3 * MIB


@pytest.mark.parametrize("broken", [{"status": 503}, {"data": b"<html>moved</html>", "etag": '"v2"'}])
def test_the_one_that_is_here_is_used_while_no_other_can_be_had(
    store: Images, server: Server, disks: tuple[bytes, bytes], broken: dict[str, object]
) -> None:
    url = server.put("/disk.raw", disks[0])
    store.ensure(url, now=NOW)
    server.put("/disk.raw", **broken)  # type: ignore[arg-type]
    problem = store.ensure(url, now=NOW + 3600)
    assert problem and store.resolve(url).virtual_size == 2 * MIB
    asked = len(server.requests)
    assert store.ensure(url, now=NOW + 3601) == problem and len(server.requests) == asked
    server.put("/disk.raw", disks[1], etag='"v3"')
    assert store.ensure(url, now=NOW + 7200) == ""
    assert store.resolve(url).virtual_size == 3 * MIB


def test_who_wants_it_meanwhile_waits_for_nobody(store: Images, server: Server, disks: tuple[bytes, bytes]) -> None:
    url = server.put("/disk.raw", disks[0])
    store.ensure(url, now=NOW)
    lock = try_lock(store.work_folder("named") / f"{fetch.key(url)}.lock")
    assert lock is not None
    asked = len(server.requests)
    store.ensure(url, now=NOW + 3600)
    assert len(server.requests) == asked
    lock.release()


def test_a_source_that_is_not_there_is_named(store: Images, server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="404"):
        store.ensure(f"{server.address}/missing", now=NOW)
    with pytest.raises(InputMissing, match="missing"):
        store.ensure(str(tmp_path / "missing"), now=NOW)


def test_a_disc_is_known_by_its_content(store: Images, tmp_path: Path) -> None:
    head = bytearray(0x11000)
    head[510:512] = b"\x55\xaa"  # discs that a memory stick boots as well have a partition table
    head[0x8000:0x8006] = b"\1CD001"
    head[0x8800:0x8820] = b"\0CD001\x01EL TORITO SPECIFICATION".ljust(32, b"\0")
    path = tmp_path / "micro.iso"
    path.write_bytes(bytes(head))
    store.ensure(str(path), now=NOW)
    assert store.resolve(str(path)).is_disc
