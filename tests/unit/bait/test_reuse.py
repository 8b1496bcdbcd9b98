"""Machines that serve one job after the other, in a world of values: whatever is killed and whenever, a job finds nothing of another's."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.unit.bait.moves import MOVES
from tests.unit.bait.plain import Plain, nothing

from belljar.bait import Settings, acts, daemon
from belljar.bait.daemon import Daemon
from belljar.bait.decisions.cache import MARK
from belljar.bait.decisions.decide import Room
from belljar.bait.decisions.step import Entry, State
from belljar.model import GIB, MIB
from belljar.pool import JobState, JobView, NodeState, NodeView, machine_of, node_of
from belljar.records import replace

SETTINGS = Settings(
    name="bait1", images=("worker",), networks=(("open", "br0"),), cache="same-user", overhead=0, min_memory=0, min_disk=0,
    restarts=100, tries=100, cache_uses=3,
)  # fmt: skip
LOOKS = 300


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory: each look renames a file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are killed here, and no power fails: what is written need not be on the disk."""
    for name in ("fdatasync", "fsync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of looks, with several threads each, would take longer than a test may on a busy host."""

    async def at_once(call: Callable[[], Any]) -> Any:
        return call()

    for module in (daemon, acts):
        monkeypatch.setattr(module, "in_thread", at_once)


class Killed(BaseException):
    """The bait, between two lines."""


class World(Plain):
    """A batch system and the machines of a host with two processors. Acts show at once, what follows from them at a tick."""

    def __init__(self, folder: Path, *users: int, dirty: frozenset[int] = frozenset(), kill_at: int = -1) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.dirty, self.kill_at, self.points, self.killed = folder, dirty, -1, 0, False
        self.listed: dict[str, JobView] = {}
        for number, uid in enumerate(users):
            id = str(number + 1)
            self.listed[id] = JobView(
                id,
                JobState.RUNNING,
                owner=f"user{uid}",
                uid=uid,
                queue="batch",
                memory=600 * MIB,
                on=("bait1",),
                number=id,
            )
        self.pins: dict[str, tuple[str, ...]] = {}
        self.members: dict[str, NodeView] = {}
        self.alive: set[str] = set()
        self.over: dict[str, str] = {}
        self.left: dict[str, list[str]] = {}  # what jobs have left in a machine
        self.served: dict[str, list[str]] = {}  # by machine: the jobs that ran there
        self.admitted: dict[str, str] = {}
        self.now, self.ticks, self.moves = 0.0, dict[str, int](), list[tuple[str, str]]()
        self.daemon = self.begin()
        for job in self.listed.values():
            self.daemon.journal.write(Entry(job.id, State.ARRIVED, float(job.id), home="batch"))
        self.points, self.kill_at = 0, kill_at

    def begin(self) -> Daemon:
        pool: Any = self
        keeper: Any = self
        tell = lambda event, **facts: self.moves.append((facts["job"], facts["state"])) if event == "job" else None  # noqa: E731
        made = Daemon(SETTINGS, self.folder, pool, keeper, tell, nothing, run_command=self.run, clock=lambda: self.now)
        write = made.journal.write

        def killing(*entries: Entry) -> None:
            self.point()
            write(*entries)
            self.point()

        made.journal.write = killing  # type: ignore[method-assign]
        return made

    def point(self) -> None:
        self.points += 1
        if self.killed or self.points == self.kill_at:
            self.killed = True
            raise Killed

    # -- the batch system

    def query(self, mark: str) -> tuple[str, ...]:
        return ("query",)

    def query_nodes(self) -> tuple[str, ...]:
        return ("query",)

    def jobs(self, printed: bytes, mark: str) -> dict[str, JobView]:
        return dict(self.listed)

    def nodes(self, printed: bytes) -> dict[str, NodeView]:
        return {"bait1": NodeView("bait1", NodeState.IDLE), **self.members}

    saves = 0.0

    def __getattr__(self, name: str) -> Any:
        one = name in ("close", "open", "note")
        return lambda *of, **_: (name, *of) if one else ((name, *of),)

    async def run(self, argv: tuple[Any, ...]) -> bytes:
        if argv != ("query",) and "bait1" not in argv:
            self.point()
            getattr(self, f"do_{argv[0]}")(*argv[1:])
        return b""

    def do_take_back(self, job: JobView) -> None:
        self.listed[job.id] = replace(self.listed[job.id], state=JobState.HELD, on=())

    def do_move(self, job: JobView, nodes: tuple[str, ...], queue: str) -> None:
        self.pins[job.id] = nodes
        self.listed[job.id] = replace(self.listed[job.id], state=JobState.WAITING, queue=queue)

    def do_close(self, node: str, why: str) -> None:
        busy = self.members[node].state in (NodeState.BUSY, NodeState.DRAINING)
        self.members[node] = replace(
            self.members[node], state=NodeState.DRAINING if busy else NodeState.OUT, reason=f"belljar: {why}"
        )

    def do_lose(self, node: str, why: str) -> None:
        self.members[node] = replace(self.members[node], state=NodeState.OUT, reason=f"belljar: {why}")

    def do_open(self, node: str) -> None:
        assert machine_of(node) in self.admitted
        self.members[node] = replace(self.members[node], state=NodeState.IDLE, reason="")

    def do_remove(self, node: str) -> None:
        assert machine_of(node) not in self.alive
        self.members.pop(node, None)

    # -- the keeper

    def living(self) -> frozenset[str]:
        return frozenset(self.alive)

    def ended(self, id: str) -> str | None:
        return self.over.get(id)

    async def start(self, job: JobView, id: str) -> None:
        self.point()
        self.alive.add(id)
        self.admitted[id], self.left[id] = job.owner, []
        self.point()

    async def prove(self, id: str) -> str:
        self.point()
        assert not self.running_on(id) and self.members[node_of(id)].state is NodeState.OUT
        self.admitted.pop(id, None)
        if any(int(job) in self.dirty for job in self.left[id]):
            return "/etc/passwd"
        self.left[id].clear()
        self.point()
        return ""

    async def admit(self, job: JobView, id: str) -> None:
        self.point()
        assert self.left[id] == [] and id in self.alive
        self.admitted[id] = job.owner

    def image(self, job: JobView) -> str:
        return "digest"

    def end(self, id: str) -> None:
        self.point()
        assert not self.running_on(id)
        self.alive.discard(id)
        self.over[id] = "cancelled"

    def room(self, taken: int) -> Room:
        free = 2 - len(self.alive)
        return Room(free * GIB, free - taken, GIB, 2 * GIB, 2)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        await asyncio.Event().wait()
        yield {}

    # -- what happens by itself

    def running_on(self, id: str) -> list[str]:
        return [job.id for job in self.listed.values() if job.state is JobState.RUNNING and node_of(id) in job.on]

    def done(self) -> list[str]:
        return sorted(job for jobs in self.served.values() for job in jobs)

    def tick(self) -> None:
        self.now += 1
        for id in self.alive:
            self.members.setdefault(
                node_of(id), NodeView(node_of(id), NodeState.IDLE, (SETTINGS.feature, "bait_bait1"))
            )
        for job in list(self.listed.values()):
            if job.state is JobState.WAITING and all(
                self.members[one].state is NodeState.IDLE for one in self.pins[job.id]
            ):
                self._begins(job, self.pins[job.id])
            elif job.state is JobState.RUNNING and job.on != ("bait1",):
                self.ticks[job.id] += 1
                if self.ticks[job.id] > 2:
                    self._ends(job)

    def _begins(self, job: JobView, nodes: tuple[str, ...]) -> None:
        (id,) = map(machine_of, nodes)
        assert not self.running_on(id), "two jobs at once"
        assert self.left[id] == [] and self.admitted[id] == job.owner, "something of another job"
        before = [self.listed[one].owner for one in self.served.setdefault(id, [])]
        assert set(before) <= {job.owner} and len(before) < SETTINGS.cache_uses, "another user's machine"
        assert job.id not in self.done(), "twice"
        self.served[id].append(job.id)
        self.left[id].append(job.id)
        self.ticks[job.id] = 0
        self.listed[job.id] = replace(job, state=JobState.RUNNING, on=nodes)
        self.members[nodes[0]] = replace(self.members[nodes[0]], state=NodeState.BUSY)

    def _ends(self, job: JobView) -> None:
        (node,) = job.on
        is_open = self.members[node].state is NodeState.BUSY
        self.members[node] = replace(self.members[node], state=NodeState.IDLE if is_open else NodeState.OUT)
        self.listed[job.id] = replace(job, state=JobState.ENDED, on=())

    # -- the whole

    async def go_on(self) -> World:
        """Until all jobs are done and nobody does anything; then all that is kept is too old."""
        for _look in range(LOOKS):
            with suppress(Killed):
                await self.daemon.look()
            await asyncio.gather(*self.daemon._acts.working.values(), return_exceptions=True)
            if self.killed:
                self.killed, self.kill_at = False, -1
                self.daemon = self.begin()
                continue
            self.tick()
            entries = self.daemon.journal.entries
            if {job.state for job in self.listed.values()} == {JobState.ENDED} and all(
                one.startswith(MARK) for one in entries
            ):
                if not entries and not self.members and not self.alive:
                    return self
                if {one.state for one in entries.values()} == {State.KEPT}:
                    self.now += SETTINGS.cache_age
        raise AssertionError((self.listed, self.daemon.journal.entries, self.members, self.alive))


async def test_jobs_of_one_user_follow_each_other_on_one_machine_and_the_table_says_how(tmp_path: Path) -> None:
    world = await World(tmp_path, 1, 1, 1, 1, 1).go_on()
    assert sorted(map(len, world.served.values())) == [2, 3]  # the host has two processors; three uses at most
    states: dict[str, list[State]] = {}
    for job, state in world.moves:
        states.setdefault(job, []).append(State(state))
    for one in states.values():
        assert all(after in MOVES[before] for before, after in itertools.pairwise(one) if before is not State.CLOSED)
    assert any(State.KEPT in one and one[-1] is State.CLOSED for one in states.values())


async def test_another_users_job_gets_a_fresh_machine_and_the_room_of_a_kept_one(tmp_path: Path) -> None:
    world = await World(tmp_path, 1, 1, 2, 2).go_on()
    assert sorted(world.served.values()) == [["1"], ["2"], ["3"], ["4"]]


async def test_what_is_not_proved_to_be_clean_is_destroyed(tmp_path: Path) -> None:
    world = await World(tmp_path, 1, 1, 1, 1, dirty=frozenset({1, 2})).go_on()
    assert all(jobs[-1] in ("1", "2") or not {"1", "2"} & set(jobs) for jobs in world.served.values())


async def test_a_bait_that_is_killed_at_any_point_cleans_on_or_destroys(tmp_path: Path) -> None:
    whole = (await World(tmp_path / "whole", 1, 1, 1, 2).go_on()).points
    assert whole > 60
    for at in range(1, whole + 1):
        world = await World(tmp_path / str(at), 1, 1, 1, 2, kill_at=at).go_on()
        assert world.done() == ["1", "2", "3", "4"], at


@given(
    users=st.lists(st.integers(1, 2), min_size=1, max_size=5),
    kill=st.integers(0, 200),
    dirty=st.frozensets(st.integers(1, 5)),
)
@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_comes_and_whatever_is_left_behind(
    users: list[int], kill: int, dirty: frozenset[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(tmp_path_factory.mktemp("world"), *users, dirty=dirty, kill_at=kill)
    asyncio.run(world.go_on())
    assert len(world.done()) == len(users)
