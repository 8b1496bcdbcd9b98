"""A batch system's commands are those an administrator's shell found at `batch install`, wherever a site has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belljar import batch
from belljar.batch.install import commands as client
from belljar.batch.install.commands import Client, Needs, find
from belljar.cli import main
from belljar.errors import BadOption, CommandMissing

NEEDS = Needs(("pbsnodes", "qalter", "qmgr"), ("PBS_DEFAULT", "PBS_EXEC"))


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Path]:
    """A program that says which one it is, with what it was called and what it was told."""

    def make(where: str) -> Path:
        path = tmp_path / where
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('#!/bin/sh\necho "$0 $*"\nenv\n')
        path.chmod(0o755)
        return path

    return make


def test_all_commands_are_those_beside_the_first(tmp_path: Path, program: Callable[..., Path]) -> None:
    """Grid Engine's qalter, first in PATH, is not Torque's."""
    program("usr/qalter")
    for name in ("bin/pbsnodes", "bin/qalter", "sbin/qmgr"):
        program(f"torque/{name}")
    found = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/usr:{tmp_path}/torque/bin"})
    assert {name: Path(path).relative_to(tmp_path).as_posix() for name, path in found.programs.items()} == {
        "pbsnodes": "torque/bin/pbsnodes", "qalter": "torque/bin/qalter", "qmgr": "torque/sbin/qmgr",
    }  # fmt: skip


def test_a_command_that_was_not_found_is_never_another_systems(tmp_path: Path, program: Callable[..., Path]) -> None:
    program("usr/qalter"), program("torque/pbsnodes")
    found = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/usr:{tmp_path}/torque"})
    with pytest.raises(CommandMissing, match="not among the commands of torque") as caught:
        found.run(("qalter", "7"), 5)
    assert "--commands" in caught.value.hint
    with pytest.raises(CommandMissing):
        found.run(("qselect",), 5)  # of no system of ours that has it in PATH


def test_a_link_to_the_first_leads_to_the_others(tmp_path: Path, program: Callable[..., Path]) -> None:
    real = program("opt/bin/pbsnodes")
    program("opt/bin/qalter")
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr/pbsnodes").symlink_to(real)
    found = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/usr"})
    assert found.programs["qalter"] == str(tmp_path / "opt/bin/qalter")


def test_a_command_gets_the_sites_variables_and_nothing_of_the_callers(
    tmp_path: Path, program: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program("bin/pbsnodes")
    found = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/bin", "PBS_DEFAULT": "head", "LD_PRELOAD": "/x"})
    monkeypatch.setenv("PBS_DEFAULT", "another")
    monkeypatch.setenv("PBS_EXEC", "/tmp")
    monkeypatch.setenv("LD_PRELOAD", "/tmp/x.so")
    monkeypatch.setenv("PATH", "/tmp")
    said = found.run(("pbsnodes", "-a"), 5).decode().splitlines()
    assert said[0] == f"{tmp_path}/bin/pbsnodes -a"
    assert "PBS_DEFAULT=head" in said and not any(line.startswith(("LD_", "PBS_EXEC")) for line in said)
    assert next(line for line in said if line.startswith("PATH=")).startswith(f"PATH={tmp_path}/bin:/usr/local/sbin:")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    one = Client("lsf", {"bjobs": "/lsf/bin/bjobs"}, {"LSF_ENVDIR": "/lsf/conf"}, "/lsf/bin", {"X": "é"})
    path = client.path_of(tmp_path / "wrap-lsf")
    assert client.read(path, "lsf") is None
    path.write_bytes(one.as_json())
    assert client.read(path, "lsf") == one
    path.write_text('{"programs": []}')
    with pytest.raises(BadOption, match="not a list of commands"):
        client.read(path, "lsf")


def test_what_was_found_before_holds_where_nothing_else_is_said(tmp_path: Path, program: Callable[..., Path]) -> None:
    program("old/pbsnodes"), program("new/pbsnodes")
    first = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/old", "PBS_DEFAULT": "head"}, named={"LD": "1"})
    again = find("torque", NEEDS, None, {"PATH": "/nonexistent"}, known=first)
    assert again == first and again.variables == {"LD": "1", "PBS_DEFAULT": "head"}
    moved = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/new", "PBS_DEFAULT": "two"}, known=again)
    assert moved.programs["pbsnodes"] == f"{tmp_path}/new/pbsnodes" and moved.variables["PBS_DEFAULT"] == "two"
    named = find("torque", NEEDS, None, {"PATH": f"{tmp_path}/new"}, folders=f"{tmp_path}/old", known=moved)
    assert find("torque", NEEDS, None, {"PATH": f"{tmp_path}/new"}, known=named) == named


@pytest.mark.skipif(os.geteuid() != 0, reason="files of other users")
def test_root_runs_nothing_that_a_user_can_change_unless_it_is_named(
    tmp_path: Path, program: Callable[..., Path]
) -> None:
    path = program("bin/pbsnodes")
    os.chown(path, 4711, 4711)
    environ = {"PATH": f"{tmp_path}/bin"}
    with pytest.raises(BadOption, match="can be changed by others") as caught:
        find("torque", NEEDS, None, environ)
    assert "--commands" in caught.value.hint
    assert find("torque", NEEDS, None, environ, folders=f"{tmp_path}/bin").programs == {"pbsnodes": str(path)}
    os.chown(path, 0, 0)
    environ["PBS_EXEC"] = str(tmp_path / "exec")
    with pytest.raises(BadOption, match="PBS_EXEC=") as caught:
        find("torque", NEEDS, None, environ)
    assert "--variable PBS_EXEC" in caught.value.hint
    assert find("torque", NEEDS, None, environ, named={"PBS_EXEC": "/x"}).variables == {"PBS_EXEC": "/x"}
    (tmp_path / "bin").chmod(0o777)
    with pytest.raises(BadOption):
        find("torque", NEEDS, None, {"PATH": f"{tmp_path}/bin"})


@pytest.mark.parametrize("value", ["", "a\nb", "x" * 5000])
def test_a_variable_of_several_lines_is_refused(value: str) -> None:
    with pytest.raises(BadOption, match="not a variable of one line"):
        find("torque", NEEDS, None, {"PATH": ""}, named={"PBS_DEFAULT": value})


# -- each system's table -----------------------------------------------------------------------------------------------


def test_slurm_is_found_by_its_conf_and_its_commands_are_told_where_that_is(tmp_path: Path) -> None:
    needs = batch.load("slurm").site.needs
    assert needs.home({"SLURM_CONF": "/opt/slurm/etc/slurm.conf"}) == Path("/opt/slurm/etc")
    assert needs.home({}) is None
    (tmp_path / "slurm.conf").touch()
    assert find("slurm", needs, tmp_path, {"PATH": ""}).variables == {"SLURM_CONF": f"{tmp_path}/slurm.conf"}
    assert find("slurm", needs, Path("/etc/slurm"), {"PATH": ""}).variables == {}


def test_a_cell_of_grid_engine_is_known_by_its_folder() -> None:
    needs = batch.load("gridengine").site.needs
    assert needs.home({"SGE_ROOT": "/sge", "SGE_CELL": "c"}) == Path("/sge/c/common")
    found = find("gridengine", needs, Path("/sge/c/common"), {"PATH": "", "SGE_QMASTER_PORT": "6444", "SGE_CELL": "x"})
    assert found.variables == {"SGE_ROOT": "/sge", "SGE_CELL": "c", "SGE_QMASTER_PORT": "6444"}


@pytest.mark.parametrize("system", batch.names())
def test_every_command_of_a_dialect_is_in_its_table(system: str) -> None:
    dialect, needs = batch.load(system).dialect, batch.load(system).site.needs
    node = [
        dialect.alive(),
        dialect.why_closed("n1"),
        *dialect.close_node("n1", "belljar: x"),
        *dialect.open_node("n1"),
    ]
    known = {*needs.programs, *client.OF_THE_HOST}
    assert {argv[0] for argv in node if argv} <= known


# -- in one piece ------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Path]:
    """A folder that every user may enter."""
    top = Path(f"/var/tmp/belljar-client-{os.getpid()}")
    top.mkdir(mode=0o755)
    yield top
    import shutil

    shutil.rmtree(top)


SCONTROL = """#!/bin/sh
echo "$SLURM_CONF $0 $*" >>{log}
case $* in *config*) echo "Prolog = x" ;; *) echo slurm 24.11 ;; esac
"""
SQUEUE = """#!/bin/sh
test "$SLURM_CONF" = {etc}/slurm.conf || { echo "squeue: no slurm.conf" >&2; exit 1; }
echo "JOBID|ARRAY_JOB_ID|ARRAY_TASK_ID|STATE"; echo "7|7|N/A|RUNNING"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="installs for everybody")
def test_slurm_in_an_odd_place_is_called_there_by_hooks_and_users(
    opened: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess

    etc, bins, log = opened / "etc", opened / "bin", opened / "log"
    etc.mkdir(), bins.mkdir(), log.touch()
    log.chmod(0o666)
    (etc / "slurm.conf").touch()
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE)):
        (bins / name).write_text(text.replace("{log}", str(log)).replace("{etc}", str(etc)))
        (bins / name).chmod(0o755)
    monkeypatch.setenv("SLURM_CONF", str(etc / "slurm.conf"))
    monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")
    assert main(["batch", "install", "slurm", "--prefix", str(opened / "opt")]) == 0
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    launcher = str(opened / "opt/libexec/slurm/belljar-slurm")
    asked = subprocess.run([launcher, "internal", "ask", "slurm"], env={"SLURM_CONF": "/tmp/x"}, capture_output=True)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, b"it knows of 1 running jobs\n", b"")
    log.write_text("")
    subprocess.run(
        [launcher, "batch", "node", "slurm", "status"], env={"PATH": "/tmp"}, check=True, capture_output=True
    )
    assert log.read_text() == f"{etc}/slurm.conf {bins}/scontrol show node {os.uname().nodename}\n"
    capsys.readouterr()
    main(["batch", "check", "slurm", "--prefix", str(opened / "opt")])
    said = capsys.readouterr().out
    assert f"ok    commands of slurm: {bins}\n" in said, said
    assert "ok    a job's user can ask slurm: as " in said
    (bins / "squeue").unlink()
    main(["batch", "check", "slurm", "--prefix", str(opened / "opt")])
    said = capsys.readouterr().out
    assert "fail  commands of slurm: not found: squeue\n" in said
    assert "fail  a job's user can ask slurm: as " in said and "--commands DIR" in said
