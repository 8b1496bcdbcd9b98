"""Templates on disk: what is trusted, what is not, and what is left when somebody dies half way."""

import os
from pathlib import Path

import pytest

from belljar.errors import NoSpace, TemplateError, UnsafeFolder
from belljar.host.locks import try_lock
from belljar.hypervisor import Template
from belljar.hypervisor.qemu.template import folders as module
from belljar.hypervisor.qemu.template.folders import (
    CLONE,
    DISK,
    RAM,
    SEED,
    STATE,
    TemplateStore,
    copy_overlay,
    key_of,
)
from belljar.model import MIB

FACTS = {"image": "d" * 64, "memory": 8 * MIB, "cpus": 1}
KEY = key_of(FACTS)
ME = (os.geteuid(), os.getegid())
DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path / "templates", days=7)


def make(store: TemplateStore, *, created: float = 1000.0, facts: dict[str, object] = FACTS) -> Template:
    key = key_of(facts)
    filled(store, key)
    return store.publish(key, facts, created, ram_is_read=False)


def filled(store: TemplateStore, key: str = KEY) -> Path:
    draft = store.begin(key, 8 * MIB, ME)
    with open(draft / RAM, "r+b") as file:
        file.seek(3 * MIB)
        file.write(b"guest memory")
    for name in (STATE, DISK, CLONE):
        (draft / name).write_bytes(name.encode() * 100)
    return draft


def test_a_template_is_found_by_its_facts_alone(store: TemplateStore) -> None:
    assert store.find(KEY) is None
    made = make(store)
    assert store.find(KEY) == made
    assert made.facts == FACTS
    assert store.find(key_of({**FACTS, "cpus": 2})) is None
    assert not store.draft(KEY).exists()


def test_a_template_takes_only_the_space_that_was_written(store: TemplateStore) -> None:
    assert make(store).size < 4 * MIB


def test_a_template_that_takes_more_by_now_is_the_same(store: TemplateStore) -> None:
    """In memory (tmpfs) a hole that a clone reads becomes a page."""
    made = make(store)
    with open(made.folder / RAM, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, MIB)
    now = store.read(KEY)
    assert now.size >= made.size + MIB and now == made


@pytest.mark.parametrize("name", [RAM, STATE, DISK, CLONE])
def test_a_file_that_was_written_to_is_noticed_at_once(store: TemplateStore, name: str) -> None:
    template = make(store)
    path = template.folder / name
    before = path.stat()
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.write(b"X")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    path.chmod(before.st_mode & 0o777)
    assert store.find(KEY) is None and f"{name} has changed" in "".join(store.changes(template))


@pytest.mark.parametrize("name", [RAM, STATE, DISK, CLONE])
def test_a_file_that_was_cut_or_lost_is_noticed(store: TemplateStore, name: str) -> None:
    template = make(store)
    (template.folder / name).chmod(0o600)
    os.truncate(template.folder / name, 10)
    assert store.find(KEY) is None and "has changed" in "".join(store.changes(template))
    (template.folder / name).unlink()
    assert store.find(KEY) is None and "is missing" in "".join(store.changes(template))


def test_a_file_that_was_replaced_by_an_equal_one_is_noticed(store: TemplateStore) -> None:
    template = make(store)
    copy = template.folder / "copy"
    copy.write_bytes((template.folder / STATE).read_bytes())
    copy.rename(template.folder / STATE)
    assert store.find(KEY) is None and "state has changed" in "".join(store.changes(template))


@pytest.mark.parametrize("rubbish", [b"", b"{", b"{}", b'{"key": "x", "facts": {}}', b"\0" * 100])
def test_a_template_with_a_broken_manifest_is_not_used(store: TemplateStore, rubbish: bytes) -> None:
    template = make(store)
    (template.folder / "manifest.json").write_bytes(rubbish)
    assert store.find(KEY) is None
    assert store.all() == []
    assert store.expire(1000.0) == [KEY]


def test_the_manifest_of_another_template_is_not_believed(store: TemplateStore) -> None:
    other = make(store, facts={**FACTS, "cpus": 2})
    make(store)
    (store.path(KEY) / "manifest.json").write_bytes((other.folder / "manifest.json").read_bytes())
    assert store.find(KEY) is None


def test_a_store_that_others_may_write_to_is_refused(store: TemplateStore) -> None:
    make(store)
    store.folder.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="others may write"):
        store.find(KEY)
    store.folder.chmod(0o700)


def test_a_template_that_others_may_write_to_is_not_used(store: TemplateStore) -> None:
    make(store).folder.chmod(0o777)
    assert store.find(KEY) is None


def test_a_link_in_place_of_a_template_is_not_followed(store: TemplateStore, tmp_path: Path) -> None:
    template = make(store)
    template.folder.rename(tmp_path / "elsewhere")
    template.folder.symlink_to(tmp_path / "elsewhere")
    assert store.find(KEY) is None


