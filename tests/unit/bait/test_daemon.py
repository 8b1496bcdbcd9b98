"""The bait's loop, with a batch system and machines of values: what it writes down before it acts, and what it asks the batch system."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.bait.plain import Plain, nothing

from belljar.bait import Order, Settings
from belljar.bait.arrivals import Answer
from belljar.bait.daemon import Daemon
from belljar.bait.decisions.decide import Room
from belljar.bait.decisions.note import Parts, write
from belljar.bait.decisions.step import Entry, State
from belljar.bait.journal import give_order, read, read_status
from belljar.bait.machines.keeper import feature_of
from belljar.cli.bait import bait as verbs
from belljar.errors import BadOption, CommandFailed, HostError
from belljar.model import GIB, MIB
from belljar.pool import JobState, JobView, NodeState, NodeView, machine_of
from belljar.pool.slurm.nodes import SlurmPool
from belljar.records import replace
from belljar.service import kept

SETTINGS = Settings(name="bait1", images=("worker",), networks=(("open", "br0"),), cycle=0.1)
ROOM = Room(8 * GIB, 4, 50 * GIB, 16 * GIB, 8)
RUNNING = JobView("7", JobState.RUNNING, owner="root", queue="batch", memory=600 * MIB, on=("bait1",), number="7")
HELD = replace(RUNNING, state=JobState.HELD, on=(), starts=1)
FREE = NodeView("bait1", NodeState.IDLE)


class Side(Plain):
    """Both sides of a batch system: what it is asked is remembered, what it answers is set."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"jobs": {}, "nodes": {"bait1": FREE}}
        self.asked: list[tuple[str, ...]] = []
        self.broken = self.refuses = ""
        self.kept_held: list[bool] = []
        self.taken_back, self.cancelled = asyncio.Event(), asyncio.Event()

    def query(self, mark: str) -> tuple[str, ...]:
        return ("query",)

    def query_nodes(self) -> tuple[str, ...]:
        return ("query",)

    def jobs(self, printed: bytes, mark: str) -> dict[str, JobView]:
        return dict(self.seen["jobs"])

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        return dict(self.seen["nodes"])

    saves = 0.0

    def __getattr__(self, name: str) -> Any:
        several = name in ("take_back", "move", "give_back", "remove", "unpin", "lose")
        words = lambda *of: (name, *(one.id if isinstance(one, JobView) else str(one) for one in of))  # noqa: E731

        def say(*of: object, **how: bool) -> Any:
            self.kept_held += [how["stays_held"]] if "stays_held" in how else []
            return (words(*of),) if several else words(*of)

        return say

    async def run(self, argv: tuple[str, ...]) -> bytes:
        if self.broken:
            raise CommandFailed(self.broken)
        if argv != ("query",) and self.refuses:
            raise CommandFailed(self.refuses)
        if argv != ("query",):
            self.asked.append(argv)
        if argv[0] == "take_back":
            self.taken_back.set()
        if argv[0] == "cancel":
            self.cancelled.set()
        return b""


