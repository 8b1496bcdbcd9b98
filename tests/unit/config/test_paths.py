"""Where belljar keeps its files, for whom."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belljar.config import Paths, default_paths, inspect
from belljar.host.files import private_folder
from belljar.host.privileges import User, as_user

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
    environ, etc = {"HOME": "/home/ada"}, tmp_path / "none"
    paths = inspect(file, environ=environ, uid=123456, etc=etc, in_job=True).checked().paths
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


# -- strangers who were there first ---------------------------------------------------------------------------------------

ADA, STRANGER = 4_100_000 + os.getpid(), 65534
as_root = pytest.mark.skipif(ME != 0, reason="only root can become somebody else")


@pytest.fixture
def place() -> Iterator[Path]:
    """Ada's home, and a node's folder in which everybody may make folders; her folder below /var/tmp is put away."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        top = Path(name)
        top.chmod(0o755)
        (top / "home").mkdir(0o700)
        os.chown(top / "home", ADA, ADA)
        (top / "node").mkdir()
        (top / "node").chmod(0o1777)
        (top / "site.toml").write_text(f'[paths]\nnode = "{top / "node"}"\n')
        yield top
    for folder in Path("/var/tmp").glob(f"belljar-{ADA}*"):
        shutil.rmtree(folder)


def as_ada(look: Callable[[], Paths]) -> Paths:
    """The places that she gets, each made; seen by a process of hers."""

    def work() -> bytes:
        paths = look()
        for path in (paths.run, paths.scratch):
            private_folder(path)
        return os.fsencode(f"{paths.run}\n{paths.scratch}")

    run, scratch = as_user(User(ADA, ADA, "ada", "/"), work, timeout=30, what="look").decode().split("\n")
    return Paths(Path(run), Path("/"), None, Path(scratch), Path("/"))


def made_by_a_stranger(path: Path) -> None:
    path.mkdir(0o700)
    os.chown(path, STRANGER, STRANGER)


@as_root
def test_a_stranger_who_makes_a_users_folder_first_stops_nobody(place: Path) -> None:
    taken = Path(f"/var/tmp/belljar-{ADA}")
    made_by_a_stranger(taken)

    def look() -> Paths:
        return default_paths(ADA, {"HOME": str(place / "home")})

    first = as_ada(look)
    assert first.run.parent == first.scratch.parent != taken and os.stat(first.run.parent).st_uid == ADA
    shutil.rmtree(taken)
    assert as_ada(look) == first, "what lives there is found again"


@as_root
@pytest.mark.parametrize("in_job", [True, False])
def test_a_stranger_who_makes_a_users_folder_on_the_node_first_stops_nobody(place: Path, in_job: bool) -> None:
    taken = place / f"node/{ADA}"
    made_by_a_stranger(taken)

    def look() -> Paths:
        environ = {"HOME": str(place / "home")}
        return inspect(place / "site.toml", environ=environ, etc=place / "none", in_job=in_job).checked().paths

    first = as_ada(look)
    assert first.run.parent.parent == place / "node" and first.run.parent != taken
    assert as_ada(look) == first


@as_root
def test_outside_of_jobs_a_users_own_folders_serve_where_the_node_has_none_for_them(place: Path) -> None:
    (place / "node").chmod(0o711)

    def look() -> Paths:
        environ = {"HOME": str(place / "home")}
        return inspect(place / "site.toml", environ=environ, etc=place / "none").checked().paths

    assert as_ada(look).scratch == Path(f"/var/tmp/belljar-{ADA}/scratch")
    (place / f"node/{ADA}").mkdir(0o700)  # by the prolog of the first job
    os.chown(place / f"node/{ADA}", ADA, ADA)
    assert as_ada(look).run == place / f"node/{ADA}/run", "the machines of jobs are found"
