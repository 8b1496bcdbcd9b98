"""What root's hooks do around a job, with users who lie, hang and link: they exit 0, and touch only what is that user's."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.jobs.paper_node import ALICE, BOB, Node, make_node, paper_system, request_for

from belljar import batch
from belljar.cli import main
from belljar.errors import BelljarError, HostError
from belljar.findings import Grade
from belljar.host.files import remove_tree
from belljar.host.privileges import as_user
from belljar.jobs import node as node_of_jobs
from belljar.jobs.batch import hooks as batch_hooks
from belljar.jobs.site import doctor
from belljar.jobs.starting import check_folder
from belljar.machine.life.claim import claim
from belljar.machine.states import class_of_error

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="hooks run as root")
FAULT = {"class": "node", "cause": "node-fault", "error": "NoSpace", "reason": "no space left"}
GOOD = {"class": "payload", "cause": "finished", "exit_code": 0}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = make_node()
    for name in [one for one in os.environ if one.startswith("BELLJAR_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(batch, "load", lambda name: paper_system(made))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    yield made
    made.close()


def call(node: Node, act: str, *words: str) -> int:
    return main(["--config", str(node.config), "-v", "internal", act, "slurm", *words])


def state(node: Node) -> dict[str, Any]:
    (path,) = (node.node / "batch").glob("slurm-*.json")
    return dict(json.loads(path.read_text()))


# -- prolog --------------------------------------------------------------------------------------------------------------


def test_the_prolog_makes_the_users_folder_and_twice_is_as_once(node: Node) -> None:
    for _ in range(2):
        assert call(node, "prolog", "7", "nobody") == 0
        facts = os.stat(node.node / "65534")
        assert (stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_gid) == (0o700, 65534, 65534)


def test_a_link_in_the_folders_place_is_not_followed(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    precious = node.folder / "precious"
    precious.mkdir(mode=0o755)
    (node.node / "65534").symlink_to(precious)
    assert call(node, "prolog", "7", "nobody") == 0
    assert os.stat(precious).st_uid == 0 and stat.S_IMODE(os.stat(precious).st_mode) == 0o755
    assert "65534" in capsys.readouterr().err


def test_a_strangers_folder_in_its_place_is_left_alone(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    (node.node / "65534").mkdir()
    os.chown(node.node / "65534", 2, 2)
    assert call(node, "prolog", "7", "nobody") == 0
    assert os.stat(node.node / "65534").st_uid == 2
    assert "belongs to uid 2" in capsys.readouterr().err


def test_root_gets_no_folder_there(node: Node) -> None:
    assert call(node, "prolog", "7", "root") == 0
    assert list(node.node.iterdir()) == []


# -- a folder of the node's that keeps users out ---------------------------------------------------------------------------


def ready(node: Node) -> bytes:
    """What a job's start finds, as its user: "ready", or whose fault it is."""
    theirs = node.runtime.of_user(ALICE.uid, ALICE.home)

    def start() -> bytes:
        try:
            check_folder(theirs)
            claim(request_for("0123456789ab", "slurm:7"), theirs.folders, lambda point: None).release()
        except (BelljarError, OSError) as exc:
            return class_of_error(exc if isinstance(exc, BelljarError) else HostError(str(exc))).value.encode()
        remove_tree(theirs.folders.machine("0123456789ab"))
        return b"ready"

    return as_user(ALICE, start, timeout=10, what="start")


@pytest.mark.parametrize("has_folder", [True, False])
def test_whatever_the_mode_of_the_nodes_folder_it_is_never_the_jobs_fault(node: Node, has_folder: bool) -> None:
    if has_folder:
        node.prolog(ALICE)
    seen = {}
    for mode in (owners | others for owners in (0o000, 0o500, 0o700, 0o750, 0o770) for others in range(0o10)):
        node.node.chmod(mode)
        seen[mode] = ready(node)
        if not has_folder and seen[mode] == b"ready":
            remove_tree(node.node / "65534")
    assert set(seen.values()) <= {b"ready", b"node"}
    good = {mode for mode, found in seen.items() if found == b"ready"}
    assert good == ({mode for mode in seen if mode & 0o001 and not mode & 0o002} if has_folder else set())
    node.node.chmod(0o1777)
    assert ready(node) == b"ready"