class Machines:
    """A keeper that only remembers."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.over: dict[str, str] = {}
        self.refuses: Exception | None = None
        self.space = ROOM

    def living(self) -> frozenset[str]:
        return frozenset(self.alive)

    def sizes(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.alive, (1, 800 * MIB))

    def ended(self, id: str) -> str | None:
        return self.over.get(id)

    def last_words(self, id: str) -> str:
        return ""

    async def start(self, job: JobView, id: str) -> None:
        if self.refuses:
            raise self.refuses
        self.alive.add(id)

    def end(self, id: str) -> None:
        self.alive.discard(id)

    def room(self, taken: int) -> Room:
        return replace(self.space, cpus=self.space.cpus - taken)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}


class House:
    """A bait with all that."""

    def __init__(self, folder: Path, settings: Settings = SETTINGS, clock: Callable[[], float] = time.time) -> None:
        self.side, self.machines, self.told = Side(), Machines(), list[tuple[str, dict[str, Any]]]()
        pool: Any = self.side
        self.daemon = Daemon(
            settings,
            folder,
            pool,
            self.machines,
            lambda event, **facts: self.told.append((event, facts)),
            nothing,
            run_command=self.side.run,
            clock=clock,
        )

    def see(self, job: JobView | None, **nodes: NodeState) -> None:
        self.side.seen["jobs"] = {job.id: job} if job else {}
        features = (SETTINGS.feature, feature_of("bait1"))
        self.side.seen["nodes"] = {"bait1": FREE} | {
            name: NodeView(name, state, features) for name, state in nodes.items()
        }

    async def looks(self, count: int = 3) -> None:
        for _ in range(count):
            await self.daemon.look()
            await asyncio.sleep(0)

    @property
    def states(self) -> list[str]:
        return [facts["state"] for event, facts in self.told if event == "job"]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def arrives(house: House) -> None:
    """A prolog asks while the job still runs; it is answered when Slurm has it back."""
    house.see(RUNNING)
    asking = asyncio.ensure_future(house.daemon.arrived("7", False))
    await house.side.taken_back.wait()
    assert not asking.done() and read(house.daemon.folder)["7"].state is State.ARRIVED
    house.see(HELD)
    assert await asking is Answer.TAKEN


async def test_a_machine_that_a_look_has_not_seen_yet_is_asked_for_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was claimed after that look had begun. Asked for again it would be refused, and that taken for its end."""
    await arrives(house)
    asked: list[str] = []
    start = Machines.start

    async def counted(machines: Machines, job: JobView, id: str) -> None:
        asked.append(id)
        await start(machines, job, id)

    monkeypatch.setattr(Machines, "start", counted)
    monkeypatch.setattr(Machines, "living", lambda *_: frozenset())
    await house.looks(4)
    monkeypatch.undo()
    await house.looks(1)
    assert asked == [*house.machines.alive] and house.daemon.journal.entries["7"].state is State.VM_BOOTING


async def test_a_job_whose_start_the_batch_system_has_forgotten_is_taken_back_when_it_starts_again(
    house: House,
) -> None:
    """A slurmctld that was killed does not know that it is in its prolog here. It starts it anew; the node waits for this prolog."""
    house.side.has_forgotten = SlurmPool().has_forgotten  # type: ignore[method-assign]
    house.see(replace(HELD, state=JobState.WAITING))
    asking = asyncio.ensure_future(house.daemon.arrived("7", False))
    await house.looks(2)
    assert house.side.asked == [] and not asking.done()
    house.see(RUNNING)
    await house.side.taken_back.wait()
    house.see(HELD)
    assert await asking is Answer.TAKEN and house.daemon.journal.entries["7"].state is State.ARRIVED


async def test_a_job_that_is_held_as_before_it_began_is_let_go_and_taken_back(house: House) -> None:
    """The bait did not hold it, and slurmd was not told to end it: slurmctld has forgotten that it was released."""
    house.side.has_forgotten = SlurmPool().has_forgotten  # type: ignore[method-assign]
    house.see(HELD)
    assert await house.daemon.arrived("7", False) is Answer.TAKEN
    assert house.side.asked == []  # as far as one can see, its user has just taken it back
    assert await house.daemon.arrived("7", True) is Answer.TAKEN
    assert house.side.asked == [("release", "7")]
    house.see(replace(HELD, state=JobState.ENDING))
    assert await house.daemon.arrived("7", True) is Answer.TAKEN  # the node's daemon is told to end it
    house.see(replace(HELD, state=JobState.ENDED))
    assert (await house.daemon.arrived("7", False), await house.daemon.arrived("7", True)) == (
        Answer.TAKEN,
        Answer.FAILED,
    )


