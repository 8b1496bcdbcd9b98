"""A payload's working directory, where the guest does not have it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.agent.test_accounts import account

from belljar.agent.guest.guest import Guest


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    guest = Guest()
    spare = tmp_path / "spare"
    spare.mkdir()
    guest.spare_places = [os.fsencode(spare)]
    return guest


def made(guest: Guest, path: Path) -> os.stat_result:
    guest.make_place(os.fsencode(path), account(uid=os.geteuid(), gid=os.getegid()))
    return path.stat()


def test_it_is_one_of_the_folders_that_the_template_made(guest: Guest, tmp_path: Path) -> None:
    spare = (tmp_path / "spare").stat()
    facts = made(guest, tmp_path / "home/project")
    assert (tmp_path / "home").stat().st_ino == spare.st_ino
    assert facts.st_ino != spare.st_ino and facts.st_mode & 0o777 == 0o755
    assert (facts.st_uid, facts.st_gid) == (os.geteuid(), os.getegid())
    assert guest.spare_places == []


def test_on_another_file_system_it_is_a_new_one(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "spare").rmdir()  # a rename is refused there, too
    assert made(guest, tmp_path / "home/project").st_nlink == 2
    assert guest.spare_places == []


def test_one_that_is_there_stays_as_it_is(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    assert made(guest, tmp_path / "home").st_mode & 0o777 == 0o700
    assert len(guest.spare_places) == 1
