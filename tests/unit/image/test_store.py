"""The store: what is found under a name, what is refused, who may remove what."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.agent import bundle
from belljar.errors import (
    BadOption,
    ImageCorrupt,
    ImageInUse,
    ImageUnknown,
    NotPermitted,
    UnsafeFolder,
)
from belljar.host.locks import try_lock
from belljar.image import Image, Settings
from belljar.image.boot import initramfs
from belljar.image.images import Images
from belljar.image.intake import intake
from belljar.image.store import manifest, sweep

Publish = Callable[..., Image]


@pytest.fixture
def site(tmp_path: Path, settings: Settings) -> Images:
    return Images(tmp_path / "site", None, settings)


@pytest.fixture
def user(tmp_path: Path, settings: Settings) -> Images:
    """The store of a user before the site's."""
    return Images(tmp_path / "store", tmp_path / "site", settings)


def test_an_image_is_found_by_name_digest_and_prefix(store: Images, publish: Publish) -> None:
    image = publish("base")
    for reference in ("base", image.digest, image.digest[:8], f"sha256:{image.digest}", f"sha256-{image.digest[:12]}"):
        found = store.resolve(reference)
        assert (found.digest, found.disk, found.names) == (image.digest, image.disk, ("base",))


@pytest.mark.parametrize(
    "reference",
    ["", "base", "../base", "/etc/passwd", "a/b", "deadbeef", "abc", "x" * 101, "base\n", "names", ".", ".."],
)
def test_what_is_not_there_is_unknown(store: Images, publish: Publish, reference: str) -> None:
    publish("other")
    with pytest.raises(ImageUnknown):
        store.resolve(reference)


def test_an_empty_store_has_no_images(store: Images) -> None:
    assert store.images() == []
    with pytest.raises(ImageUnknown):
        store.resolve("debian12")


def test_a_prefix_that_fits_two_images_is_refused(store: Images, publish: Publish) -> None:
    folder = publish("one").disk.parent
    twin = folder.with_name(folder.name[: len("sha256-") + 8] + "0" * 56)
    twin.mkdir()
    with pytest.raises(ImageUnknown, match="more than one"):
        store.resolve(folder.name[len("sha256-") :][:8])


def test_a_name_goes_before_a_digest_and_one_is_no_name(store: Images, publish: Publish) -> None:
    image = publish("base")
    for name in (image.digest[:12], "cafecafe", "", "-x", "a b", "a/b", "x" * 101):
        with pytest.raises(BadOption):
            store.tag(image, name)


@pytest.mark.parametrize("name", ["disk.qcow2", "kernel", "initrd"])
@pytest.mark.parametrize("harm", ["truncated", "gone", "replaced", "touched", "grown"])
def test_a_file_that_is_not_the_stored_one_is_found_before_a_job_starts(
    store: Images, publish: Publish, name: str, harm: str
) -> None:
    path = publish("base").disk.parent / name
    data = path.read_bytes()
    path.chmod(0o600)
    if harm == "truncated":
        os.truncate(path, len(data) // 2)
    elif harm == "gone":
        path.unlink()
    elif harm == "replaced":
        twin = path.with_name("twin")
        twin.write_bytes(data)
        os.utime(twin, ns=(path.stat().st_mtime_ns,) * 2)
        twin.rename(path)
    elif harm == "touched":
        os.utime(path, ns=(1, 1))
    else:
        path.write_bytes(data + b"x")
    with pytest.raises(ImageCorrupt, match=name):
        store.resolve("base")
    assert [image.names for image in store.images()] == [("base",)]
    store.drop("base", force=True)
    assert store.images() == []


def test_a_header_of_another_disk_is_found_though_size_and_times_are_right(store: Images, publish: Publish) -> None:
    disk = publish("base").disk
    before = disk.stat()
    disk.chmod(0o600)
    with open(disk, "r+b") as file:
        file.seek(24)
        file.write((1 << 40).to_bytes(8, "big"))
    os.utime(disk, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ImageCorrupt, match="header"):
        store.resolve("base")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 1}', '{"format": 2}', '{"format": 1, "files": 7}', "\0" * 10, '{"a":' * 20000],
)
def test_a_manifest_that_is_none_is_reported_as_such(store: Images, publish: Publish, text: str) -> None:
    folder = publish("base").disk.parent
    (folder / "manifest.json").chmod(0o600)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ImageCorrupt):
        store.resolve("base")
    assert store.images() == []
    store.drop("base")
    assert not folder.exists()


