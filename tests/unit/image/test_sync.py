"""A node and its sources: what is brought, what is refused, and what a node goes by when a source is silent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.site import Site

from belljar.errors import (
    BadSetting,
    DownloadFailed,
    DownloadStalled,
    ImageCorrupt,
    ImageError,
    ImageMismatch,
    ImageTooLarge,
    ImageUnknown,
    IndexStale,
    NoSpace,
    NotAnIndex,
    SignatureRefused,
)
from belljar.image import index, manifest, sync
from belljar.image.master import Master, place_of
from belljar.image.progress import Silent
from belljar.image.publish import read_index
from belljar.image.store import Store

DISK = "disk.qcow2"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def nothing_left(store: Store) -> bool:
    """Neither images nor drafts, nor what would be gone on from."""
    drafts = store.folder / "drafts"
    return store.images() == [] and (not drafts.exists() or list(drafts.iterdir()) == [])


def edit(site: Site, change: object) -> None:
    """Change the index as somebody who can write to the folder, and no key has."""
    from hashlib import sha256

    value = json.loads((site.folder / "index.json").read_bytes())
    before = sha256((site.folder / "index.json").read_bytes()).hexdigest()
    change(value)  # type: ignore[operator]
    data = index.canonical(value) + b"\n"
    (site.folder / "index.json").write_bytes(data)
    signatures = (site.folder / "signatures" / f"{before}.json").read_bytes()
    (site.folder / "signatures" / f"{sha256(data).hexdigest()}.json").write_bytes(signatures)


# -- what is brought ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["folder", "file", "http", "index"])
def test_an_image_that_is_missed_comes_from_the_source(site: Site, server: Server, way: str) -> None:
    image = site.put("base", b"1")
    address = {
        "folder": str(site.folder), "file": site.folder.as_uri(), "http": site.serve(server),
        "index": f"{server.address}/images/index.json",
    }[way]  # fmt: skip
    node = site.trusting(source=address)
    node.ensure("base")
    here = node.resolve("base")
    assert (here.digest, here.boot_digest, here.append, here.os) == (image.digest, image.boot_digest, "quiet", "Debian")
    assert here.disk.read_bytes() == image.disk.read_bytes() and node.verify(here) == []
    assert here.facts["signer"] == site.word() and here.facts["made_from"] == "build debian bookworm"
    assert list((node.folder / "drafts").iterdir()) == []
    assert not [path for path in node.work_folder("downloads").iterdir() if path.suffix != ".lock"]


def test_an_image_that_is_here_costs_no_look_at_any_source(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(source=site.serve(server))
    node.ensure("base")
    count = len(server.requests)
    node.ensure("base")
    node.ensure(node.resolve("base").digest[:12])
    assert len(server.requests) == count


def test_a_digest_will_do(site: Site) -> None:
    image = site.put("base", b"1")
    node = site.trusting()
    node.ensure(image.digest)
    assert node.resolve("base").digest == image.digest


def test_what_nobody_offers_is_unknown_and_asked_for_once_in_a_while(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(source=site.serve(server), sync_interval=300.0)
    for _ in range(3):
        with pytest.raises(ImageUnknown, match="no source offers one"):
            node.ensure("other")
    assert len(server.requests) == 2  # the index and its signatures, once


def test_without_sources_a_missing_image_is_for_resolve_to_refuse(store: Store) -> None:
    store.ensure("nothing")
    with pytest.raises(ImageUnknown):
        store.resolve("nothing")


def test_the_first_source_that_offers_it_has_it(site: Site, tmp_path: Path) -> None:
    site.put("base", b"1")
    other = replace(site, folder=tmp_path / "second")
    image = other.put("base", b"2")
    mine = other.put("only", b"3")
    node = site.trusting()
    node.settings = replace(node.settings, sources=(str(other.folder), str(site.folder)))
    node.ensure("base")
    node.ensure("only")
    assert (node.resolve("base").digest, node.resolve("only").digest) == (image.digest, mine.digest)


def test_an_update_moves_the_name_and_who_holds_the_old_image_keeps_it(site: Site) -> None:
    old = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    with node.hold(node.resolve("base"), "m1"):
        new = site.put("base", b"2")
        (row,) = sync.sync(node, (), node.settings.sources)
        assert (row.what, row.digest) == (sync.UPDATED, new.digest)
        assert node.resolve("base").digest == new.digest
        list(node.gc())
        assert node.resolve(old.digest).disk.exists()
    list(node.gc())
    with pytest.raises(ImageUnknown):
        node.resolve(old.digest)
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.PRESENT


def test_a_job_goes_on_with_what_is_here_until_somebody_syncs(site: Site) -> None:
    old = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.put("base", b"2")
    node.ensure("base")
    assert node.resolve("base").digest == old.digest


def test_sync_touches_nothing_but_what_came_from_there(site: Site) -> None:
    mine = site.make("base", b"my own", to=site.node)
    site.put("base", b"1")
    site.put("other", b"2")
    node = site.trusting()
    assert sync.sync(node, (), node.settings.sources) == []
    rows = sync.sync(node, (), node.settings.sources, dry_run=True)
    assert [(row.name, row.what) for row in rows] == [("base", sync.KEPT), ("other", sync.OFFERED)]
    assert node.resolve("base").digest == mine.digest
    rows = sync.sync(node, ("base", "nothing"), node.settings.sources)
    assert [(row.name, row.what) for row in rows] == [("base", sync.UPDATED), ("nothing", sync.FAILED)]
    assert node.resolve("base").digest != mine.digest


def test_a_name_that_was_given_to_another_image_here_stays(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    mine = site.make("base", b"my own", to=node)
    site.put("base", b"2")
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.KEPT and node.resolve("base").digest == mine.digest


def test_a_name_that_is_not_offered_any_more_stays_and_is_told(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.change({}, remove=("base",))
    (row,) = sync.sync(node, (), node.settings.sources)
    assert (row.name, row.what) == ("base", sync.KEPT) and node.resolve("base")


def test_the_same_disk_that_is_here_already_is_not_brought_again(site: Site, server: Server) -> None:
    image = site.put("base", b"1")
    site.make("mine", b"1", to=site.node)
    node = site.trusting(source=site.serve(server))
    node.ensure("base")
    assert node.resolve("base").digest == image.digest and "mine" in node.images()[0].names
    assert not [path for path, *_ in server.requests if "/blobs/" in path]


def test_an_index_that_has_not_changed_is_not_sent_again(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(source=site.serve(server))
    node.ensure("base")
    count = len(server.requests)
    sync.sync(node, (), node.settings.sources)
    assert [path for path, *_ in server.requests[count:]] == ["/images/index.json"]


# -- one download per node ---------------------------------------------------------------------------------------------

PULL = """
import sys
from dataclasses import replace
from pathlib import Path
from belljar.image import Settings
from belljar.image.store import Store
settings = Settings(sources=(sys.argv[2],), trust=(sys.argv[3],), sync_interval=float(sys.argv[4]), reserve=0, stall_timeout=20)
Store(Path(sys.argv[1]), None, settings).ensure("base")
"""


def puller(site: Site, address: str, interval: float = 0.0) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", PULL, str(site.node.folder.parent), address, f"* {site.word()}", str(interval)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE)


def test_ten_that_miss_an_image_at_once_download_it_once(site: Site, server: Server) -> None:
    image = site.put("base", os.urandom(1 << 16))
    address = site.serve(server)
    pullers = [puller(site, address) for _ in range(10)]
    told = [one.communicate(timeout=100)[1] for one in pullers]
    assert [one.returncode for one in pullers] == [0] * 10, told
    assert site.node.resolve("base").digest == image.digest
    blobs = [path for path, *_ in server.requests if "/blobs/" in path]
    assert sorted(blobs) == sorted({f"/images/blobs/{path.name}" for path in site.blobs()})


def test_a_download_whose_process_was_killed_goes_on_where_it_stopped(site: Site, server: Server) -> None:
    site.put("base", os.urandom(1 << 19))
    address = site.serve(server)
    part = read_index(site.folder).entries["base"].statement.parts[DISK]
    served = server.files[f"/images/blobs/{part.blob}"]
    served.stall_after = part.blob_size // 2
    first = puller(site, address)
    downloads = site.node.folder / "downloads"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size >= served.stall_after for path in downloads.glob("*.part")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    served.stall_after = None
    server.requests.clear()
    second = puller(site, address)
    assert second.communicate(timeout=60) and second.returncode == 0
    assert f"bytes={part.blob_size // 2}-" in server.ranges()
    assert site.node.verify(site.node.resolve("base")) == []


# -- who may publish what ----------------------------------------------------------------------------------------------


def refused(site: Site, kind: type[ImageError], what: str, name: str = "base") -> None:
    with pytest.raises(kind, match=what):
        site.node.ensure(name)
    assert nothing_left(site.node)


def test_nobody_may_publish_where_nobody_is_trusted(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.settings = replace(node.settings, trust=())
    refused(site, SignatureRefused, "empty")


def test_an_unknown_signer_is_refused(site: Site) -> None:
    site.put("base", b"1", by="stranger")
    site.trusting()
    refused(site, SignatureRefused, "not signed by anybody")


def test_what_nobody_signed_is_refused_unless_the_policy_says_so(site: Site) -> None:
    site.put("base", b"1", signed=False)
    site.trusting()
    refused(site, SignatureRefused, "no signature")
    site.trusting("base unsigned").ensure("base")
    assert site.node.resolve("base").facts["signer"] == "nobody"


def test_a_signer_publishes_his_names_and_no_others(site: Site) -> None:
    site.put("base", b"1", by="alice")
    site.put("alice-1", b"2", by="alice")
    node = site.trusting(f"alice-* {site.word('alice')}", f"* {site.word()}")
    refused(site, SignatureRefused, "base.*not signed by one who may publish 'base'")
    node.ensure("alice-1")
    with pytest.raises(ImageUnknown):
        node.resolve("base")


def test_a_statement_that_was_changed_is_refused(site: Site) -> None:
    site.put("base", b"1")
    other = site.put("other", b"2")
    statement = json.loads(read_index(site.folder).entries["other"].data)

    def swap(value: dict[str, dict[str, dict[str, object]]]) -> None:
        value["images"]["base"]["statement"] = {**statement, "name": "base"}

    edit(site, swap)
    site.trusting()
    refused(site, SignatureRefused, "not what was signed")  # the index
    site.trusting(f"base {site.word()}", "other-* unsigned")
    refused(site, SignatureRefused, "not what was signed")  # the statement
    assert other.digest


def test_a_statement_with_another_statements_signature_is_refused(site: Site) -> None:
    site.put("alice-1", b"1")
    site.put("base", b"2")

    def swap(value: dict[str, dict[str, dict[str, object]]]) -> None:
        value["images"]["base"]["signatures"] = value["images"]["alice-1"]["signatures"]

    edit(site, swap)
    site.trusting(f"* {site.word()}", "x unsigned")
    refused(site, SignatureRefused, "not what was signed")


# -- old, older, expired -----------------------------------------------------------------------------------------------


def copy_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put_back(files: dict[Path, bytes]) -> None:
    for path, data in files.items():
        path.write_bytes(data)


def test_an_index_that_goes_back_is_refused_until_one_forgets(site: Site) -> None:
    old = site.put("base", b"1")
    before = copy_of(site.folder)
    site.put("base", b"2")
    node = site.trusting()
    node.ensure("base")
    put_back(before)
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.FAILED and "was seen" in row.why
    with pytest.raises(IndexStale):
        node.ensure("other")
    Master(node, str(site.folder)).forget()
    sync.sync(node, ("base",), node.settings.sources)
    assert node.resolve("base").digest == old.digest


def test_a_statement_that_goes_back_in_a_new_index_is_refused(site: Site) -> None:
    """Who may sign indexes, but not this name, puts an older statement of it back."""
    site.put("base", b"1")
    entry = json.loads((site.folder / "index.json").read_bytes())["images"]["base"]
    site.put("base", b"2")
    node = site.trusting(f"base {site.word()}", f"alice-* {site.word('alice')}")
    node.ensure("base")
    edit(site, lambda value: value["images"].update(base=entry))
    site.put("alice-1", b"3", by="alice")
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.FAILED and "had" in row.why


def test_two_indexes_of_one_version_are_one_too_many(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.put("other", b"2")
    edit(site, lambda value: value.update(version=value["version"] - 1))
    node.settings = replace(node.settings, trust=(*node.settings.trust, "x unsigned"))
    with pytest.raises(IndexStale, match="another was seen"):
        node.ensure("other")


def test_an_index_expires(site: Site) -> None:
    site.put("base", b"1", valid=60.0)
    site.trusting()
    with pytest.raises(IndexStale, match="expired"):
        sync.pull(site.node, "base", now=site.moment + 61)
    assert nothing_left(site.node)
    sync.pull(site.node, "base", now=site.moment + 30)


def test_an_index_from_the_future_is_refused(site: Site) -> None:
    site.moment = time.time() + 1e6
    site.put("base", b"1")
    site.trusting()
    refused(site, IndexStale, "from the future")


def test_without_the_source_its_last_index_serves_for_a_while_with_a_note(
    site: Site, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    site.put("base", b"1")
    site.put("other", b"2")
    node = site.trusting(source=site.serve(server), stale_limit=100.0)
    now = time.time()
    sync.pull(node, "base", now=now)
    server.files["/images/index.json"].status = 503
    capfd.readouterr()
    sync.pull(node, "other", now=now + 50)
    assert "the server says 503" in (note := capfd.readouterr().err) and "its index of 50 s ago" in note
    with pytest.raises(DownloadFailed, match=r"503.*its last index is 101 s old"):
        sync.pull(node, "third", now=now + 101)


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
        ({"stall_after": 10}, DownloadStalled, "no byte"),
        ({"cut_after": [10] * 3}, DownloadFailed, "closed|complete"),
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
    refused(site, DownloadStalled, "not whole in time")
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
    from belljar.image.signing import STATEMENT

    data = index.statement_bytes(statement)
    return index.Entry(statement, (site.key().sign(STATEMENT, data),), data)


def test_a_signed_disk_that_opens_other_files_is_refused_all_the_same(site: Site) -> None:
    from tests.unit.image.test_qcow2 import HOSTILE, image

    from belljar.image import intake

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


def test_a_full_disk_leaves_what_was_there(site: Site, server: Server) -> None:
    site.put("base", os.urandom(1 << 20))
    node = site.trusting(source=site.serve(server))
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, before[1]))
    try:
        with pytest.raises(NoSpace):
            node.ensure("base")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert nothing_left(node)
    node.ensure("base")


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