def test_a_nodes_folder_that_is_not_there_is_not_the_jobs_fault(node: Node) -> None:
    node.node.rmdir()
    assert ready(node) == b"node"


@pytest.mark.parametrize("mode", [0o700, 0o710, 0o777])
def test_jobs_that_cannot_enter_the_nodes_folder_close_the_node(node: Node, mode: int) -> None:
    node.configure("node_faults = 3")
    for job in ("7", "8"):
        call(node, "prolog", job, "nobody")
        node.node.chmod(mode)
        assert call(node, "epilog", job, "nobody") == 0
        assert node.dialect.closed is not None and not node.dialect.closed.exists()
    assert call(node, "epilog", "9", "nobody") == 0
    assert str(node.node) in node.dialect.closed.read_text()


@pytest.mark.parametrize("mode", [None, 0o700, 0o710, 0o777])
def test_check_and_doctor_say_that_users_cannot_enter_it(node: Node, mode: int | None) -> None:
    assert doctor.node(node.runtime).grade is Grade.OK
    if mode is None:
        node.node.rmdir()
    else:
        node.node.chmod(mode)
    finding = doctor.node(node.runtime)
    assert finding.grade is Grade.FAIL and str(node.node) in finding.text


# -- always 0 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["prolog", "epilog"])
@pytest.mark.parametrize("words", [(), ("7", "no-such-user-here"), ("7", ""), ("--what", "-1"), ("$(id)", "nobody;id")])
def test_a_hook_never_fails_whatever_it_is_told(node: Node, act: str, words: tuple[str, ...]) -> None:
    assert call(node, act, *words) == 0


@pytest.mark.parametrize("act", ["prolog", "epilog"])
def test_a_hook_does_not_fail_for_broken_settings_an_unknown_system_or_a_defect(
    node: Node, act: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", "/nonexistent", "internal", act, "slurm", "7", "nobody"]) == 0
    node.config.write_text("nonsense")
    assert call(node, act, "7", "nobody") == 0
    assert "not TOML" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["internal", act, "nosystem"]) == 0

    def broken(name: str) -> object:
        raise RuntimeError("a defect")

    monkeypatch.setattr(batch, "load", broken)
    assert main(["internal", act, "slurm"]) == 0


def test_a_hook_says_nothing_on_the_jobs_stderr_unless_asked(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(node.config), "internal", "epilog", "slurm"]) == 0
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_what_a_job_put_into_the_hooks_environment_is_not_obeyed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "BELLJAR_PATHS_NODE", str(node.folder / "theirs"))
    monkeypatch.setitem(os.environ, "PATH", str(node.folder))
    monkeypatch.setitem(os.environ, "HOME", str(node.folder))
    assert call(node, "prolog", "7", "nobody") == 0
    assert (node.node / "65534").is_dir() and not (node.folder / "theirs").exists()


# -- epilog: what still lives ----------------------------------------------------------------------------------------------


def test_what_a_dead_wrapper_left_is_finished_as_its_user(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7", None, abandoned=True)
    assert call(node, "epilog", "7", "nobody") == 0
    folders = node.runtime.of_user(ALICE.uid, ALICE.home).folders
    assert list(folders.machines.iterdir()) == []
    assert os.stat(folders.ended("0123456789ab") / "outcome.json").st_uid == ALICE.uid
    assert "machine 0123456789ab ended" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "klass"), [(("--killed",), "cancelled"), ((), "node")])
