"""A node and its sources: servers that misbehave, files that are not what was signed, full disks. Nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.site import Site, nothing_left, refused

from belljar.errors import (
    BadSetting,
    DownloadFailed,
    DownloadStalled,
    ImageCorrupt,
    ImageError,
    ImageMismatch,
    ImageTooLarge,
    NoSpace,
    NotAnIndex,
)
from belljar.image.progress import Silent
from belljar.image.site import index, sync
from belljar.image.site.master import Master, place_of
from belljar.image.site.publish import read_index
from belljar.image.store import manifest

DISK = "disk.qcow2"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


# -- servers that misbehave --------------------------------------------------------------------------------------------


def test_a_server_that_sends_a_web_page_has_no_index(site: Site, server: Server) -> None:
    site.trusting(source=f"{server.address}/images")
    server.put("/images/index.json", b"<!DOCTYPE html><html>sign in</html>")
    server.put("/images/signatures/" + manifest_name(server) + ".json", b"[]")
    refused(site, NotAnIndex, "a web page")


def manifest_name(server: Server) -> str:
    from hashlib import sha256

    return sha256(server.files["/images/index.json"].data).hexdigest()


@pytest.mark.parametrize(
    ("tricks", "kind", "what"),
    [
        ({"status": 404}, DownloadFailed, "404"),
        ({"says_length": 1 << 30}, ImageTooLarge, "limit"),
        ({"endless": True}, ImageTooLarge, "limit"),
        ({"stall_after": 10}, DownloadStalled, "timed out"),
        ({"cut_after": [10] * 4}, DownloadFailed, "closed|complete"),
        ({"redirect": "/images/index.json"}, DownloadFailed, "more than 5 redirects"),
        ({"redirect": "file:///etc/passwd"}, DownloadFailed, "does not follow"),
    ],
)
def test_a_server_that_misbehaves_about_its_index_is_told_of(
    site: Site, server: Server, tricks: dict[str, object], kind: type[ImageError], what: str
) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server), stall_timeout=0.3)
    data = (site.folder / "index.json").read_bytes()
    server.put("/images/index.json", data, etag="", **tricks)
    refused(site, kind, what)


def test_an_index_that_comes_byte_by_byte_is_given_up(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server), stall_timeout=0.5)
    server.files["/images/index.json"].drip = 0.05
    began = time.monotonic()
    refused(site, DownloadStalled, "timed out")
    assert time.monotonic() - began < 5


def test_a_connection_that_breaks_once_is_made_again(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(source=site.serve(server))
    server.files["/images/index.json"].cut_after = [10, 10]
    node.ensure("base")


def test_a_server_that_is_not_there_is_told_of(site: Site) -> None:
    site.trusting(source="http://127.0.0.1:9/images")
    refused(site, DownloadFailed, "127.0.0.1:9")


def blob_of(site: Site, server: Server, part: str = DISK) -> str:
    return f"/images/blobs/{read_index(site.folder).entries['base'].statement.parts[part].blob}"


@pytest.mark.parametrize("part", [DISK, "kernel", "initrd"])
@pytest.mark.parametrize("way", ["folder", "http"])
def test_a_file_that_is_not_what_was_signed_is_refused(site: Site, server: Server, part: str, way: str) -> None:
    site.put("base", b"1")
    path = site.folder / "blobs" / blob_of(site, server, part).rpartition("/")[2]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    site.trusting(source=site.serve(server) if way == "http" else "")
    refused(site, ImageMismatch, "ordered sha256|zstd|bytes")
    assert not list(site.node.work_folder("downloads").glob("*.part")) or part != DISK


def test_another_disk_of_the_same_size_in_its_place_is_refused(site: Site) -> None:
    """The folder's files are unpacked as they are; only what comes out of them is compared."""
    old, new = site.put("old", b"1" * 100), site.put("base", b"2" * 100)
    parts = [read_index(site.folder).entries[name].statement.parts[DISK] for name in ("old", "base")]
    assert old.digest != new.digest
    assert (parts[0].size, parts[0].blob_size) == (parts[1].size, parts[1].blob_size)
    blobs = site.folder / "blobs"
    (blobs / parts[1].blob).write_bytes((blobs / parts[0].blob).read_bytes())
    site.trusting()
    refused(site, ImageMismatch, "ordered")