async def test_a_prolog_waits_where_the_batch_system_does_not_know_its_job(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may give its number to another."""
    monkeypatch.setattr("belljar.bait.daemon.TAKEN_BACK", 0.1)
    assert await house.daemon.arrived("7", False) is Answer.NOT_YET


async def test_a_job_that_is_given_back_and_comes_again_at_once_is_taken_again(house: House) -> None:
    """As with OpenPBS, which starts what is released at once: before the next look has seen that it was given back."""
    house.daemon.journal.write(Entry("7", State.REQUEUE, 1.0, home="batch", why="it did not boot"))
    await arrives(house)
    await house.looks(2)
    assert house.daemon.journal.entries["7"].state is not State.REQUEUE and len(house.machines.alive) == 1


async def test_a_job_that_is_tried_again_wants_its_first_node_no_more_when_that_is_removed(house: House) -> None:
    await arrives(house)
    await house.looks(4)
    (id,) = house.machines.alive
    house.machines.alive, house.machines.over = set(), {id: "QEMU was killed"}
    house.see(replace(HELD, queue=SETTINGS.queue), **{f"vm{id}x": NodeState.OUT})
    await house.looks(2)
    assert house.states[-1] == "reprocess" and house.side.asked[-2:] == [
        ("unpin", "7", "batch"),
        ("remove", f"vm{id}x"),
    ]


async def test_a_node_is_removed_when_no_job_has_named_it_for_as_long_as_the_batch_system_takes_to_save(
    tmp_path: Path,
) -> None:
    now = [1000.0]
    house, node, gone = House(tmp_path, clock=lambda: now[0]), f"vm{'a' * 12}x", ("remove", f"vm{'a' * 12}x")
    house.side.saves = 10.0  # type: ignore[misc]
    for job in (replace(HELD, id="8", on=(node,)), replace(HELD, id="8", wants=(node,), queue=SETTINGS.queue)):
        house.see(job, **{node: NodeState.OUT})
        now[0] += 60
        await house.looks(1)
        house.see(replace(HELD, id="8", wants=(node,)), **{node: NodeState.OUT})  # anybody may ask for it elsewhere
        for passed in (1, 9):
            await house.looks(1)
            assert gone not in house.side.asked
            now[0] += passed
    await house.looks(1)
    assert house.side.asked == [gone]


async def test_a_job_is_followed_from_its_arrival_to_its_end(house: House) -> None:
    await arrives(house)
    await house.looks(4)
    (id,) = house.machines.alive
    node = house.daemon.journal.entries["7"].machines[0]
    assert machine_of(f"vm{node}x") == id
    house.see(HELD, **{f"vm{id}x": NodeState.IDLE})
    await house.looks()
    assert house.side.asked[-1] == ("move", "7", f"('vm{id}x',)", "belljar")
    house.see(replace(RUNNING, on=(f"vm{id}x",)), **{f"vm{id}x": NodeState.BUSY})
    await house.looks(1)
    over = replace(RUNNING, state=JobState.ENDED, on=())
    house.see(over, **{f"vm{id}x": NodeState.IDLE})
    await house.looks(2)
    assert house.side.asked[-1] == ("close", f"vm{id}x", "its job has ended")
    house.see(over, **{f"vm{id}x": NodeState.OUT})
    await house.looks(1)
    assert house.machines.alive == set() and house.side.asked[-1][0] == "close"  # its machine first, then the node
    await house.looks(1)
    assert house.side.asked[-1] == ("remove", f"vm{id}x")
    house.see(over)
    await house.looks(1)
    assert house.states == [
        "arrived", "stopped", "vm-requested", "vm-booting", "vm-ready", "migrating", "running", "finished", "closed",
    ]  # fmt: skip
    assert read(house.daemon.folder) == {}


async def test_a_part_of_another_baits_job_is_made_here_or_refused(house: House, tmp_path: Path) -> None:
    parts = Parts((("bait0", "a" * 12), ("bait1", "b" * 12)))
    theirs = replace(HELD, nodes=2, cpus=2, note=f"belljar: {write(parts)}")
    house.see(replace(theirs, image="el7"))
    await house.looks(1)
    why = "image el7: not among the images that may become nodes here (worker)"
    assert house.side.asked == [("note", "7", f"{write(parts)} failed={'b' * 12} {why}")]
    house.see(theirs)
    await house.looks()
    assert house.machines.alive == {"b" * 12}
    kept = read(tmp_path)["7"]
    assert (kept.leads, kept.machines, kept.state) == (False, ("b" * 12,), State.VM_BOOTING)
    house.see(replace(theirs, note="belljar: its machine failed"))
    await house.looks()
    assert house.machines.alive == set() and read(tmp_path) == {} and house.daemon.status.faults == 0


async def test_a_part_that_cannot_be_made_is_told_and_counts_as_this_hosts_fault(house: House) -> None:
    parts = Parts((("bait0", "a" * 12), ("bait1", "b" * 12)))
    house.machines.refuses = HostError("the store is broken")
    house.see(replace(HELD, nodes=2, note=f"belljar: {write(parts)}"))
    await house.looks(5)
    told = f"{write(parts)} failed={'b' * 12} HostError: the store is broken"
    assert house.side.asked[-1] == ("note", "7", told) and house.daemon.status.faults == 1
    house.see(replace(HELD, nodes=2, note=f"belljar: {told}"))
    await house.looks()
    assert read(house.daemon.folder) == {} and house.daemon.status.faults == 1


async def test_only_the_bait_of_its_first_node_takes_a_job_back(house: House) -> None:
    house.see(replace(RUNNING, on=("bait0", "bait1"), nodes=2))
    asking = asyncio.ensure_future(house.daemon.arrived("7", False))
    await asyncio.sleep(0)
    house.see(replace(HELD, nodes=2))
    assert await asking is Answer.TAKEN and house.side.asked == [] and read(house.daemon.folder) == {}


async def test_what_was_written_down_is_found_by_the_next_bait(house: House, tmp_path: Path) -> None:
    await arrives(house)
    await house.looks(1)
    (id,) = house.daemon.journal.entries["7"].machines
    again = House(tmp_path)
    again.see(HELD)
    await again.looks(2)
    assert again.machines.alive == {id} and again.daemon.journal.entries["7"].state in (
        State.VM_REQUESTED,
        State.VM_BOOTING,
    )


async def test_a_batch_system_that_is_silent_or_raves_stops_nothing_and_starts_nothing(house: House) -> None:
    await arrives(house)
    house.side.broken = "scontrol: Unable to contact slurm controller"
    before = dict(house.daemon.journal.entries)
    await house.looks()
    assert house.daemon.journal.entries == before and house.machines.alive == set()
    status = read_status(house.daemon.folder)
    assert status is not None and "Unable to contact" in status.error
    assert [facts["why"] for event, facts in house.told if event == "failed"] == [
        "CommandFailed: scontrol: Unable to contact slurm controller"
    ]
    house.side.broken = ""
    await house.looks(1)
    assert house.daemon.journal.entries["7"].state is State.VM_REQUESTED and house.daemon.status.error == ""


async def test_a_start_that_fails_is_tried_again_and_then_the_job_goes_back(house: House) -> None:
    await arrives(house)
    house.machines.refuses = HostError("the store is broken")
    await house.looks(14)
    assert ("give_back", "7", "batch", "30.0") in house.side.asked
    assert ("note", "7", "HostError: the store is broken") in house.side.asked
    assert house.states.count("vm-requested") == house.states.count("reprocess") == 3
    assert house.daemon.status.faults == 3
    house.see(replace(HELD, state=JobState.WAITING))
    await house.looks(2)
    status = read_status(house.daemon.folder)
    assert house.states[-1] == "closed" and status is not None and status.state == "closed-faults"
    assert ("close", "bait1", "3 starts failed in a row") in house.side.asked


async def test_a_bait_that_is_restarted_knows_of_the_failed_starts_before_it(house: House, tmp_path: Path) -> None:
    await arrives(house)
    house.machines.refuses = OSError("no process is left")  # as it comes from the kernel
    await house.looks(14)
    again = House(tmp_path)
    assert again.daemon.status.failed == house.daemon.status.failed and again.daemon.status.faults == 3
    again.see(None)
    await again.looks(1)
    status = read_status(tmp_path)
    assert status is not None and (status.state, status.failed) == ("closed-faults", house.daemon.status.failed)


async def test_what_its_asker_did_wrong_is_no_fault_of_this_host(house: House) -> None:
    await arrives(house)
    house.machines.refuses = BadOption("its user is not known on this host")
    await house.looks(14)
    assert house.daemon.status.faults == 0 and house.side.asked[-2][0] == "give_back"


async def test_an_impossible_job_is_held_with_the_reason(house: House) -> None:
    house.see(replace(RUNNING, image="el7"))
    asking = asyncio.ensure_future(house.daemon.arrived("7", False))
    await house.side.taken_back.wait()
    house.see(replace(HELD, image="el7"))
    await asking
    await house.looks(4)
    assert house.side.asked[-1] == ("note", "7", "image el7: not among the images that may become nodes here (worker)")
    assert house.machines.alive == set()


async def test_somebody_at_a_terminal_is_sent_away(house: House) -> None:
    house.see(replace(RUNNING, is_batch=False))
    asking = asyncio.ensure_future(house.daemon.arrived("7", False))
    await house.side.cancelled.wait()
    house.see(replace(RUNNING, state=JobState.ENDED, on=()))
    assert await asking is Answer.TAKEN and house.daemon.journal.entries == {}
    assert house.side.asked[:2] == [("note", "7", "only batch scripts run here"), ("cancel", "7")]


async def test_a_job_of_which_no_prolog_told_is_taken_back(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    house.daemon.journal.write(Entry("7", State.REQUEUE, time.time(), home="batch", why="it was given back"))
    house.see(RUNNING)
    await house.looks(2)  # its prolog has its time to tell
    assert not house.side.taken_back.is_set()
    monkeypatch.setattr("belljar.bait.daemon.UNTOLD", 0.0)
    await house.looks(1)
    assert ("take_back", "7") in house.side.asked and house.daemon.journal.entries["7"].state is State.ARRIVED
    house.see(replace(RUNNING, id="8", number="8", is_batch=False))
    await house.looks(1)
    assert ("cancel", "8") in house.side.asked and "8" not in house.daemon.journal.entries
    house.side.asked.clear()
    house.see(replace(RUNNING, id="9", number="9", on=("bait0", "bait1"), nodes=2))
    await house.looks(1)
    assert not [one for one in house.side.asked if one[0] == "take_back"]  # its leader does that


async def test_the_batch_system_is_told_that_the_bait_is_closed(house: House) -> None:
    give_order(house.daemon.folder, Order(False, "disk swap"))
    await house.looks(1)
    assert house.side.asked == [("close", "bait1", "disk swap")]
    for reason, opened in (
        ("belljar: disk swap", True),
        ("Prolog error", True),
        ("Duplicate jobid", True),
        ("memory is broken", False),
    ):
        house.side.asked.clear()
        house.side.seen["nodes"]["bait1"] = NodeView("bait1", NodeState.OUT, (), reason)
        give_order(house.daemon.folder, Order())
        await house.looks(1)
        assert (house.side.asked == [("open", "bait1")]) is opened  # what somebody else closed stays closed


def test_one_bait_works_in_a_folder(tmp_path: Path) -> None:
    runtime: Any = None
    file = tmp_path / "bait.toml"
    file.write_text('[bait]\nimages = ["worker"]\nnetworks = { open = "br0" }\n')
    with kept.alone(tmp_path / "state", "bait"), pytest.raises(HostError, match="another bait works here"):
        verbs.run(Namespace(file=file, state=tmp_path / "state", format="table"), runtime)