def test_a_machine_that_was_killed_with_its_job_was_cancelled(node: Node, words: tuple[str, ...], klass: str) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7", None, abandoned=True)
    assert call(node, "epilog", "7", "nobody", *words) == 0
    logs = node.runtime.of_user(ALICE.uid, ALICE.home).folders.logs
    outcome = json.loads((logs / "0123456789ab/outcome.json").read_text())
    (row,) = (json.loads(line) for path in logs.glob("ledger-*") for line in path.read_text().splitlines())
    assert outcome["class"] == row["class"] == klass and outcome["cause"] == row["cause"]
    assert outcome["reason"].startswith("its job was killed while" if words else "belljar was killed while")


def test_a_supervisor_that_outlived_its_job_is_ended_and_those_of_other_jobs_are_not(node: Node) -> None:
    ours, other = node.living(ALICE, "0123456789ab", "slurm:7"), node.living(ALICE, "0123456789ac", "slurm:70")
    strangers = node.living(BOB, "0123456789ad", "slurm:7")
    assert call(node, "epilog", "7", "nobody") == 0
    assert ours.wait(timeout=5) == -9
    assert other.poll() is None and strangers.poll() is None
    folders = node.runtime.of_user(ALICE.uid, ALICE.home).folders
    assert [one.name for one in folders.machines.iterdir()] == ["0123456789ac"]


def test_a_task_of_an_array_is_found_by_the_id_its_hook_knows(node: Node) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:10_3", FAULT, alias="13")
    assert call(node, "epilog", "13", "nobody") == 0
    assert state(node)["faults"] == 1


def test_a_user_whose_records_hang_costs_the_deadline_and_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.ended(ALICE, "0123456789ab", "slurm:7", GOOD)
    journal = node.node / "65534/logs/0123456789ab/journal.jsonl"
    journal.unlink()
    os.mkfifo(journal, 0o666)
    os.chown(journal, 65534, 65534)
    monkeypatch.setattr(batch_hooks, "USER_TIMEOUT", 0.5)
    begin = time.monotonic()
    assert call(node, "epilog", "7", "nobody") == 0
    assert time.monotonic() - begin < 5


