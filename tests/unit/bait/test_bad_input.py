"""What users, images and slurmctld may do to a bait: each time one line where the administrator looks, and the job its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.bait.plain import nothing
from tests.unit.bait.test_daemon import FREE, HELD, RUNNING, SETTINGS, House, Machines, arrives

from belljar.bait.daemon import Daemon
from belljar.bait.decisions.advance import UNFIT
from belljar.bait.decisions.step import Entry, State
from belljar.bait.journal import read, read_status
from belljar.bait.machines.keeper import last_line, why_ended
from belljar.errors import CommandFailed
from belljar.model import GIB, MIB
from belljar.pool import UNFIT_CODE, JobView, NodeState, load, node_of
from belljar.records import replace

RECORDINGS = Path(__file__).parents[2] / "recordings/slurm"
MARK = b"@0123456789abcdef@"


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        ({"memory": 64 * GIB}, "65728 MiB of memory: this host has 16384 MiB"),
        ({"cpus": 99}, "99 processors: this host gives 8 to machines"),
        ({"nodes": 40, "cpus": 40}, "40 processors: this host gives 8 to machines"),
        ({"memory": 0}, "it has no memory limit: a machine's size follows from it (--mem, or DefMemPerCPU)"),
        ({"image": "../../etc/passwd"}, "image ../../etc/passwd: not among the images that may become nodes here (worker)"),
        ({"network": "management"}, "network class management: there is open here"),
        ({"disk": 900 * GIB}, "921600 MiB of disk: 51200 MiB are free here"),
        ({"nodes": 3, "cpus": 3, "disk": 20 * GIB}, "61440 MiB of disk: 51200 MiB are free here"),
    ],
)  # fmt: skip
async def test_a_job_that_asks_for_what_the_host_never_has_is_held_and_told(
    house: House, asks: dict[str, Any], why: str
) -> None:
    await arrives(house)
    house.see(replace(HELD, **asks))
    await house.looks(4)
    assert house.side.asked[-1] == ("note", "7", why) and house.machines.alive == set()
    assert house.told[-1] == ("job", {"job": "7", "state": "rejected", "machines": "", "tries": None, "why": why})
    assert house.daemon.status.faults == 0


async def test_a_machine_has_no_feature_that_its_bait_has_not(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `-C "el9|gpu|bait_wn02"` its node would be one of the partition of `gpu`, or of another bait, which takes it for its own."""
    started: list[JobView] = []
    start = Machines.start

    async def noted(machines: Machines, job: JobView, id: str) -> None:
        started.append(job)
        await start(machines, job, id)

    monkeypatch.setattr(Machines, "start", noted)
    await arrives(house)
    house.see(replace(HELD, features=("el9", "gpu", "bait_wn02", "belljar")))
    house.side.seen["nodes"]["bait1"] = replace(FREE, features=("bait", "el9"))
    await house.looks()
    assert [job.features for job in started] == [("el9",)]
    assert house.daemon.journal.entries["7"].asked.endswith(", el9")


async def test_an_image_without_slurmd_is_found_at_its_first_machine(house: House) -> None:
    await arrives(house)
    await house.looks(3)
    (id,) = house.machines.alive
    why = why_ended({"exit_code": UNFIT_CODE, "reason": "exit 78"}, "worker", b"no slurmd is installed in it\n")
    assert why == f"{UNFIT}worker: no slurmd is installed in it"
    house.machines.alive.clear()
    house.machines.over[id] = why
    await house.looks(5)
    assert house.states == ["arrived", "stopped", "vm-requested", "vm-booting", "reprocess", "rejected"]
    assert house.side.asked[-1] == ("note", "7", why) and house.daemon.status.faults == 0


