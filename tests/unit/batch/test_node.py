"""A node is closed after so many faults in a row, and by nothing else; opened by passes in a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from belljar.assembly import Runtime
from belljar.batch import load, node
from belljar.batch.node import Memory, Node, Report
from belljar.errors import UnsafeFolder
from belljar.jobs.node import Known

IDS = iter(f"{number:012x}" for number in range(10_000))


def report(klass: str = "node", error: str = "NoSpace", *, job: str = "", started: float = 100.0) -> Report:
    id = next(IDS)
    return Report(id, job or f"slurm:{id}", klass, error, "no space", started)


def after(*reports: Report, limit: int = 3) -> tuple[Node, list[bool]]:
    now, closings = Node(), []
    for one in reports:
        now, is_to_be_closed = node.count(now, one, limit)
        closings.append(is_to_be_closed)
    return now, closings


def test_the_third_fault_in_a_row_closes_it_and_not_the_second() -> None:
    assert after(report(), report(), report())[1] == [False, False, True]


@pytest.mark.parametrize("klass", ["payload", "walltime"])
def test_a_machine_that_ran_begins_the_count_anew(klass: str) -> None:
    now, closings = after(report(), report(), report(klass, ""), report(), report())
    assert closings == [False] * 5
    assert now.faults == 2


@pytest.mark.parametrize("klass", ["user", "cancelled", "transient"])
def test_what_says_nothing_about_the_node_neither_counts_nor_resets(klass: str) -> None:
    assert after(report(), report(klass), report(), report(klass), report())[1] == [False, False, False, False, True]


@pytest.mark.parametrize("error", ["", "DomainKilled"])
def test_a_machine_that_was_killed_with_its_job_is_no_fault_of_the_node(error: str) -> None:
    now, closings = after(*(report(error=error) for _ in range(9)))
    assert (now.faults, any(closings)) == (0, False)


def test_a_machine_is_counted_once_however_often_its_record_is_seen() -> None:
    same = report()
    now, closings = after(same, same, same, same)
    assert (now.faults, any(closings)) == (1, False)


def test_a_closed_node_is_not_closed_again_and_zero_means_never() -> None:
    now, _ = after(report(), report(), report())
    assert not node.count(replace(now, closed=200.0), report(), 3)[1]
    assert not any(after(*(report() for _ in range(9)), limit=0)[1])


def test_one_job_alone_closes_no_node_unless_the_site_wants_it_at_the_first_fault() -> None:
    assert not any(after(*(report(job="slurm:7") for _ in range(9)))[1])
    assert after(*(report(job="slurm:7") for _ in range(3)), report(job="slurm:8"))[1][-1]
    assert after(report(job="slurm:7"), limit=1)[1] == [True]


def test_a_node_that_somebody_opened_by_hand_is_counted_anew_and_closed_again() -> None:
    now, _ = after(report(), report(), report())
    now = replace(now, closed=200.0)
    now, again = node.count(now, report(started=150.0), 3)  # it was running when the node was closed
    assert (again, now.closed) == (False, 200.0)
    closings = []
    for _ in range(3):
        now, again = node.count(now, report(started=300.0), 3)
        closings.append(again)
    assert closings == [False, False, True]


def test_it_is_opened_after_enough_passes_in_a_row() -> None:
    now, opens = node.checked(Node(closed=1.0), True, "", 2)
    assert not opens
    now, opens = node.checked(now, False, "no machine\nhere", 2)
    assert (opens, now.passes, now.reason) == (False, 0, "no machine?here")
    now, opens = node.checked(now, True, "", 2)
    assert not opens
    assert node.checked(now, True, "", 2)[1]


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"machine": "../../../x", "class": "node"},
        {"machine": "0123456789ab", "class": "everything"},
        {"machine": 7, "class": "node"},
        {"machine": "0123456789AB", "class": "node"},
        {"machine": "0123456789ab\n", "class": "node"},
        {"machine": "0123456789ab", "class": ["node"]},
        {"machine": "0123456789ab", "class": "nodes", "started": "x"},
    ],
)
def test_a_report_that_makes_no_sense_is_none(raw: dict[str, object]) -> None:
    assert node.report_of(raw, "slurm:1") is None


def test_a_report_of_a_hostile_user_is_a_few_plain_words() -> None:
    raw = {"machine": "0123456789ab", "class": "node", "error": "$(id)", "reason": "a\n\x1b[31m`id`\u202e" + "x" * 9999}
    found = node.report_of(raw, "slurm:1")
    assert found is not None
    assert found.error == "" and node.count(Node(), found, 1)[0].faults == 0
    assert found.reason.startswith("a??[31m`id`?x") and len(found.reason) == 200


@pytest.mark.parametrize("started", [10**400, 1e308, float("nan"), float("inf"), -1, "1"])
def test_a_start_at_no_moment_is_told_as_none(started: object) -> None:
    found = node.report_of({"machine": "0123456789ab", "class": "node", "started": started}, "slurm:1")
    assert found is not None and found.started == 0.0


def test_the_nodes_name_is_the_systems_own_and_never_an_option() -> None:
    assert node.name_of("SLURMD_NODENAME", {"SLURMD_NODENAME": "n1"}, "host") == "n1"
    assert node.name_of("SLURMD_NODENAME", {"SLURMD_NODENAME": "-x"}, "host") == "host"
    assert node.name_of("SLURMD_NODENAME", {"SLURMD_NODENAME": "../n"}, "host") == "host"
    assert node.name_of("", {"SLURMD_NODENAME": "n1"}, "host") == "host"


def test_what_is_remembered_is_there_again_and_nonsense_is_as_nothing(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "batch", "slurm", "n1")
    assert memory.read() == Node()
    now, _ = after(report(), report())
    with memory.locked():
        memory.write(now)
    assert memory.read() == now
    for nonsense in ("", "[]", '{"faults": "x"}', "{" * 9999):
        (tmp_path / "batch/slurm-n1.json").write_text(nonsense)
        assert memory.read() == Node()


def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "batch").mkdir()
    (tmp_path / "batch").chmod(0o777)
    with pytest.raises(UnsafeFolder):
        Memory(tmp_path / "batch", "slurm", "n1")


def test_self_checks_that_fail_in_a_row_close_a_node_on_which_no_job_can_leave_a_record() -> None:
    now, closings = Node(), []
    for passed in (False, False, True, False, False, False):
        now, _ = node.checked(now, passed, "no space", 2)
        closings.append(node.is_hopeless(now, 3))
    assert closings == [False, False, False, False, False, True]
    assert not node.is_hopeless(replace(now, closed=1.0), 3) and not node.is_hopeless(now, 0)


@pytest.mark.parametrize(
    "name",
    ["", "-a", "a b", "a;b", "$(id)", "a\nb", "x" * 300, "n[1-9]", "n1,n2", "ALL", "all", "n1 State=DOWN"],
)
def test_no_pattern_of_nodes_is_ever_closed(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no name of a node"):
        Known(Runtime(), load("slurm").dialect, name)