def test_records_that_are_links_to_roots_files_tell_nothing_of_them(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = node.folder / "secret"
    secret.write_text(json.dumps({"class": "node", "error": "NoSpace", "reason": "the secret"}))
    secret.chmod(0o600)
    node.ended(ALICE, "0123456789ab", "slurm:7", None)
    (node.node / "65534/logs/0123456789ab/outcome.json").symlink_to(secret)
    assert call(node, "epilog", "7", "nobody") == 0
    assert not list((node.node / "batch").glob("*.json")) if (node.node / "batch").exists() else True
    assert "the secret" not in capsys.readouterr().err


# -- epilog: counting ------------------------------------------------------------------------------------------------------


def test_faults_in_a_row_close_the_node_once_with_the_reason(node: Node) -> None:
    assert node.dialect.closed is not None
    for number in range(3):
        assert not node.dialect.closed.exists()
        node.ended(ALICE, f"{number:012x}", f"slurm:{number + 1}", FAULT)
        for _ in range(3):  # a hook that is called again counts nothing twice
            assert call(node, "epilog", str(number + 1), "nobody") == 0
    assert node.dialect.closed.read_text() == f"{os.uname().nodename}: belljar: 3 node faults in a row: no space left"
    assert state(node)["closed"] > 0
    node.dialect.closed.unlink()  # an administrator opens it by hand
    for number, is_closed in ((7, False), (8, False), (9, True)):
        node.ended(ALICE, f"{number:012x}", f"slurm:{number}", FAULT)
        call(node, "epilog", str(number), "nobody")
        assert node.dialect.closed.exists() is is_closed, "it is counted from nothing"


def test_a_good_machine_between_faults_begins_the_count_anew(node: Node) -> None:
    for number, outcome in enumerate((FAULT, FAULT, GOOD, FAULT, FAULT)):
        node.ended(ALICE, f"{number:012x}", f"slurm:{number}", outcome)
        call(node, "epilog", str(number), "nobody")
    assert state(node)["faults"] == 2
    assert node.dialect.closed is not None and not node.dialect.closed.exists()


def test_a_job_without_a_machine_counts_nothing(node: Node) -> None:
    node.prolog(ALICE)
    assert call(node, "epilog", "7", "nobody") == 0
    assert call(node, "epilog", "8", "bin") == 0
    assert not (node.node / "batch").exists()


def test_a_system_that_cannot_be_told_leaves_the_node_to_be_closed_by_the_next_fault(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.configure("node_faults = 1")
    close = type(node.dialect).close_node
    monkeypatch.setattr(type(node.dialect), "close_node", lambda *_: (("false",),))
    node.ended(ALICE, f"{1:012x}", "slurm:1", FAULT)
    assert call(node, "epilog", "1", "nobody") == 0
    assert state(node)["closed"] == 0
    monkeypatch.setattr(type(node.dialect), "close_node", close)
    node.ended(ALICE, f"{2:012x}", "slurm:2", FAULT)
    call(node, "epilog", "2", "nobody")
    assert state(node)["closed"] > 0


# -- node ------------------------------------------------------------------------------------------------------------------


def node_verb(node: Node, *words: str) -> int:
    return main(["--config", str(node.config), "batch", "node", "slurm", *words])


def test_an_administrator_closes_and_opens_it(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert node_verb(node, "close", "broken\ndisk $(id)") == 0
    assert node.dialect.closed is not None
    assert node.dialect.closed.read_text().endswith("belljar: broken?disk $(id)")
    assert node_verb(node, "status", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["closed_by_belljar"] is True
    assert node_verb(node, "open") == 0
    assert not node.dialect.closed.exists()
    assert node_verb(node, "close") == 125
    assert node_verb(node, "status", "--node", "-x") == 125
    capsys.readouterr()
    assert node_verb(node, "close", "broken", "--node", "all") == 125  # a word for all of them
    assert "'all' is no name of a node" in (said := capsys.readouterr().err) and "defect" not in said
    assert not node.dialect.closed.exists()


def test_the_self_check_opens_what_we_closed_after_enough_passes_and_nothing_else(
    node: Node, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from belljar.errors import CommandFailed

    def fails(runtime: object, image: str) -> None:
        raise CommandFailed("no machine")

    assert node.dialect.closed is not None
    node_verb(node, "close", "test")
    monkeypatch.setattr(node_of_jobs, "as_a_job", lambda runtime, image: None)
    assert node_verb(node, "test") == 0
    assert node.dialect.closed.exists()
    monkeypatch.setattr(node_of_jobs, "as_a_job", fails)
    assert node_verb(node, "test") == 1
    monkeypatch.setattr(node_of_jobs, "as_a_job", lambda runtime, image: None)
    assert [node_verb(node, "test"), node.dialect.closed.exists()] == [0, True], (
        "the failure between began the count anew"
    )
    assert [node_verb(node, "test"), node.dialect.closed.exists()] == [0, False]
    assert "opened again" in capsys.readouterr().out
    node.dialect.closed.write_text("closed by an administrator")
    for _ in range(4):
        assert node_verb(node, "test") == 0
    assert node.dialect.closed.exists()


def test_where_users_may_write_to_the_nodes_folder_root_remembers_elsewhere(node: Node) -> None:
    runtime = node.runtime
    assert node_of_jobs.memory_folder(runtime) == node.node / "batch"
    node.node.chmod(0o1777)
    assert node_of_jobs.memory_folder(runtime) == runtime.settings.paths.store / "batch"


# -- hooks of one system alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "name"), [(name, hook) for name in batch.names() for hook in batch.load(name).hooks]
)
def test_a_systems_own_hooks_are_found(system: str, name: str) -> None:
    assert callable(batch.load(system).hook(name))