async def test_a_machine_that_never_joins_is_quoted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose munge key does not fit."""
    await arrives(house)
    await house.looks(3)
    monkeypatch.setattr(
        Machines, "last_words", lambda *_: "slurmd: error: Unable to register: Protocol authentication error"
    )
    house.daemon.settings = replace(SETTINGS, join=0.000001)
    await house.looks(1)
    why = "a machine did not join within 0 s; slurmd: error: Unable to register: Protocol authentication error"
    assert [facts["why"] for event, facts in house.told if facts.get("state") == "reprocess"] == [why]
    assert house.daemon.status.faults == 1


def test_what_a_guest_writes_is_one_short_plain_line() -> None:
    assert last_line(b"first\n\x1b[31mred\x07 \xff\r\n\n") == "[31mred \ufffd"
    assert len(last_line(b"x" * 100_000)) == 160 and last_line(b"") == last_line(b"\n\n") == ""
    assert why_ended({"exit_code": 1, "reason": ""}, "worker", b"slurmd: fatal: no\n") == "exit 1: slurmd: fatal: no"
    assert why_ended({"exit_code": None, "reason": "QEMU was killed"}, "worker", b"bye\n") == "QEMU was killed"
    assert why_ended({"exit_code": UNFIT_CODE}, "worker", b"") == f"{UNFIT}worker: it does not say why"


async def test_a_job_is_altered_while_its_machine_boots(house: House) -> None:
    await arrives(house)
    await house.looks(3)
    (id,) = house.machines.alive
    house.see(replace(HELD, memory=900 * MIB), **{node_of(id): NodeState.OUT})
    await house.looks(2)
    assert house.machines.alive == set()
    house.see(replace(HELD, memory=900 * MIB))
    await house.looks(5)
    entry = house.daemon.journal.entries["7"]
    assert entry.asked == "1 nodes, 1 cpus, 900 MiB" and len(house.machines.alive) == 1 and house.machines.alive != {id}
    assert house.daemon.status.faults == 0


@pytest.mark.parametrize(
    "state", [State.STOPPED, State.VM_BOOTING, State.MIGRATING, State.RUNNING, State.REPROCESS, State.LOST]
)
@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"squeue": b"slurm_load_jobs error: Unexpected message received\n"}, "where the list of jobs begins"),
        ({"squeue": b"           7" + MARK + b"7   |N/A\n"}, "is not 12 wide"),
        ({"scontrol": b"slurm_load_node error\n"}, "where the list of nodes begins"),
        ({"scontrol": b"NodeName=vm State=\n"}, "in the list of nodes"),
        ({"squeue": CommandFailed("squeue: no answer within 20 s")}, "no answer within 20 s"),
        ({"scontrol": CommandFailed("scontrol: Unable to contact slurm controller")}, "Unable to contact"),
    ],
)
async def test_an_answer_of_slurms_that_is_late_wrong_or_none_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: State, answers: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("os.urandom", lambda count: bytes.fromhex("0123456789abcdef"))
    good = {"squeue": (RECORDINGS / "squeue.txt").read_bytes(), "scontrol": (RECORDINGS / "nodes.txt").read_bytes()}
    asked: list[tuple[str, ...]] = []

    async def run(argv: tuple[str, ...]) -> bytes:
        asked.append(argv)
        answer = {**good, **answers}[argv[0]]
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    told: list[tuple[str, dict[str, Any]]] = []
    machines = Machines()
    machines.alive = {"0" * 12}
    daemon = Daemon(
        SETTINGS, tmp_path, load("slurm"), machines, lambda event, **facts: told.append((event, facts)), nothing, run_command=run,
    )  # fmt: skip
    before = Entry("1", state, 1.0, machines=("0" * 12,), home="batch")
    daemon.journal.write(before)
    await daemon.look()
    await daemon.look()
    assert read(tmp_path) == {"1": before} and machines.alive == {"0" * 12}
    assert {argv[:2] for argv in asked} == {("squeue", "--noheader"), ("scontrol", "--oneliner")}
    status = read_status(tmp_path)
    assert status is not None and says in status.error
    (complaint,) = [facts for event, facts in told if event == "failed"]
    assert complaint["about"] == "batch system" and says in complaint["why"]


async def test_a_slurmctld_that_restarts_empty_is_given_time(house: House) -> None:
    """Its state was not read yet: no jobs, no nodes. What is here waits `gone_after`."""
    await arrives(house)
    await house.looks(3)
    there = set(house.machines.alive)
    house.side.seen.update(jobs={}, nodes={})
    await house.looks(5)
    assert house.machines.alive == there and house.daemon.journal.entries["7"].state is State.VM_BOOTING
    house.see(HELD)
    await house.looks(1)
    assert house.daemon.journal.entries["7"].missing_since is None


async def test_a_command_that_slurm_refuses_is_told_once_and_tried_again(house: House) -> None:
    await arrives(house)
    await house.looks(3)
    (id,) = house.machines.alive
    house.see(HELD, **{node_of(id): NodeState.IDLE})
    await house.looks(2)
    house.side.refuses = "slurm_update error: Requested node configuration is not available"
    await house.looks(5)
    assert [facts["why"] for event, facts in house.told if event == "failed"] == [f"move 7: {house.side.refuses}"]
    house.side.refuses = ""
    await house.looks(1)
    assert house.side.asked[-1][0] == "move"


async def test_a_user_who_holds_a_job_that_is_moved_gets_it_back_held(house: House) -> None:
    await arrives(house)
    await house.looks(3)
    (id,) = house.machines.alive
    house.see(HELD, **{node_of(id): NodeState.IDLE})
    await house.looks(3)
    assert house.side.asked[-1][0] == "move"
    for node in (NodeState.IDLE, NodeState.OUT):
        house.see(replace(HELD, queue="belljar", is_held_by_user=True), **{node_of(id): node})
        await house.looks(2)
    told = ("note", "7", "its user holds it")  # at once, for it may be home when it is looked at next
    assert house.side.asked[-3:] == [("unpin", "7", "batch"), told, ("remove", node_of(id))]
    house.see(replace(HELD, queue="belljar", is_held_by_user=True))
    await house.looks(1)
    assert house.side.asked[-2:] == [("give_back", "7", "batch", "30.0"), ("note", "7", "its user holds it")]
    assert house.side.kept_held == [True]
    house.see(replace(HELD, queue="batch", is_held_by_user=True))
    await house.looks(1)
    assert house.states[-2:] == ["requeue", "closed"] and house.machines.alive == set()


def test_a_users_own_hold_is_told_from_ours() -> None:
    jobs = load("slurm").jobs((RECORDINGS / "squeue.txt").read_bytes(), MARK.decode())
    assert {id: one.is_held_by_user for id, one in jobs.items() if one.state is HELD.state} == {"1": False, "2": True}
    back = load("slurm").give_back
    assert back(RUNNING, "batch", 30, stays_held=True) == back(RUNNING, "batch", 30)[:1]


async def test_a_job_that_is_refused_in_the_machines_partition_is_held_in_its_own(house: House) -> None:
    """Released there by an administrator, it would wait for ever; and slurmctld notes nothing down of a job in an empty partition."""
    moved = replace(HELD, queue="belljar", starts=SETTINGS.restarts)
    house.daemon.journal.write(Entry("7", State.REPROCESS, 1.0, home="batch", why="it did not start"))
    house.see(moved)
    await house.looks(2)
    assert house.side.asked[-2:] == [
        ("give_back", "7", "batch", "30.0"), ("note", "7", "requeued 10 times; at last: it did not start"),
    ]  # fmt: skip
    assert set(house.side.kept_held) == {True}
    house.see(replace(moved, queue="batch"))
    await house.looks(1)
    assert house.side.asked[-2][0] == "note" and house.side.asked[-1][0] == "note"
