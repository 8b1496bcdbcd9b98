"""Folders of ours are ours alone, on the whole way to them."""

import os
from pathlib import Path

import pytest

from belljar.errors import UnsafeFolder
from belljar.host.files import check_ours, private_folder


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A place where everybody may write, as /var/tmp is."""
    folder = tmp_path / "public"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def test_a_wide_umask_opens_no_folder_on_the_way(public: Path) -> None:
    before = os.umask(0)
    try:
        private_folder(public / "belljar-1000/run/machines")
    finally:
        os.umask(before)
    assert (public / "belljar-1000").stat().st_mode & 0o777 == 0o755
    assert (public / "belljar-1000/run/machines").stat().st_mode & 0o777 == 0o700


def test_a_strangers_folder_on_the_way_is_refused(public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could put another folder in the place of ours at any moment."""
    (public / "belljar-1000/run").mkdir(parents=True, mode=0o700)
    real, stranger = os.lstat, 4321

    def lstat(path: Path) -> os.stat_result:
        facts = list(real(path))
        if path == public / "belljar-1000":
            facts[4] = stranger
        return os.stat_result(facts)

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(UnsafeFolder, match="belljar-1000: belongs to uid 4321"):
        check_ours(public / "belljar-1000/run")


def test_a_folder_of_ours_in_a_public_place_is_fine(public: Path) -> None:
    check_ours(private_folder(public / "belljar-1000/run"))
