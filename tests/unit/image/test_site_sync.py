"""A node gets its images from the site's repository: when it is asked, what is fetched, what stays, what an interrupted sync leaves."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server, serving
from tests.unit.image.site import Site, nothing_left, refused

from belljar.errors import (
    DownloadFailed,
    ImageCorrupt,
    ImageTooLarge,
    ImageUnknown,
    NoSpace,
)
from belljar.image import Image
from belljar.image.images import Images
from belljar.image.site import sync
from belljar.image.store.store import Store


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def synced(node: Store, *names: str, **how: bool) -> dict[str, str]:
    return {row.name: row.what for row in sync.sync(node, names, node.settings.sources, **how)}


def fetched(server: Server) -> list[str]:
    return [path for path, *_ in server.requests if "/targets/" in path]


# -- what is brought ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["folder", "file", "http"])
def test_an_image_that_is_missed_comes_from_the_source(site: Site, server: Server, way: str) -> None:
    image = site.put("base", b"1")
    line = {"folder": site.line, "file": f"file://{site.line}", "http": site.serve(server)}[way]
    node = site.trusting(line)
    node.ensure("base")
    here = node.resolve("base")
    assert (here.digest, here.append, here.os) == (image.digest, "quiet", "Debian")
    assert here.disk.read_bytes() == image.disk.read_bytes() and node.verify(here) == []
    assert (here.facts["signer"], here.facts["made_from"]) == ("role targets", "build debian bookworm")
    assert here.facts["agent_in_initrd"] is True
    assert list((node.folder / "drafts").iterdir()) == []
    assert not [path for path in node.work_folder("downloads").iterdir() if path.suffix != ".lock"]


def test_an_image_that_is_here_costs_no_look_at_any_source(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(site.serve(server))
    node.ensure("base")
    count = len(server.requests)
    node.ensure("base")
    node.ensure(node.resolve("base").digest[:12])
    assert len(server.requests) == count


def test_a_digest_will_do(site: Site) -> None:
    image = site.put("base", b"1")
    site.trusting().ensure(image.digest)
    assert site.node.resolve("base").digest == image.digest


def test_what_nobody_offers_is_unknown(site: Site, store: Store) -> None:
    site.trusting()
    refused(site, ImageUnknown, "no source offers one", "other")
    store.ensure("nothing")  # without sources that is for `resolve` to refuse
    with pytest.raises(ImageUnknown):
        store.resolve("nothing")


def test_the_first_source_that_offers_it_has_it(site: Site, tmp_path: Path) -> None:
    site.put("base", b"1")
    other = replace(site, folder=tmp_path / "second", keys=tmp_path / "second-keys").begin()
    image, mine = other.put("base", b"2"), other.put("only", b"3")
    node = site.trusting(other.line, site.line)
    node.ensure("base")
    node.ensure("only")
    assert (node.resolve("base").digest, node.resolve("only").digest) == (image.digest, mine.digest)


def test_for_a_batch_job_a_name_is_what_the_source_offers_whatever_it_was_given_to_here(
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


def test_the_same_disk_that_is_here_already_is_not_brought_again(site: Site, server: Server) -> None:
    image = site.put("base", b"1")
    site.make("mine", b"1", to=site.node)
    node = site.trusting(site.serve(server))
    node.ensure("base")
    assert node.resolve("base").digest == image.digest and "mine" in node.images()[0].names
    assert fetched(server) == []


def test_metadata_that_has_not_changed_is_not_sent_again(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(site.serve(server))
    node.ensure("base")
    count = len(server.requests)
    assert synced(node) == {"base": sync.PRESENT}
    assert [path.rpartition("/")[2] for path, *_ in server.requests[count:]] == ["2.root.json", "timestamp.json"]


# -- what changes, and what stays --------------------------------------------------------------------------------------


def test_an_update_moves_the_name_and_a_machine_that_holds_the_old_image_keeps_it(site: Site) -> None:
    old = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    with node.hold(node.resolve("base"), "m1"):
        new = site.put("base", b"2")
        node.ensure("base")
        assert node.resolve("base").digest == old.digest  # a job goes on with what is here, until somebody syncs
        assert synced(node) == {"base": sync.UPDATED}
        assert node.resolve("base").digest == new.digest
        list(node.gc())
        assert node.resolve(old.digest).disk.exists()
    list(node.gc())
    with pytest.raises(ImageUnknown):
        node.resolve(old.digest)
    assert synced(node) == {"base": sync.PRESENT}


def test_a_revoked_image_is_taken_away_and_refused(site: Site) -> None:
    image = site.put("base", b"1")
    site.put("other", b"2")
    node = site.trusting()
    assert synced(node, everything=True) == {"base": sync.NEW, "other": sync.NEW}
    site.change(lambda repository: repository.remove("base"))
    assert synced(node, dry_run=True) == {"base": sync.RETIRED, "other": sync.PRESENT} and node.resolve("base")
    with node.hold(node.resolve("base"), "m1"):
        assert synced(node) == {"base": sync.RETIRED, "other": sync.PRESENT}
        assert node.resolve(image.digest)  # its machine runs on
    list(node.gc())
    for reference in ("base", image.digest):
        with pytest.raises(ImageUnknown):
            node.ensure(reference)
    assert synced(node, "base") == {"base": sync.FAILED}


def test_a_role_that_is_not_delegated_any_more_takes_its_images_with_it(site: Site) -> None:
    site.put("base", b"0")
    site.delegate("alice", "alice-*")
    site.put("alice-1", b"1", by="alice")
    node = site.trusting()
    node.ensure("alice-1")
    site.change(lambda repository: repository.delegate("alice", "", [], 1))
    assert synced(node) == {"alice-1": sync.RETIRED} and node.images() == []


def test_sync_touches_nothing_but_what_came_from_there(site: Site) -> None:
    mine = site.make("base", b"my own", to=site.node)
    site.put("base", b"1")
    site.put("other", b"2")
    node = site.trusting()
    node.ensure("other")
    site.put("other", b"3")
    assert synced(node) == {"other": sync.UPDATED}
    assert sync.sync(node, (), node.settings.sources, dry_run=True)[0].what == sync.KEPT
    assert node.resolve("base").digest == mine.digest
    assert synced(node, "base", "none") == {"base": sync.UPDATED, "none": sync.FAILED}
    assert node.resolve("base").digest != mine.digest


def test_what_root_brought_to_the_sites_store_is_not_a_users_to_sync(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("base", b"1")
    site.trusting().ensure("base")
    user = Images(site.folder.with_name("user"), site.node.folder.parent, site.node.settings)
    site.put("base", b"2")
    assert user.resolve("base") and synced(user) == {} and user.images()[0].store == site.node.folder


def test_a_dry_run_changes_nothing(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    assert synced(node, dry_run=True) == {"base": sync.OFFERED} and nothing_left(node)


def test_a_new_kernel_or_a_new_fact_of_the_publisher_comes_though_the_disk_is_the_same(
    site: Site, server: Server
) -> None:
    site.put("base", b"1")
    node = site.trusting(site.serve(server))
    node.ensure("base")
    image = site.put("base", b"1", kernel=b"a kernel", context="inject")
    site.serve(server)
    assert synced(node) == {"base": sync.UPDATED} and node.resolve("base").facts["context"] == "inject"
    site.publisher.remove(image, force=True)
    site.put("base", b"1", kernel=b"another kernel", context="inject")
    site.serve(server)
    assert synced(node) == {"base": sync.UPDATED}
    assert (kernel := node.resolve("base").kernel) and kernel.read_bytes() == b"another kernel"
    assert synced(node) == {"base": sync.PRESENT} and len(list(node.gc())) == 2  # the images before


def test_a_delegate_gives_no_other_name_its_kernel(site: Site) -> None:
    image = site.put("base", b"1")
    site.delegate("alice", "alice-*")
    other = site.put("alice-1", b"1", by="alice", kernel=b"alice's kernel")
    node = site.trusting()
    node.ensure("alice-1")
    node.ensure("base")
    assert (node.resolve("base").digest, node.resolve("alice-1").digest) == (image.digest, other.digest)
    assert node.resolve("base").names == ("base",) and list(node.gc()) == []


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_server_that_is_not_there_or_refuses_is_named(site: Site, server: Server) -> None:
    root = site.line.partition("#")[2]
    site.trusting(f"http://me:secret@127.0.0.1:9/images#{root}")
    error = refused(site, DownloadFailed, "127.0.0.1:9")
    (row,) = sync.sync(site.node, (), site.node.settings.sources)
    assert "secret" not in f"{error} {row}"
    site.trusting(f"{server.address}/images#{root}")
    refused(site, DownloadFailed, "404")
    site.trusting(f"/nowhere#{root}")
    assert "`image.sources`" in refused(site, DownloadFailed, "No such file").hint


def test_a_password_in_an_address_is_shown_to_nobody(site: Site, server: Server) -> None:
    site.put("base", b"1")
    node = site.trusting(site.serve(server).replace("http://", "http://me:secret@"))
    node.ensure("base")
    assert "secret" not in str(node.resolve("base")) and synced(node) == {"base": sync.PRESENT}


def test_a_file_that_is_gone_is_named(site: Site, server: Server) -> None:
    site.put("base", b"1")
    site.trusting(site.serve(server))
    for path in site.files():
        server.files[f"/images/targets/base/{path.name}"].status = 404
        path.unlink()
    refused(site, DownloadFailed, "404")
    site.trusting()
    refused(site, ImageCorrupt, "No such file")


def test_more_than_the_node_takes_or_has_room_for_is_refused_before_it_comes(
    site: Site, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("base", b"1")
    site.trusting(site.serve(server), max_size=1 << 20)
    refused(site, ImageTooLarge, "the limit is")
    site.trusting(site.serve(server), max_size=1 << 30)
    monkeypatch.setattr(sync, "free_bytes", lambda _: 1000)
    refused(site, NoSpace, "1000 are free")
    assert fetched(server) == []


def test_what_was_kept_of_a_source_may_be_lost_or_broken(site: Site) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    for path in (node.folder / "sources").rglob("*.json"):
        path.write_bytes(b"{broken")
    sync.pull(node, "base")


# -- one download per node, and the deaths of those who download -------------------------------------------------------

PULL = """
import sys
from pathlib import Path
from belljar.image import Settings
from belljar.image.images import Images
Images(Path(sys.argv[1]), None, Settings(sources=(sys.argv[2],), reserve=0, stall_timeout=20)).ensure("base")
"""


def puller(site: Site, line: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-c", PULL, str(site.node.folder.parent), line]
    return subprocess.Popen(argv, stderr=subprocess.PIPE)


def test_several_that_miss_an_image_at_once_download_it_once(site: Site, server: Server) -> None:
    image = site.put("base", os.urandom(1 << 16))
    line = site.serve(server)
    pullers = [puller(site, line) for _ in range(6)]
    said = [process.communicate(timeout=100)[1] for process in pullers]
    assert [process.returncode for process in pullers] == [0] * 6, said
    assert site.node.resolve("base").digest == image.digest
    assert len(fetched(server)) == 3


def test_a_download_whose_process_was_killed_goes_on_where_it_stopped(site: Site, server: Server) -> None:
    site.put("base", os.urandom(1 << 19))
    line = site.serve(server)
    (disk,) = (site.folder / "targets/base").glob("*.disk.qcow2.zst")
    served = server.files[f"/images/targets/base/{disk.name}"]
    served.stall_after = half = disk.stat().st_size // 2
    first = puller(site, line)
    downloads = site.node.folder / "downloads"
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size >= half for path in downloads.glob("*.part")):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.02)
    first.kill()
    first.communicate()
    served.stall_after = None
    server.requests.clear()
    second = puller(site, line)
    assert second.communicate(timeout=60) and second.returncode == 0
    assert f"bytes={half}-" in server.ranges()
    assert site.node.verify(site.node.resolve("base")) == []


def test_a_sync_that_is_killed_anywhere_is_gone_on_with(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of its system calls that open, rename or link a file, in a random order."""
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    image = site.put("base", b"2")
    ends = set()
    for count in random.Random(7).sample(range(60), 12):
        if (child := os.fork()) == 0:
            left = iter(range(count))
            for name in ("open", "rename", "replace", "symlink", "unlink"):
                monkeypatch.setattr(os, name, dying(getattr(os, name), left))
            try:
                sync.sync(node, (), node.settings.sources)
            finally:
                os._exit(0)
        ends.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        assert node.verify(node.resolve("base")) == []
    assert 9 in ends and set(synced(node).values()) <= {sync.UPDATED, sync.PRESENT}
    assert node.resolve("base").digest == image.digest
    list(node.gc())
    assert len(node.images()) == 1 and list((node.folder / "drafts").iterdir()) == []


def dying(real: object, left: Iterator[int]) -> object:
    def call(*words: object, **more: object) -> object:
        if next(left, None) is None:
            os._exit(9)
        return real(*words, **more)  # type: ignore[operator]

    return call


def test_gc_beside_a_sync_takes_nothing_of_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put("base", b"1")
    node = site.trusting()
    real = Store.tag

    def tag(self: Store, image: Image, name: str) -> Image:
        list(self.gc())
        return real(self, image, name)

    monkeypatch.setattr(Store, "tag", tag)
    node.ensure("base")
    assert node.resolve("base")
