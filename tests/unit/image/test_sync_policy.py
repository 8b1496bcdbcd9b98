"""A node and its sources: who may publish what, what is too old, and what a node goes by when a source is silent."""

from __future__ import annotations

import json
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
    HostError,
    ImageUnfit,
    ImageUnknown,
    IndexStale,
    NotAnIndex,
    SignatureRefused,
)
from belljar.image import Image
from belljar.image.images import Images
from belljar.image.intake import intake
from belljar.image.progress import Silent
from belljar.image.site import index, sync
from belljar.image.site.master import Master
from belljar.image.site.publish import Change, publish, read_index
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.model import Context

DISK = "disk.qcow2"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


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


# -- who may publish what ----------------------------------------------------------------------------------------------


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


def test_a_name_is_not_given_to_an_image_that_is_here_without_its_signer(site: Site) -> None:
    site.make("mine", b"1", to=site.node)
    site.put("base", b"1", by="alice")
    node = site.trusting(f"base {site.word()}", f"alice-* {site.word('alice')}")
    with pytest.raises(SignatureRefused):
        node.ensure("base")
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


def test_without_the_library_for_signatures_only_unsigned_names_can_be_had(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("base", b"1")
    node = site.trusting()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(HostError, match="not installed"):
        node.ensure("base")
    node = site.trusting("base unsigned")
    node.ensure("base")
    assert node.resolve("base")


# -- one disk, several names -------------------------------------------------------------------------------------------


def put_same_disk(site: Site, image: Image, name: str, by: str, *, append: str = "quiet", **facts: object) -> None:
    """Publish the disk of *image* under another name, with a kernel of the signer's own."""
    own = Images(site.folder.with_name(f"store-of-{by}"), None, site.publisher.settings)
    with intake.draft(own, name) as folder:
        (folder / manifest.DISK).write_bytes(image.disk.read_bytes())
        (folder / manifest.KERNEL).write_bytes(f"a kernel of {by}".encode())
        (folder / manifest.INITRD).write_bytes(b"a ramdisk")
        made = own.publish(
            folder, manifest.Facts("x", append, 1.0, "", image.virtual_size, {**image.facts, **facts}), name
        )
    assert made.digest == image.digest
    site.moment += 1
    publish(own, site.folder, Change({name: made}, signer=site.key(by)), Silent(), now=lambda: site.moment)


def test_who_may_publish_one_name_gives_no_other_its_kernel(site: Site) -> None:
    put_same_disk(site, site.put("base", b"1"), "alice-1", "alice")
    node = site.trusting(f"alice-* {site.word('alice')}", f"base {site.word()}")
    node.ensure("alice-1")
    with pytest.raises(ImageUnfit, match="as image alice-1, with another kernel"):
        node.ensure("base")
    with pytest.raises(ImageUnknown):
        node.resolve("base")
    node.drop("alice-1")
    node.ensure("base")
    (kernel,) = [node.resolve("base").kernel]
    assert kernel and kernel.read_bytes() == b"a kernel"
    with pytest.raises(ImageUnfit):
        node.ensure("alice-1")
    assert node.resolve("base").names == ("base",) and list(node.gc()) == []


def test_a_disk_that_is_offered_with_two_kernels_is_not_had_by_its_digest(site: Site) -> None:
    image = site.put("base", b"1")
    node = site.trusting()
    put_same_disk(site, image, "other", "key")
    with pytest.raises(ImageUnfit, match="base and other have this disk"):
        node.ensure(image.digest)


def test_a_statement_that_lies_about_its_start_is_no_statement(site: Site) -> None:
    site.put("base", b"1")

    def lie(value: dict[str, dict[str, dict[str, dict[str, object]]]]) -> None:
        value["images"]["base"]["statement"]["append"] = "init=/bin/sh"

    edit(site, lie)
    site.trusting()
    refused(site, NotAnIndex, "boot_digest")


def test_a_new_kernel_or_a_new_word_of_the_publisher_comes_though_the_disk_is_the_same(site: Site) -> None:
    image = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.publisher.amend(image, context=Context.INJECT)
    site.change({"base": site.publisher.resolve(image.digest)})
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.UPDATED and node.resolve("base").facts["context"] == "inject"
    put_same_disk(site, image, "base", "key", append="noisy")
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.UPDATED and node.resolve("base").append == "noisy"
    (row,) = sync.sync(node, (), node.settings.sources)
    assert row.what == sync.PRESENT and list(node.gc()) == []


@pytest.mark.parametrize("act", ["note", "tag"])
def test_a_sync_that_dies_before_its_last_word_is_gone_on_with(
    site: Site, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.put("base", b"2")

    def die(*words: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(*((Master, "note") if act == "note" else (Store, "tag")), die)
        with pytest.raises(KeyboardInterrupt):
            sync.sync(node, (), node.settings.sources)
    image = site.put("base", b"3")
    (row,) = sync.sync(node, (), node.settings.sources)
    assert (row.what, node.resolve("base").digest) == (sync.UPDATED, image.digest)


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