@pytest.mark.parametrize("way", ["folder", "http"])
def test_a_file_that_is_cut_off_is_refused(site: Site, server: Server, way: str) -> None:
    site.put("base", b"1")
    path = site.folder / "blobs" / blob_of(site, server).rpartition("/")[2]
    path.write_bytes(path.read_bytes()[:-5])
    site.trusting(source=site.serve(server) if way == "http" else "")
    refused(site, ImageMismatch, "ordered")


def test_a_file_that_is_gone_is_told_of(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server))
    server.files[blob_of(site, server)].status = 404
    refused(site, DownloadFailed, "404")
    for path in site.blobs():
        path.unlink()
    site.trusting()
    refused(site, ImageCorrupt, "No such file")


def test_a_file_larger_than_it_was_stated_is_not_taken(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server))
    server.files[blob_of(site, server)].endless = True
    refused(site, ImageTooLarge, "more than")


def test_a_signed_bomb_ends_at_the_size_it_states(site: Site) -> None:
    """Its publisher is trusted, and was wrong about the size."""
    image = site.make(None, b"1", to=site.publisher)
    site.change({"base": image})
    entry = read_index(site.folder).entries["base"].statement
    small = replace(entry.parts[DISK], size=1000)
    made = resigned(site, replace(entry, parts={**entry.parts, DISK: small}))
    site.trusting()
    with pytest.raises(ImageMismatch, match=r"larger than the limit|1000"):
        sync.bring(site.node, Master(site.node, str(site.folder)), made, Silent())
    assert nothing_left(site.node)


def resigned(site: Site, statement: index.Statement) -> index.Entry:
    from belljar.image.site.signing import STATEMENT

    data = index.statement_bytes(statement)
    return index.Entry(statement, (site.key().sign(STATEMENT, data),), data)


def test_a_signed_disk_that_opens_other_files_is_refused_all_the_same(site: Site) -> None:
    from tests.unit.image.test_qcow2 import HOSTILE, image

    from belljar.image.intake import intake

    with intake.draft(site.publisher, "evil") as folder:
        image(folder / DISK, HOSTILE["it has a backing file"], size=16 << 20)
        what = manifest.Facts("x", "", 1.0, "", 16 << 20, {})
        made = site.publisher.publish(folder, what, None)
    site.change({"base": made})
    site.trusting()
    refused(site, ImageCorrupt, "backing file")


def test_more_than_the_node_takes_is_refused_before_it_comes(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server), max_size=1 << 20)
    refused(site, ImageTooLarge, "the limit is")
    assert not [path for path, *_ in server.requests if "/blobs/" in path]


def test_an_image_that_does_not_fit_is_refused_before_it_comes(
    site: Site, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("base", b"1")
    site.trusting(source=site.serve(server))
    monkeypatch.setattr(sync, "free_bytes", lambda _: 1000)
    refused(site, NoSpace, "1000 are free")
    assert not [path for path, *_ in server.requests if "/blobs/" in path]


# -- what a person may get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["relative", "ftp://x/y", "http://", "http://x/y?z", "http://[::1", "http://x:y/"])
def test_a_source_that_is_none_is_refused(source: str) -> None:
    with pytest.raises(BadSetting, match=r"image\.sources"):
        place_of(source)


def test_a_password_in_an_address_is_shown_to_nobody(site: Site, server: Server) -> None:
    site.put("base", b"1")
    address = site.serve(server).replace("http://", "http://me:secret@")
    node = site.trusting(source=address)
    node.ensure("base")
    assert "secret" not in node.resolve("base").source
    site.trusting(source="http://me:secret@127.0.0.1:9/x")
    with pytest.raises(DownloadFailed) as caught:
        node.ensure("other")
    assert "secret" not in caught.value.message


def test_what_was_kept_of_a_source_may_be_lost_or_broken(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    (state,) = (node.folder / "sources").glob("*.json")
    state.write_bytes(b"{broken")
    sync.pull(node, "base")
    assert read_index(site.folder).version == Master(node, str(site.folder)).seen().version


def test_what_was_kept_and_cannot_be_read_just_now_is_not_taken_for_nothing(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    (state,) = (node.folder / "sources").glob("*.json")
    state.unlink()
    state.symlink_to(state.name)  # ELOOP, where a bad disk gives EIO
    with pytest.raises(OSError, match="symbolic links"):
        Master(node, str(site.folder)).seen()