def test_an_image_folder_others_can_write_to_is_not_trusted(store: Images, publish: Publish) -> None:
    publish("base").disk.parent.chmod(0o777)
    with pytest.raises(UnsafeFolder):
        store.resolve("base")


def test_verify_reads_every_byte(store: Images, publish: Publish) -> None:
    image = publish("base", b"content")
    assert store.verify(image) == []
    image.disk.chmod(0o600)
    with open(image.disk, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"X")
    (wrong,) = store.verify(image)
    assert wrong.startswith("disk.qcow2: sha256 is")


def test_verify_accepts_a_store_that_was_restored_from_a_backup(store: Images, publish: Publish) -> None:
    image = publish("base")
    os.utime(image.disk, ns=(5, 5))
    with pytest.raises(ImageCorrupt):
        store.resolve("base")
    assert store.verify(store.find("base")) == []
    assert store.resolve("base").digest == image.digest


def test_the_same_disk_again_keeps_the_first_copy(store: Images, publish: Publish) -> None:
    first = publish("one")
    with store.hold(first, "m1"):
        second = publish("two")
    assert second.disk.stat().st_ino == first.disk.stat().st_ino
    assert store.images()[0].names == ("one", "two")
    assert list((store.folder / "drafts").iterdir()) == []


def test_the_same_disk_again_mends_a_broken_copy(store: Images, publish: Publish) -> None:
    first = publish("one")
    first.disk.unlink()
    assert publish("one").digest == first.digest
    assert store.resolve("one")


def test_a_name_moves_to_the_new_image(store: Images, publish: Publish) -> None:
    old = publish("base", b"old")
    new = publish("base", b"new")
    assert store.resolve("base").digest == new.digest
    assert store.resolve(old.digest).names == ()


def test_a_held_image_cannot_be_removed(store: Images, publish: Publish) -> None:
    image = publish("base")
    with store.hold(image, "m1"), store.hold(image, "m2"):
        for force in (False, True):
            with pytest.raises(ImageInUse, match="machine"):
                store.remove(image, force=force)
    store.remove(image)
    assert store.images() == []
    with pytest.raises(ImageUnknown):
        store.resolve("base")


def test_an_image_a_template_needs_is_removed_only_by_force(
    tmp_path: Path, settings: Settings, publish: Publish
) -> None:
    store = Images(tmp_path / "store", None, settings, lambda digest: ["template 3f2a"])
    image = publish("base")
    with pytest.raises(ImageInUse, match="template 3f2a"):
        store.remove(image)
    store.remove(image, force=True)
    assert store.images() == []


def test_an_image_removed_between_resolve_and_hold_is_unknown(store: Images, publish: Publish) -> None:
    image = publish("base")
    store.remove(image)
    with pytest.raises(ImageUnknown, match="removed"), store.hold(image, "m1"):
        pass
    store.remove(image)  # again is success


