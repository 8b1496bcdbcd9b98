"""A node and its sources: what is brought, when, and how often."""

from __future__ import annotations

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
    ImageUnknown,
)
from belljar.image.site import sync
from belljar.image.site.publish import read_index
from belljar.image.store.store import Store

DISK = "disk.qcow2"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


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


def test_for_a_batch_job_a_name_is_what_the_source_states_whatever_it_was_given_to_here(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "shared", False)
    image = site.put("base", b"1")
    node = site.trusting()
    site.put("other", b"own")
    node.tag(sync.pull(node, "other"), "base")
    assert node.resolve("base").digest != image.digest
    node.settle("base", own=False)
    assert node.resolve("base").digest == image.digest


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
from belljar.image.images import Images
settings = Settings(sources=(sys.argv[2],), trust=(sys.argv[3],), sync_interval=float(sys.argv[4]), reserve=0, stall_timeout=20)
Images(Path(sys.argv[1]), None, settings).ensure("base")
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
