"""Where belljar keeps its files, for whom."""

import os
from pathlib import Path

from belljar.config import default_paths, inspect

ME = os.getuid()


def test_root_has_the_places_of_the_system() -> None:
    paths = default_paths(0, {"XDG_RUNTIME_DIR": "/run/user/0", "HOME": "/root"})
    assert paths.run == Path("/run/belljar")
    assert paths.store == Path("/var/lib/belljar")
    assert paths.site_store is None


def test_a_user_has_places_of_their_own_and_looks_into_the_sites_store() -> None:
    paths = default_paths(123456, {"HOME": "/home/ada"})
    assert paths.run == Path("/var/tmp/belljar-123456/run")
    assert paths.scratch == Path("/var/tmp/belljar-123456/scratch")
    assert paths.store == Path("/home/ada/.local/share/belljar")
    assert paths.logs == Path("/home/ada/.local/share/belljar/logs")
    assert paths.site_store == Path("/var/lib/belljar")


def test_the_sessions_runtime_folder_is_used_when_it_is_the_users_own(tmp_path: Path) -> None:
    if ME == 0:
        os.chown(tmp_path, 4321, 4321)
    owner = os.stat(tmp_path).st_uid
    assert default_paths(owner, {"HOME": "/h", "XDG_RUNTIME_DIR": str(tmp_path)}).run == tmp_path / "belljar"


def test_the_runtime_folder_of_the_user_before_su_is_not_used(tmp_path: Path) -> None:
    paths = default_paths(123456, {"HOME": "/h", "XDG_RUNTIME_DIR": str(tmp_path)})
    assert paths.run == Path("/var/tmp/belljar-123456/run")


def test_relative_xdg_folders_are_ignored_as_their_specification_says() -> None:
    paths = default_paths(123456, {"HOME": "/h", "XDG_DATA_HOME": "data", "XDG_RUNTIME_DIR": "run"})
    assert paths.store == Path("/h/.local/share/belljar")


def test_a_job_without_home_finds_it_in_the_user_database_or_does_without() -> None:
    assert default_paths(65534, {}).store.is_absolute()
    assert default_paths(4294967294, {}).store == Path("/var/tmp/belljar-4294967294/.local/share/belljar")


def test_on_a_batch_node_each_user_has_a_folder_below_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('[paths]\nnode = "/node"\nlogs = "/else/logs"\n')
    paths = inspect(file, environ={"HOME": "/home/ada"}, uid=123456, etc=tmp_path / "none").checked().paths
    assert (paths.run, paths.scratch, paths.store) == (
        Path("/node/123456/run"),
        Path("/node/123456/scratch"),
        Path("/node/123456/store"),
    )
    assert paths.logs == Path("/else/logs"), "what somebody gave stands"
    assert paths.site_store == Path("/var/lib/belljar")


def test_roots_folders_are_not_the_nodes(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text('[paths]\nnode = "/node"\n')
    assert inspect(file, environ={}, uid=0, etc=tmp_path / "none").checked().paths.run == Path("/run/belljar")