def test_without_room_nothing_is_begun(store: TemplateStore) -> None:
    with pytest.raises(NoSpace, match="MiB free"):
        store.begin(KEY, 1 << 62, ME)
    assert not store.draft(KEY).exists()


def test_a_new_draft_replaces_what_a_dead_builder_left(store: TemplateStore) -> None:
    (store.begin(KEY, 8 * MIB, ME) / STATE).write_bytes(b"half")
    assert sorted(path.name for path in store.begin(KEY, 8 * MIB, ME).iterdir()) == [RAM]


def test_the_disc_in_the_drive_is_the_templates_own(store: TemplateStore, tmp_path: Path) -> None:
    (tmp_path / "disc").write_bytes(b"seed")
    draft = store.begin(KEY, 8 * MIB, ME, seed=tmp_path / "disc")
    assert (draft / SEED).read_bytes() == b"seed" and not (draft / SEED).samefile(tmp_path / "disc")
    assert not (store.begin(KEY, 8 * MIB, ME, seed=tmp_path / "gone") / SEED).exists()


def test_a_template_is_made_again_in_the_place_of_one_that_cannot_be_used(store: TemplateStore) -> None:
    (make(store).folder / STATE).unlink()
    assert store.find(KEY) is None
    assert store.find(make(store).key) is not None


def test_templates_expire_by_age_and_drafts_when_their_maker_is_gone(store: TemplateStore) -> None:
    make(store, created=1000.0)
    young = make(store, created=1000.0 + 6 * DAY, facts={**FACTS, "cpus": 2})
    abandoned = store.begin(key_of({**FACTS, "cpus": 3}), 8 * MIB, ME)
    beside = store.begin(young.key, 8 * MIB, ME)
    assert store.expire(1000.0 + 8 * DAY) == [KEY]
    assert [one.key for one in store.all()] == [young.key]
    assert not abandoned.exists() and not beside.exists()


def test_a_draft_that_somebody_makes_is_left_alone(store: TemplateStore) -> None:
    draft = store.begin(KEY, 8 * MIB, ME)
    lock = try_lock(store.lock(KEY))
    assert lock is not None
    store.expire(1000.0)
    assert draft.exists()
    lock.release()
    store.expire(1000.0)
    assert not draft.exists()
    assert list(store.folder.iterdir()) == []


def test_files_that_are_not_ours_survive(store: TemplateStore) -> None:
    make(store)
    (store.folder / "README").write_text("not a template")
    store.expire(1e12)
    assert [path.name for path in store.folder.iterdir()] == ["README"]


@pytest.mark.parametrize("key", ["", "..", "../images", "x" * 20, "README"])
def test_only_a_key_can_be_removed(store: TemplateStore, key: str) -> None:
    make(store)
    store.remove(key)
    assert store.find(KEY) is not None


def test_a_clone_gets_an_overlay_of_its_own_and_none_of_a_template_that_is_gone(
    store: TemplateStore, tmp_path: Path
) -> None:
    template = make(store)
    copy_overlay(template, tmp_path / "overlay", ME)
    assert (tmp_path / "overlay").read_bytes() == (template.folder / CLONE).read_bytes()
    assert (tmp_path / "overlay").stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        copy_overlay(template, tmp_path / "overlay", ME)
    store.remove(template.key)
    with pytest.raises(TemplateError, match="cannot be used any more"):
        copy_overlay(template, tmp_path / "another", ME)


def test_a_change_of_the_folders_form_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(FACTS)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    assert key_of(FACTS) != before


def test_a_disc_is_watched_like_the_other_files_and_most_templates_have_none(store: TemplateStore) -> None:
    draft = store.begin(KEY, 8 * MIB, ME)
    for name in (STATE, DISK, CLONE, SEED):
        (draft / name).write_bytes(name.encode() * 100)
    template = store.publish(KEY, FACTS, 1000.0, ram_is_read=False)
    assert store.find(KEY) == template and store.changes(template) == []
    (template.folder / SEED).chmod(0o600)
    (template.folder / SEED).write_bytes(b"another guest's")
    assert store.find(KEY) is None and "seed.iso has changed" in "".join(store.changes(template))
    (template.folder / SEED).unlink()
    assert store.find(KEY) is None and "seed.iso is missing" in "".join(store.changes(template))


def test_a_draft_is_abandoned_when_nobody_has_its_lock(store: TemplateStore) -> None:
    draft = filled(store)
    assert store.abandoned() == [draft]
    lock = try_lock(store.lock(KEY))
    assert lock is not None and store.abandoned() == []
    lock.release()
    fork = try_lock(store.lock(KEY), shared=True)
    assert fork is not None and store.abandoned() == []
    fork.release()