DYING = """\
import os, signal, sys
from pathlib import Path
from belljar.image import Settings
from belljar.image.images import Images
store = Images(Path(sys.argv[1]), None, Settings())
with store.hold(store.resolve("base"), "m1"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_hold_of_a_dead_machine_is_none(store: Images, publish: Publish) -> None:
    image = publish("base")
    argv = [sys.executable, "-c", DYING, str(store.folder.parent)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        with pytest.raises(ImageInUse):
            store.remove(image)
        holder.kill()
        holder.wait()
        store.remove(image)


def test_removing_a_name_keeps_the_image_until_its_last(store: Images, publish: Publish) -> None:
    image = store.tag(publish("one"), "two")
    assert image.names == ("one", "two")
    store.drop("one")
    assert store.resolve("two").digest == image.digest
    store.drop("two")
    assert store.images() == []


def test_removing_by_digest_or_by_force_takes_all_names(store: Images, publish: Publish) -> None:
    for reference in ("one", ""):
        image = store.tag(publish("one"), "two")
        store.drop(reference or image.digest[:12], force=bool(reference))
        assert store.images() == [] and list((store.folder / "names").iterdir()) == []


def test_the_users_own_image_goes_before_the_sites(site: Images, user: Images, publish: Publish) -> None:
    public = publish("base", b"site", to=site)
    assert user.resolve("base").digest == public.digest
    own = publish("base", b"own", to=user)
    assert user.resolve("base").digest == own.digest
    assert {image.digest for image in user.images()} == {own.digest, public.digest}


def test_the_sites_images_are_used_but_not_changed(site: Images, user: Images, publish: Publish) -> None:
    image = publish("base", to=site)
    with user.hold(user.resolve("base"), "m1"), pytest.raises(ImageInUse):
        site.remove(image)
    for act in (user.remove, lambda image: user.tag(image, "mine"), lambda image: user.drop("base", force=True)):
        with pytest.raises(NotPermitted):
            act(user.resolve("base"))
    assert user.boot_files(user.resolve("base")).initrd == user.folder / "cache" / initramfs.boot_digest(image)


def test_a_name_without_its_image_hides_nothing(site: Images, user: Images, publish: Publish) -> None:
    public = publish("base", to=site)
    (user.work_folder("names") / "base").symlink_to("../sha256-" + "0" * 64)
    assert user.resolve("base").digest == public.digest


def test_the_agent_travels_in_the_ramdisk(
    store: Images, publish: Publish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = publish("base")
    first = store.boot_files(image)
    assert (
        first.initrd and first.initrd.read_bytes().startswith(b"a ramdisk") and b"agent.py" in first.initrd.read_bytes()
    )
    assert (first.kernel, first.append) == (image.kernel, "quiet")
    made = first.initrd.stat().st_ino
    assert store.boot_files(image) == first and first.initrd.stat().st_ino == made
    (tmp_path / "agent.py").write_text("another = 1")
    monkeypatch.setattr(bundle, "PARTS", (str(tmp_path / "agent.py"),))
    second = store.boot_files(image)
    assert second.digest != first.digest and second.initrd != first.initrd


def test_a_truncated_ramdisk_is_made_again(store: Images, publish: Publish) -> None:
    image = publish("base")
    initrd = store.boot_files(image).initrd
    assert initrd
    os.truncate(initrd, 3)
    assert store.boot_files(image).initrd == initrd and initrd.stat().st_size > 1000


def test_an_image_without_a_kernel_boots_by_firmware(store: Images, publish: Publish) -> None:
    boot = store.boot_files(publish("base", direct=False))
    assert (boot.kernel, boot.initrd, boot.append) == (None, None, "")


def test_a_missing_image_that_is_not_the_built_in_default_is_not_built(tmp_path: Path, settings: Settings) -> None:
    store = Images(tmp_path / "store", None, replace(settings, default="site-image"))
    store.ensure("site-image")
    with pytest.raises(ImageUnknown):
        store.resolve("site-image")


def test_gc_takes_what_nobody_can_use_and_nothing_else(store: Images, publish: Publish) -> None:
    kept, nameless, held = publish("kept", b"1"), publish(None, b"2"), publish(None, b"3")
    store.boot_files(kept)
    (store.work_folder("cache") / "old").write_bytes(b"")
    (store.work_folder("downloads") / "old.part").write_bytes(b"")
    held_lock = try_lock(store.folder / "downloads" / "held.lock")
    assert held_lock
    for name in ("old.part", "old.lock", "held.part", "held.lock"):
        (store.folder / "downloads" / name).touch()
        os.utime(store.folder / "downloads" / name, (0, 0))
    (store.folder / "downloads" / "new.part").write_bytes(b"")
    dead = store.work_folder("drafts") / "dead-1"
    with store.hold(held, "m1"), intake.draft(store, "alive") as alive:
        dead.mkdir()
        wanted = {
            dead,
            nameless.disk.parent,
            store.folder / "cache" / "old",
            store.folder / "downloads" / "old.part",
            store.folder / "downloads" / "old.lock",
        }
        assert set(store.gc(dry_run=True)) == wanted
        assert all(path.exists() for path in wanted)
        assert set(store.gc()) == wanted
        assert not any(path.exists() for path in wanted)
        assert alive.is_dir() and {image.digest for image in store.images()} == {kept.digest, held.digest}
    assert list(store.gc()) == [held.disk.parent]


def test_what_is_stored_is_for_our_own_eyes_or_everybodys(store: Images, publish: Publish) -> None:
    disk = publish("base").disk
    is_root = os.geteuid() == 0
    assert disk.stat().st_mode & 0o777 == (0o444 if is_root else 0o400)
    assert disk.parent.stat().st_mode & 0o777 == (0o755 if is_root else 0o700)


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]) -> None:
    """Have *act* done just before the first call of a function."""
    real = getattr(owner, name)

    def interrupted(*words: Any, **named: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        act()
        return real(*words, **named)

    monkeypatch.setattr(owner, name, interrupted)


def test_gc_does_not_take_an_image_that_is_about_to_get_its_name(
    store: Images, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, Images, "tag", lambda: list(store.gc()))
    publish("base", b"1")
    assert store.resolve("base")


def test_gc_does_not_take_an_image_that_got_a_name_meanwhile(
    store: Images, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = publish(None, b"1")
    interrupt(monkeypatch, Images, "remove", lambda: store.tag(image, "base"))
    assert list(store.gc()) == [] and store.resolve("base")


def test_an_image_that_was_removed_gets_no_name(store: Images, publish: Publish) -> None:
    image = publish("base")
    store.remove(image)
    with pytest.raises(ImageUnknown, match="removed"):
        store.tag(image, "other")
    assert os.listdir(store.folder / "names") == []


def test_a_draft_that_gc_takes_for_an_abandoned_one_is_begun_again(
    store: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, intake, "try_lock", lambda: list(store.gc()))
    with intake.draft(store, "base") as folder:
        assert folder.is_dir() and list(store.gc()) == []
    assert list((store.folder / "drafts").iterdir()) == []


def test_gc_leaves_what_was_made_while_it_looked(
    store: Images, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish("base", b"1")
    made: list[Path] = []
    real = store.images

    def images() -> list[Image]:
        found = real()
        if not made:
            files = store.boot_files(publish("later", b"2"))
            made.extend([store.work_folder("cache") / f".x.{os.getpid()}", *([files.initrd] if files.initrd else [])])
            made[0].touch()
        return found

    monkeypatch.setattr(initramfs, "boot_digest", lambda image: image.digest)
    monkeypatch.setattr(store, "images", images)
    assert list(sweep._stale(store)) == []
    assert len(made) == 2 and all(path.exists() for path in made)


def test_what_a_killed_process_left_half_written_is_no_name_and_goes(store: Images, publish: Publish) -> None:
    image = publish("base")
    left = [store.work_folder("cache") / ".digest.77", store.folder / "names" / ".other.77"]
    left[0].touch()
    left[1].symlink_to(f"../sha256-{image.digest}")
    for path in left:
        os.utime(path, (0, 0), follow_symlinks=False)
    assert store.resolve(image.digest).names == ("base",)
    store.drop("base")
    assert set(store.gc()) == set(left) and store.images() == []


def start_otherwise(store: Images, image: Image, name: str, append: str) -> Image:
    """The same disk with another command line."""
    with intake.draft(store, name) as folder:
        for file in (image.disk, image.kernel, image.initrd):
            assert file
            (folder / file.name).write_bytes(file.read_bytes())
        what = manifest.Facts(image.source, append, 1.0, "", image.virtual_size, image.facts)
        return store.publish(folder, what, name)


def test_the_same_disk_with_another_start_is_another_image(store: Images, publish: Publish) -> None:
    image = publish("base", b"1")
    other = start_otherwise(store, image, "other", "noisy")
    assert other.digest != image.digest and store.resolve("other").append == "noisy"
    assert store.resolve("base").append == "quiet" and list(store.gc()) == []


def test_the_same_disk_with_another_start_takes_its_name_and_leaves_the_machines_their_image(
    store: Images, publish: Publish
) -> None:
    image = publish("base", b"1")
    with store.hold(image, "m1"):
        assert start_otherwise(store, image, "base", "noisy").append == store.resolve("base").append == "noisy"
        assert store.verify(image) == [] and list(store.gc()) == []
    assert store.verify(store.resolve("base")) == [] and list(store.gc()) == [image.disk.parent]


def test_where_an_image_came_from_makes_no_other_of_it(store: Images, publish: Publish) -> None:
    image = publish("base", b"1")
    with intake.draft(store, "again") as folder:
        for file in (image.disk, image.kernel, image.initrd):
            assert file
            (folder / file.name).write_bytes(file.read_bytes())
        facts = {**image.facts, "published": ["base https://example.org"], "source_sha256": "0" * 64}
        what = manifest.Facts("elsewhere", image.append, 1.0, "", image.virtual_size, facts)
        assert store.publish(folder, what, "again").digest == image.digest
