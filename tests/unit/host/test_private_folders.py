"""Folders of ours are ours alone, on the whole way to them."""

import os
from collections.abc import Callable
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


STRANGER = 4321


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Give a file or link to another uid: only root can, for the others it looks so."""
    owners: dict[str, int] = {}
    real = os.lstat

    def lstat(path: str | Path) -> os.stat_result:
        facts = list(real(path))
        facts[4] = owners.get(os.fspath(path), facts[4])
        return os.stat_result(facts)

    monkeypatch.setattr(os, "lstat", lstat)
    return lambda path, uid: owners.update({str(path): uid})


def test_a_strangers_folder_on_the_way_is_refused(public: Path, owned: Callable[[Path, int], None]) -> None:
    """Its owner could put another folder in the place of ours at any moment."""
    (public / "belljar-1000/run").mkdir(parents=True, mode=0o700)
    owned(public / "belljar-1000", STRANGER)
    with pytest.raises(UnsafeFolder, match="belljar-1000: belongs to uid 4321"):
        check_ours(public / "belljar-1000/run")


def test_nothing_is_made_in_a_strangers_folder(tmp_path: Path, owned: Callable[[Path, int], None]) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    owned(tmp_path / "theirs", STRANGER)
    with pytest.raises(UnsafeFolder, match="theirs: belongs to uid 4321") as caught:
        private_folder(tmp_path / "theirs/belljar/run")
    assert list((tmp_path / "theirs").iterdir()) == [] and "paths.*" in caught.value.hint


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_is_made_through_a_strangers_link(
    public: Path, tmp_path: Path, owned: Callable[[Path, int], None], is_there: bool
) -> None:
    (tmp_path / "root").mkdir(mode=0o700)
    if is_there:
        (tmp_path / "root/etc").mkdir()
    (public / "belljar-0").symlink_to(tmp_path / "root/etc")
    owned(public / "belljar-0", STRANGER)
    with pytest.raises(UnsafeFolder, match="belljar-0: a symbolic link that belongs to uid 4321"):
        private_folder(public / "belljar-0/run/machines")
    assert [one.name for one in (tmp_path / "root").rglob("*")] == ["etc"] * is_there


def test_a_link_of_our_own_is_followed_and_its_way_is_judged_too(
    tmp_path: Path, owned: Callable[[Path, int], None]
) -> None:
    (tmp_path / "large/disk").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/link").symlink_to("../large/../large/disk")
    assert private_folder(tmp_path / "a/link/scratch").is_dir() and (tmp_path / "large/disk/scratch").is_dir()
    owned(tmp_path / "large", STRANGER)
    with pytest.raises(UnsafeFolder, match="large: belongs to uid 4321"):
        private_folder(tmp_path / "a/link/other")
    assert not (tmp_path / "large/disk/other").exists()


def test_a_link_to_nothing_in_the_place_of_our_folder_makes_nothing(tmp_path: Path) -> None:
    (tmp_path / "ours").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        private_folder(tmp_path / "ours")
    assert not (tmp_path / "elsewhere").exists()


def test_links_in_a_ring_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UnsafeFolder, match="symbolic link"):
        private_folder(tmp_path / "a/run")


def test_nothing_is_made_where_everybody_may_rename_it(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UnsafeFolder, match=r"open: everybody may write to it \(mode 0777\)"):
        private_folder(tmp_path / "open/run/machines")
    assert list((tmp_path / "open").iterdir()) == []


def test_a_folder_of_a_system_account_on_the_way_is_the_sites(
    tmp_path: Path, public: Path, owned: Callable[[Path, int], None]
) -> None:
    """A batch system's spool folder belongs to its own account."""
    (tmp_path / "spool").mkdir()
    owned(tmp_path / "spool", 64)
    check_ours(private_folder(tmp_path / "spool/job/run"))
    (public / "spool").mkdir()
    owned(public / "spool", 64)  # who was first there is no question of trust
    with pytest.raises(UnsafeFolder, match="belongs to uid 64"):
        private_folder(public / "spool/job/run")


def test_a_folder_of_ours_in_a_public_place_is_fine(public: Path) -> None:
    check_ours(private_folder(public / "belljar-1000/run"))
