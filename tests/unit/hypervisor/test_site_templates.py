"""Root's base templates serve others: found by what they are, whoever made them, and copied whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from belljar.errors import TemplateError
from belljar.hypervisor import Template
from belljar.hypervisor.qemu.template import making
from belljar.hypervisor.qemu.template.folders import CLONE, DISK, RAM, STATE, TemplateStore, key_of
from belljar.model import MIB

FACTS = {"image": "d" * 64, "memory": 8 * MIB, "owner": 65534}
MINE = {**FACTS, "owner": 1000}
ME = (os.geteuid(), os.getegid())


@pytest.fixture
def store(tmp_path: Path) -> TemplateStore:
    return TemplateStore(tmp_path / "site", days=7)


def make(store: TemplateStore, *, grows: frozenset[str] = frozenset(("cpus",)), is_open: bool = True) -> Template:
    key = key_of(FACTS)
    draft = store.begin(key, 8 * MIB, ME)
    with open(draft / RAM, "r+b") as file:
        file.seek(3 * MIB)
        file.write(b"guest memory")
    for name in (STATE, DISK, CLONE):
        (draft / name).write_bytes(name.encode() * 100)
    return store.publish(key, FACTS, 1000.0, grows=grows, ram_is_read=False, is_open=is_open)


def test_a_template_of_the_site_is_found_whoever_its_qemu_ran_as(store: TemplateStore) -> None:
    assert making.find_for_user(store, MINE) is None
    made = make(store)
    assert making.find_for_user(store, MINE) == made
    assert making.find_for_user(store, {**MINE, "memory": 16 * MIB}) is None


def test_one_of_a_single_size_is_its_makers_own(store: TemplateStore) -> None:
    make(store, grows=frozenset())
    assert making.find_for_user(store, MINE) is None


def test_what_others_may_read_is_what_they_need_and_nobody_may_write(store: TemplateStore) -> None:
    folder = make(store).folder
    for path in (store.folder, folder, *folder.iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & 0o004 and not mode & 0o022, path
    hidden = TemplateStore(store.folder.parent / "own", days=7)
    folder = make(hidden, is_open=False).folder
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(hidden.folder.stat().st_mode) == 0o700


def test_a_copy_has_the_same_bytes_and_the_same_holes(store: TemplateStore, tmp_path: Path) -> None:
    made = make(store)
    own = TemplateStore(tmp_path / "own", days=7)
    draft = own.begin(key_of(MINE), 8 * MIB, ME)
    making.copy(store, made, draft)
    for name in (RAM, STATE, DISK):
        assert (draft / name).read_bytes() == (made.folder / name).read_bytes()
    assert (draft / RAM).stat().st_blocks * 512 < 4 * MIB


def test_one_that_somebody_wrote_to_is_neither_found_nor_copied(store: TemplateStore, tmp_path: Path) -> None:
    made = make(store)
    with open(made.folder / RAM, "r+b") as file:
        file.write(b"not the guest's")
    assert making.find_for_user(store, MINE) is None
    draft = TemplateStore(tmp_path / "own", days=7).begin(key_of(MINE), 8 * MIB, ME)
    with pytest.raises(TemplateError, match="changed while it was copied"):
        making.copy(store, made, draft)


def test_one_that_is_gone_meanwhile_is_no_accident(store: TemplateStore, tmp_path: Path) -> None:
    made = make(store)
    store.remove(made.key)
    draft = TemplateStore(tmp_path / "own", days=7).begin(key_of(MINE), 8 * MIB, ME)
    with pytest.raises(TemplateError, match="cannot be copied"):
        making.copy(store, made, draft)
