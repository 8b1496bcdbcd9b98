"""An image that a verification found damaged: nobody starts it, nobody takes it for whole, and its bytes can come again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.image.image_parts import ext4, runtime
from tests.unit.image.site import Site

from belljar.cli.image import image as verb
from belljar.cli.parser import Parser
from belljar.errors import ImageCorrupt
from belljar.findings import Grade
from belljar.image import Image, Settings, layer_name
from belljar.image.images import Images
from belljar.image.intake.sources import Order, bring
from belljar.image.site import sync
from belljar.image.store.store import Store
from belljar.jobs.site import doctor as checks
from belljar.model import Context

Publish = Callable[..., Image]
Typed = Callable[..., int]


def flip(path: Path) -> None:
    """One byte of the file's end is another one, with size and times as they were, as by a bad disk."""
    before = path.stat()
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    path.chmod(before.st_mode & 0o777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def damaged(store: Store, image: Image) -> Image:
    flip(image.disk)
    assert store.verify(image)
    return image


def typing(store: Store, root: Path | None = None) -> Typed:
    def typed(*words: str) -> int:
        parser = Parser(prog="belljar image")
        parser.take(verb.VERBS["image"])
        args = parser.parse_args(words)
        return int(args.carry_out(args, runtime(store, root)))

    return typed


def rows(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# -- the mark ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["disk.qcow2", "kernel", "initrd"])
def test_what_a_verification_found_wrong_is_not_started_again(
    store: Store, publish: Publish, settings: Settings, name: str
) -> None:
    image = store.tag(publish("base", b"content"), "other")
    flip(image.disk.parent / name)
    assert store.resolve("base")  # nothing tells, until somebody reads it
    assert store.verify(image)
    later = Images(store.folder.parent, None, settings)  # another process
    for reference in ("base", "other", image.digest):
        with pytest.raises(ImageCorrupt, match=rf"image \w+: {name}: sha256 is.*verify") as caught:
            later.resolve(reference)
        assert "it came from build debian bookworm" in caught.value.hint


def test_a_file_that_is_right_again_can_be_used_but_nothing_made_of_the_wrong_one(
    store: Store, publish: Publish
) -> None:
    image = damaged(store, publish("base", b"content"))
    flip(image.disk)
    assert store.verify(image) == []
    again = store.resolve("base")
    assert again.wrong == () and again.created != image.created  # which a template's key has
    assert layer_name(again) != layer_name(image)


def test_a_ramdisk_made_from_a_damaged_one_is_not_used_for_the_repaired_image(store: Store, publish: Publish) -> None:
    image = publish("base")
    assert image.initrd
    flip(image.initrd)
    bad = store.boot_files(image).initrd
    assert store.verify(image)
    flip(image.initrd)
    assert store.verify(image) == []
    good = store.boot_files(store.resolve("base")).initrd
    assert bad and good and bad != good and good.read_bytes().startswith(b"a ramdisk")
    assert list(store.gc(dry_run=True)) == [bad]


def test_an_image_that_was_exchanged_while_it_was_read_gets_no_mark(
    store: Store, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    from belljar.image.store import manifest

    image, read = publish("base", b"content"), manifest.sha256_of
    flip(image.disk)

    def exchanged_behind_our_back(path: Path) -> str:
        found = read(path)
        if path == image.disk:
            monkeypatch.setattr(manifest, "sha256_of", read)
            publish("base", b"content")
        return found

    monkeypatch.setattr(manifest, "sha256_of", exchanged_behind_our_back)
    assert store.verify(image)
    assert store.resolve("base").wrong == () and store.verify(image) == []


def test_who_may_not_write_the_sites_store_is_told_whom_to_ask(
    tmp_path: Path, settings: Settings, publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    site, user = Images(tmp_path / "site", None, settings), Images(tmp_path / "store", tmp_path / "site", settings)
    image = publish("base", b"content", to=site)
    flip(image.disk)
    typed = typing(user)
    assert typed("verify") == 1
    told = capsys.readouterr()
    assert "sha256" in told.out
    assert "build debian bookworm" in told.err and "root" in told.err and str(site.folder) in told.err
    assert user.resolve("base")  # what only this user has seen is not the site's word
    assert site.verify(site.find("base"))
    with pytest.raises(ImageCorrupt) as caught:
        user.resolve("base")
    assert "root" in caught.value.hint


# -- what tells of it --------------------------------------------------------------------------------------------------


def test_the_list_and_the_doctor_tell(store: Store, publish: Publish, capsys: pytest.CaptureFixture[str]) -> None:
    publish("good", b"1")
    damaged(store, publish("bad", b"2"))
    assert typing(store)("list") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "STATE" in head.split()
    assert {line.split()[0]: "corrupt" in line.split() for line in lines} == {"good": False, "bad": True}
    typing(store)("list", "--format", "json")
    assert {one["names"][0]: (one["state"], bool(one["wrong"])) for one in rows(capsys)} == {
        "good": ("ready", False), "bad": ("corrupt", True),
    }  # fmt: skip
    runtime: Any = SimpleNamespace(images=store, settings=SimpleNamespace(image=replace(Settings(), default="good")))
    finding = checks.images(runtime)
    assert finding.grade is Grade.WARN and "image bad" in finding.text and "build debian" in finding.remedy
    runtime.settings.image = replace(Settings(), default="bad")
    finding = checks.images(runtime)
    assert finding.grade is Grade.FAIL and "build debian" in finding.remedy


def test_a_file_that_was_written_to_is_listed_as_corrupt_too(
    store: Store, publish: Publish, capsys: pytest.CaptureFixture[str]
) -> None:
    os.utime(publish("base").disk, ns=(1, 1))
    typing(store)("list", "--format", "json")
    assert [one["state"] for one in rows(capsys)] == ["corrupt"]


# -- what heals it -----------------------------------------------------------------------------------------------------


def test_a_sync_brings_a_damaged_image_again(site: Site) -> None:
    whole = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    damaged(node, node.resolve("base"))
    (row,) = sync.sync(node, (), node.settings.sources, dry_run=True)
    assert row.what == sync.REPAIRED and node.find("base").wrong
    (row,) = sync.sync(node, (), node.settings.sources)
    assert (row.name, row.what) == ("base", sync.REPAIRED)
    assert node.resolve("base").disk.read_bytes() == whole.disk.read_bytes() and node.verify(node.resolve("base")) == []


def test_a_damaged_file_is_no_way_to_save_a_download(site: Site) -> None:
    """The name is gone, the disk is still there under another one, and nobody has verified it."""
    whole = site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    node.tag(node.resolve("base"), "mine")
    flip(node.resolve("mine").disk)
    node.drop("base")
    sync.sync(node, ("base",), node.settings.sources)
    for name in ("base", "mine"):
        assert node.verify(node.resolve(name)) == []
    assert node.resolve("base").disk.read_bytes() == whole.disk.read_bytes()


def test_the_same_disk_stored_again_takes_the_place_of_a_damaged_one(store: Store, publish: Publish) -> None:
    image = store.tag(publish("base", b"content"), "other")
    flip(image.disk)  # nobody has looked yet
    assert publish("base", b"content").digest == image.digest
    assert store.verify(store.resolve("base")) == [] and store.resolve("other").digest == image.digest


def test_a_damaged_image_names_where_it_came_from(site: Site, store: Store, publish: Publish, tmp_path: Path) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    node.tag(damaged(node, node.resolve("base")), "mine")
    damaged(store, publish("built", b"content"))
    damaged(store, bring(store, Order(str(ext4(tmp_path / "disk")), "disk", context=Context.INJECT), None))
    for images, name, source in (
        (node, "mine", node.find("mine").source),
        (store, "built", "build debian bookworm"),
        (store, "disk", f"file://{tmp_path}/disk"),
    ):
        with pytest.raises(ImageCorrupt) as caught:
            images.resolve(name)
        assert caught.value.hint == f"Sync, import or build it again; it came from {source}."


def test_a_damaged_import_is_replaced_by_the_same_import(store: Store, tmp_path: Path) -> None:
    order = Order(str(ext4(tmp_path / "disk")), "mine")
    image = damaged(store, bring(store, order))
    assert bring(store, order).digest == image.digest
    assert store.resolve("mine").digest == image.digest and store.verify(store.resolve("mine")) == []
