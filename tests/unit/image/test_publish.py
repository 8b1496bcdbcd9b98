"""Master stores: what is there after each act, for readers at any moment, for publishers side by side, after a crash."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.site import Site

from belljar.errors import (
    BadOption,
    ImageCorrupt,
    ImageMismatch,
    ImageUnknown,
    LockTimeout,
    NotAnIndex,
    OutputUnwritable,
)
from belljar.host import commands
from belljar.image.progress import Silent
from belljar.image.site import publish as act
from belljar.image.site.publish import Change, publish, read_index


def test_a_published_image_is_there_packed_and_for_all_to_read(site: Site) -> None:
    image = site.make("base", b"1", to=site.publisher)
    os.umask(0o077)
    try:
        site.change({"base": image})
    finally:
        os.umask(0o022)
    statement = read_index(site.folder).entries["base"].statement
    assert (statement.digest, statement.boot_digest, statement.previous) == (image.digest, image.boot_digest, ())
    part = statement.parts["disk.qcow2"]
    blob = site.folder / "blobs" / part.blob
    assert part.blob_size == blob.stat().st_size < part.size == image.disk.stat().st_size
    assert commands.run(["zstd", "-dc", str(blob)], timeout=10).out == image.disk.read_bytes()
    public = [path for path in site.folder.rglob("*") if not path.name.startswith(".")]
    assert {oct(path.stat().st_mode & 0o777) for path in public} == {"0o644", "0o755"}
    assert not [path for path in public if path.name.startswith(".")]


def test_nothing_is_packed_twice_and_versions_only_grow(site: Site) -> None:
    image = site.make("base", b"1", to=site.publisher)
    site.change({"base": image})
    before, blobs = read_index(site.folder), {path: path.stat().st_ino for path in site.blobs()}
    site.moment = 5  # the clock went back
    site.change({"base": image, "also": image})
    after = read_index(site.folder)
    assert {path: path.stat().st_ino for path in site.blobs()} == blobs
    assert after.version > before.version
    assert after.entries["base"].statement.version > before.entries["base"].statement.version


def test_a_name_remembers_what_it_was(site: Site) -> None:
    first, second = site.put("base", b"1"), site.put("base", b"2")
    site.put("base", b"1")
    statement = read_index(site.folder).entries["base"].statement
    assert (statement.digest, statement.previous) == (first.digest, (second.digest,))


def test_names_go_and_their_files_when_they_are_old(site: Site) -> None:
    site.put("base", b"1")
    kept = site.put("other", b"2")
    count = len(site.blobs())
    (site.folder / "blobs/.abandoned").write_bytes(b"by a publisher that died")
    site.change({}, remove=("base",), prune=True)
    assert set(read_index(site.folder).entries) == {"other"} and len(site.blobs()) == count + 1
    for path in (*site.blobs(), *(site.folder / "signatures").iterdir()):
        os.utime(path, (site.moment, site.moment))
    site.moment += act.UNUSED_AGE + 1
    site.change({}, prune=True)
    left = read_index(site.folder).entries["other"].statement
    assert left.digest == kept.digest
    assert {path.name for path in site.blobs()} == {part.blob for part in left.parts.values()}
    assert len(list((site.folder / "signatures").iterdir())) == 1


def test_a_file_that_was_pruned_is_packed_again(site: Site) -> None:
    image = site.put("base", b"1")
    for path in site.blobs():
        path.unlink()
    site.change({"other": image})
    assert len(site.blobs()) == 3


def test_what_is_not_there_cannot_be_taken_away(site: Site) -> None:
    site.put("base", b"1")
    before = (site.folder / "index.json").read_bytes()
    with pytest.raises(ImageUnknown):
        site.change({}, remove=("other",))
    assert (site.folder / "index.json").read_bytes() == before


def test_a_corrupt_image_is_not_published(site: Site) -> None:
    image = site.make("base", b"1", to=site.publisher)
    image.disk.chmod(0o600)
    with open(image.disk, "r+b") as file:
        file.write(b"x")
    with pytest.raises(ImageCorrupt):
        site.change({"base": image})
    assert site.blobs() == [] and not (site.folder / "index.json").exists()


def test_a_crash_before_the_end_leaves_what_was_there(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put("base", b"1")
    before = read_index(site.folder)

    real = act.write_whole

    def die(path: Path, *rest: Any, **more: Any) -> None:
        if path == site.folder / "index.json":
            raise KeyboardInterrupt
        real(path, *rest, **more)

    monkeypatch.setattr(act, "write_whole", die)
    with pytest.raises(KeyboardInterrupt):
        site.put("base", b"2")
    assert read_index(site.folder) == before


def test_publishers_side_by_side_lose_nothing(site: Site) -> None:
    images = {f"image{number}": site.make(None, b"%d" % number, to=site.publisher) for number in range(6)}
    key = site.key()

    def one(name: str) -> None:
        publish(site.publisher, site.folder, Change({name: images[name]}, signer=key), Silent())

    threads = [threading.Thread(target=one, args=(name,)) for name in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_index(site.folder).entries) == set(images)
    assert not [path for path in site.folder.rglob(".*") if path.name != act.LOCK]


def test_an_image_that_is_being_published_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    image = site.make("base", b"1", to=site.publisher)
    from belljar.errors import ImageInUse

    seen = []

    def look(*_: object) -> dict[str, object]:
        with pytest.raises(ImageInUse):
            site.publisher.remove(image, force=True)
        seen.append(True)
        return {}

    monkeypatch.setattr(act, "_parts", look)
    with pytest.raises(Exception):  # noqa: B017 - an image without files is no image; that is not the point here
        site.change({"base": image})
        read_index(site.folder)
    assert seen


def test_a_folder_with_something_else_in_it_is_left_alone(site: Site) -> None:
    site.folder.mkdir()
    (site.folder / "index.json").write_text('{"a site\'s own": 1}')
    with pytest.raises(NotAnIndex):
        site.put("base", b"1")
    assert json.loads((site.folder / "index.json").read_text()) == {"a site's own": 1}


@pytest.mark.parametrize("target", ["https://example.org/x", "ftp://x/y"])
def test_one_publishes_into_folders(target: str) -> None:
    with pytest.raises(BadOption):
        act.folder_of(target)


def test_folders_are_paths_and_addresses() -> None:
    assert act.folder_of("/a/b") == act.folder_of("file:///a/b") == Path("/a/b")


def test_a_folder_that_cannot_be_is_refused(site: Site) -> None:
    site.folder.parent.joinpath("file").write_bytes(b"")
    site.folder = site.folder.parent / "file" / "below"
    with pytest.raises(OutputUnwritable):
        site.put("base", b"1")


def test_another_publisher_that_hangs_is_not_waited_for_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from belljar.host.locks import try_lock

    site.put("base", b"1")
    monkeypatch.setattr(act, "LOCK_TIMEOUT", 0.2)
    lock = try_lock(site.folder / act.LOCK)
    assert lock
    try:
        with pytest.raises(LockTimeout, match="publish in"):
            site.put("base", b"2")
    finally:
        lock.release()


def test_publishing_again_mends_a_file_that_was_damaged(site: Site) -> None:
    image = site.put("base", b"1")
    node = site.trusting()
    for blob in site.blobs():
        data = blob.read_bytes()
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ImageMismatch) as caught:
        node.ensure("base")
    assert caught.value.hint == "Publish the image again."
    site.change({"base": image})
    node.ensure("base")
    assert node.verify(node.resolve("base")) == []


def test_what_a_killed_publisher_left_half_written_goes_with_the_next(site: Site) -> None:
    image = site.put("base", b"1")
    left = [site.folder / name for name in (".index.json.0f", "blobs/.0f", "signatures/.x.json.7")]
    for path in left:
        path.write_bytes(b"x")
    site.change({"base": image})
    assert all(path.exists() for path in left)  # somebody may be writing them
    for path in left:
        os.utime(path, (0, 0))
    site.change({"base": image})
    assert not any(path.exists() for path in left) and (site.folder / ".publish.lock").exists()
