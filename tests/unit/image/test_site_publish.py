"""A repository: what is there after each act, its keys, its publishers side by side and after a crash."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.site import Site

from belljar.errors import (
    BadOption,
    BadSetting,
    ImageCorrupt,
    ImageInUse,
    ImageMismatch,
    ImageUnknown,
    InputMissing,
    LockTimeout,
    NotPermitted,
    RepositoryRefused,
)
from belljar.host import commands
from belljar.host.locks import try_lock
from belljar.image.progress import Progress
from belljar.image.site import publish, sync

DAY = 86400.0


def states(site: Site) -> list[str]:
    return [row.what for row in sync.sync(site.node, (), site.node.settings.sources)]


def test_a_published_image_is_there_packed_and_for_all_to_read(site: Site) -> None:
    os.umask(0o077)
    try:
        image = site.put("base", b"1")
    finally:
        os.umask(0o022)
    (disk,) = (site.folder / "targets/base").glob("*.disk.qcow2.zst")
    assert disk.stat().st_size < image.disk.stat().st_size
    assert commands.run(["zstd", "-dc", str(disk)], timeout=10).out == image.disk.read_bytes()
    public = [path for path in site.folder.rglob("*") if path.name != publish.LOCK]
    assert {oct(path.stat().st_mode & 0o777) for path in public} == {"0o644", "0o755"}
    assert not [path for path in public if path.name.startswith(".")]
    assert {oct(path.stat().st_mode & 0o777) for path in site.keys.iterdir()} == {"0o600"}


def test_a_repository_from_a_backup_goes_on_where_it_was(site: Site) -> None:
    site.put("base", b"1")
    backup = {path: path.read_bytes() for path in site.folder.rglob("*") if path.is_file()}
    site.put("base", b"2")
    node = site.trusting()
    node.ensure("base")
    for path in (site.folder / "metadata").iterdir():
        path.unlink()
    for path, data in backup.items():
        path.write_bytes(data)
    assert states(site) == [sync.FAILED]
    site.moment += 5
    site.change()
    assert states(site) == [sync.UPDATED]


def test_files_of_former_images_go_when_they_are_old(site: Site) -> None:
    site.put("base", b"1")
    former = {*(site.folder / "targets/base").glob("*.disk.*"), *(site.folder / "metadata").glob("*.targets.json")}
    (site.folder / "targets/base/.0f").write_bytes(b"of a publisher that was killed")
    site.put("base", b"2")
    assert former <= {*site.files(), *(site.folder / "metadata").iterdir()}
    for path in site.folder.rglob("*.*"):
        os.utime(path, (time.time() - publish.UNUSED_AGE - 1,) * 2)
    site.change()
    assert len(site.files()) == 3 and not former & {*site.files(), *(site.folder / "metadata").iterdir()}
    site.trusting().ensure("base")
    assert (site.folder / "metadata/1.root.json").exists()


def test_what_is_not_there_cannot_be_revoked(site: Site) -> None:
    with pytest.raises(ImageUnknown, match="publishes other"):
        site.change(lambda repository: repository.remove("other"))


def test_a_corrupt_image_is_not_published(site: Site) -> None:
    image = site.make("base", b"1", to=site.publisher)
    image.disk.chmod(0o600)
    with open(image.disk, "r+b") as file:
        file.write(b"x")
    with pytest.raises(ImageCorrupt):
        site.change(lambda repository: repository.put(site.publisher, "base", image, Progress()))
    assert site.files() == []


def test_an_image_that_is_being_published_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(*_: object) -> None:
        with pytest.raises(ImageInUse):
            site.publisher.drop("base", force=True)
        raise KeyboardInterrupt

    image = site.make("base", b"1", to=site.publisher)
    monkeypatch.setattr(publish.Repository, "_packed", look)
    with pytest.raises(KeyboardInterrupt):
        site.change(lambda repository: repository.put(site.publisher, "base", image, Progress()))


def test_publishing_again_mends_a_file_that_was_damaged(site: Site) -> None:
    site.put("base", b"1")
    for path in site.files():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ImageMismatch) as caught:
        site.trusting().ensure("base")
    assert "publish the image again" in caught.value.hint
    site.put("base", b"1")
    site.node.ensure("base")


def test_publishers_side_by_side_lose_nothing(site: Site) -> None:
    images = {f"image{number}": site.make(None, b"%d" % number, to=site.publisher) for number in range(4)}

    def put(name: str) -> None:
        with publish.opened(site.line, publish.load_keys([site.keys])) as repository:
            repository.put(site.publisher, name, images[name], Progress())

    threads = [threading.Thread(target=put, args=(name,)) for name in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.name for row in sync.sync(site.trusting(), (), (site.line,), dry_run=True)} == set(images)


@pytest.mark.parametrize("at", range(5))
def test_a_publisher_that_dies_leaves_a_state_that_is_whole(
    site: Site, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    site.put("base", b"1")
    real, left = publish.write_whole, iter(range(at))

    def dying(*words: Any, **more: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        real(*words, **more)

    with monkeypatch.context() as patched:
        patched.setattr(publish, "write_whole", dying)
        if at < 3:
            with pytest.raises(KeyboardInterrupt):
                site.put("base", b"2")
        else:
            site.put("base", b"2")
    site.trusting().ensure("base")
    image = site.put("base", b"3")
    assert states(site) == [sync.UPDATED] and site.node.resolve("base").digest == image.digest


def test_a_publisher_that_hangs_is_not_waited_for_for_ever(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LOCK_TIMEOUT", 0.2)
    lock = try_lock(site.folder / publish.LOCK)
    assert lock
    try:
        with pytest.raises(LockTimeout, match="publish in"):
            site.put("base", b"2")
    finally:
        lock.release()


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", publish.KEYS)
def test_a_key_is_rotated_and_the_former_one_is_worth_nothing(site: Site, key: str) -> None:
    site.put("base", b"1")
    node = site.trusting()
    node.ensure("base")
    site.change(lambda repository: repository.rotate(key, site.keys))
    (site.keys / f"{key}.pem").rename(site.keys.with_name("stolen.pem"))
    image = site.put("base", b"2")
    assert states(site) == [sync.UPDATED] and node.resolve("base").digest == image.digest
    with publish.opened(site.line, publish.load_keys([site.keys.with_name("stolen.pem")])) as repository:
        with pytest.raises(NotPermitted):
            repository.delegate("x", "x", [], 1)
        with pytest.raises(NotPermitted):
            repository.put(site.publisher, "base", image, Progress())
    assert states(site) == [sync.PRESENT]


def test_a_lost_key_is_replaced_by_the_root(site: Site) -> None:
    site.put("base", b"1")
    for name in ("targets", "online"):
        (site.keys / f"{name}.pem").unlink()
        site.change(lambda repository, name=name: repository.rotate(name, site.keys))  # type: ignore[misc]
    site.put("base", b"2")
    site.trusting().ensure("base")


def test_a_timer_with_the_online_key_alone_keeps_all_fresh(site: Site) -> None:
    site.put("base", b"1")
    site.moment = 13 * DAY
    before = site.metadata("targets")
    with publish.opened(site.line, publish.load_keys([site.keys / "online.pem"]), time.time() + site.moment) as online:
        pass
    assert online.notes == [] and site.metadata("targets") == before
    assert b'"expires":"20' in site.metadata("timestamp").read_bytes()
    site.trusting().ensure("base")
    with publish.opened(site.line, publish.load_keys([site.keys / "online.pem"]), time.time() + 340 * DAY) as online:
        pass
    (note,) = online.notes
    assert note.startswith("the role targets expires in 2") and "--refresh" in note


def test_a_delegate_is_seen_after_the_sites_next_refresh_and_may_change_its_key(site: Site) -> None:
    site.put("base", b"1")
    site.delegate("alice", "alice-*")
    node = site.trusting()
    assert [row.name for row in sync.sync(node, (), (site.line,), dry_run=True)] == ["base"]  # it has nothing yet
    image = site.make(None, b"2", to=site.publisher)
    with publish.opened(site.line, publish.load_keys([site.key("alice")])) as alice:
        alice.put(site.publisher, "alice-1", image, Progress())
    assert alice.notes == ["nodes see this after the site's next `belljar image publish --refresh`"]
    with pytest.raises(ImageUnknown):
        node.ensure("alice-1")
    site.change()
    node.ensure("alice-1")
    for keys in (("alice", "alice2"), ("alice2",)):
        site.delegate("alice", "alice-*", *keys)
        site.change(by="alice2")
    site.put("alice-1", b"3", by="alice2")
    assert states(site) == [sync.UPDATED]


def test_a_key_is_its_owners_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "key"
    word = publish.public_word(publish.make_key(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert publish.public_word(publish.make_key(path)) == word and word.startswith("ed25519:")
    path.chmod(0o640)
    with pytest.raises(BadSetting, match="others may read"):
        publish.load_keys([path])
    (tmp_path / "noise").write_bytes(b"noise" * 4)
    (tmp_path / "noise").chmod(0o600)
    with pytest.raises(InputMissing, match="not a private key"):
        publish.load_keys([tmp_path / "noise"])
    with pytest.raises(BadSetting, match="No such file"):
        publish.load_keys([tmp_path / "none"])
    with pytest.raises(BadOption):
        publish.make_key(tmp_path / "none/key")


def test_a_repository_is_made_once_and_goes_on_after_a_crash(site: Site) -> None:
    with pytest.raises(BadOption, match="there already"):
        site.begin()
    line = site.line
    (site.folder / "metadata/timestamp.json").unlink()
    assert site.begin().line == line
    site.put("base", b"1")
    site.trusting().ensure("base")


def test_a_folder_without_this_repository_is_refused(site: Site, tmp_path: Path) -> None:
    root = site.line.partition("#")[2]
    for line in (f"{tmp_path}#{root}", f"https://example.org/x#{root}"):
        with pytest.raises(BadOption, match="not a folder with a repository"), publish.opened(line, []):
            pass
    with pytest.raises(RepositoryRefused, match="no version of its root"):
        with publish.opened(f"{site.folder}#sha256={'0' * 64}", []):
            pass
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(BadOption):
        publish.init(tmp_path / "file/below", tmp_path / "k", 0.0)


@pytest.mark.parametrize(
    "order", [("a/b", "x"), ("targets", "x"), ("a", "x y"), ("a", ""), ("a", "[a]"), ("a", "x", "ed25519:00")]
)
def test_a_delegation_of_another_form_is_refused(site: Site, order: tuple[str, ...]) -> None:
    role, names, *keys = order
    with pytest.raises(BadOption):
        site.change(lambda repository: repository.delegate(role, names, keys or [site.word("k")], 1))
    with pytest.raises(BadOption, match="not enough"):
        site.change(lambda repository: repository.delegate("a", "b", [site.word("k")], 2))
