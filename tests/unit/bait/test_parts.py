"""A job over two hosts, with a bait on each, in a world of values: all nodes or none, whoever dies and whenever."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.unit.bait.moves import MOVES
from tests.unit.bait.plain import nothing
from tests.unit.bait.test_worlds import JOB, SETTINGS, Killed, World

from belljar.bait.decisions.advance import next_step
from belljar.bait.decisions.decide import Bait, Room
from belljar.bait.decisions.leaving import recover
from belljar.bait.decisions.note import LONGEST, Parts, read, too_long, write
from belljar.bait.decisions.parts import invitation, refusal
from belljar.bait.decisions.step import Act, BaitState, Do, Entry, Seen, State, Step
from belljar.model import GIB
from belljar.pool import JobState, JobView, NodeState, NodeView, node_of
from belljar.records import replace

S = State
NAMES = ("bait1", "bait2")
ROOM, OPEN = Room(8 * GIB, 4, 50 * GIB, 16 * GIB, 8), Bait(BaitState.OPEN)
WIDE = replace(JOB, nodes=2, cpus=2, on=NAMES)


class Host:
    """A bait, and its machines."""

    def __init__(self, name: str) -> None:
        self.settings = replace(SETTINGS, name=name)
        self.machines: set[str] = set()
        self.made: set[str] = set()
        self.ended: dict[str, str] = {}
        self.journal: dict[str, Entry] = {}
        self.bait = OPEN


class Hosts(World):
    """The job's world with two of them. The first one leads."""

    def __init__(self, lasts: int = 2) -> None:
        super().__init__(2, lasts)
        self.job, self.hosts = WIDE, [Host(name) for name in NAMES]
        self.hosts[0].journal = {"7": Entry("7", S.ARRIVED, 0.0, on=NAMES)}
        self.journal = self.hosts[0].journal
        self.mine = self.hosts[0]

    def tick(self) -> None:
        self.machines = {id for host in self.hosts for id in host.machines}
        is_first = self.job.on == NAMES
        self.job = replace(self.job, on=("bait1",)) if is_first else self.job
        super().tick()

    def do(self, act: Act) -> None:
        if act.do is Do.NOTE:
            self.job = replace(self.job, note=f"belljar: {act.of}")
            return
        self.machines, self.ended = self.mine.machines, self.mine.ended
        others = {id for host in self.hosts if host is not self.mine for id in host.machines}
        assert act.do is not Do.REMOVE or act.of not in map(node_of, others)
        super().do(act)
        if act.do is Do.START:
            self.mine.made.add(act.of)

    def look(self) -> None:
        killed = False
        for host in self.hosts:
            try:
                self.look_of(host)
            except Killed:
                killed = True
        if killed:
            raise Killed

    def look_of(self, host: Host) -> None:
        self.mine = host
        nodes = {name: NodeView(name, state) for name, state in self.nodes.items()}
        seen = Seen(self.now, {"7": self.job}, nodes, frozenset(host.machines), dict(host.ended))
        for entry in list(host.journal.values()):
            step: Step = next_step(entry, seen, host.settings)
            after = step.entry
            if after.state is S.STOPPED and entry.state is S.STOPPED:
                ids = tuple(f"{next(self.fresh):012x}" for _ in NAMES)
                after = replace(after, state=S.VM_REQUESTED, since=self.now, machines=ids)
            self.point()
            if after.state is not entry.state:
                assert after.state in MOVES[entry.state], (entry.state, after.state)
                self.seen_states.append(after.state)
            if after.state is S.CLOSED:
                del host.journal["7"]
            else:
                host.journal["7"] = after
            for act in step.acts:
                self.point()
                self.do(act)
        ours = frozenset(node for node in self.nodes if node in map(node_of, host.made))
        for act in recover(host.journal.values(), seen, ours):
            self.do(act)
        invited = invitation(host.journal, seen, host.bait, ROOM, host.settings, nothing)
        if invited is not None:
            self.point()
            for act in invited.acts:
                self.do(act)
            if not invited.acts:
                host.journal["7"] = invited.entry

    @property
    def is_clean(self) -> bool:
        return not (self.nodes or any(host.journal or host.machines for host in self.hosts))

    def live(self, looks: int = 400, deaths: dict[int, int] | None = None) -> Hosts:
        """*deaths*: at which look a machine of which host dies."""
        for look in range(looks):
            try:
                self.look()
            except Killed:
                continue
            self.tick()
            host = self.hosts[(deaths or {}).get(look, 0)]
            if look in (deaths or {}) and host.machines:
                host.ended[id := sorted(host.machines)[0]] = "QEMU was killed"
                host.machines.discard(id)
            if self.is_clean:
                break
        return self


def test_a_job_over_two_hosts_has_a_machine_on_each() -> None:
    world = Hosts().live()
    assert world.completed == 1 and world.is_clean and world.job.starts == 1
    assert [len(host.made) for host in world.hosts] == [1, 1]


def test_a_bait_that_is_killed_at_any_point_goes_on_and_so_does_the_other() -> None:
    whole = Hosts().live().points
    assert whole > 30
    for at in range(1, whole + 1):
        world = Hosts()
        world.kill_at = at
        world.live()
        assert (world.completed, world.job.starts, world.is_clean) == (1, 1, True), at


@given(deaths=st.dictionaries(st.integers(0, 25), st.integers(0, 1), max_size=3), kills=st.integers(0, 90))
@hypothesis_settings(max_examples=300, deadline=None)
def test_whatever_dies_on_which_host_nothing_stays_and_nothing_is_done_twice(
    deaths: dict[int, int], kills: int
) -> None:
    world = Hosts()
    world.kill_at = kills
    world.live(deaths=deaths)
    gone_elsewhere = world.job.on == ("elsewhere",) or (world.job.state is JobState.WAITING and not world.pinned)
    assert world.is_clean and world.completed == (0 if gone_elsewhere else 1)
    if gone_elsewhere:
        assert S.REQUEUE in world.seen_states


@pytest.mark.parametrize("state", [BaitState.CLOSED_ADMIN, BaitState.CLOSED_STORE, BaitState.CLOSED_FAULTS])
def test_a_host_that_is_closed_refuses_its_part_and_the_job_goes_back(state: BaitState) -> None:
    world = Hosts()
    world.hosts[1].bait = Bait(state, "disk swap")
    world.live()
    assert world.completed == 0 and world.job.on == ("elsewhere",) and world.is_clean
    assert world.hosts[1].made == set() and S.REQUEUE in world.seen_states


def test_a_host_whose_bait_is_gone_costs_the_job_its_time_and_leaves_nothing() -> None:
    world = Hosts()
    leader = world.hosts[0]
    world.hosts = [leader]
    while leader.journal["7"].state is not S.REPROCESS:
        world.look()
        world.tick()
        world.now += 20
    assert leader.journal["7"].why == "elsewhere: bait2: no machine joined within 300 s"
    world.live(2000)
    assert world.is_clean and world.job.on == ("elsewhere",) and world.completed == 0


def test_a_bait_that_went_away_for_long_and_comes_back_ends_its_part() -> None:
    world = Hosts()
    while not world.hosts[1].machines:
        world.look()
        world.tick()
    both, world.hosts = world.hosts, world.hosts[:1]
    world.nodes.clear()
    for _ in range(60):
        world.look()
        world.tick()
        world.now += 20
    world.hosts = both
    world.live()
    assert world.is_clean


def part(state: State, **facts: object) -> Entry:
    return replace(Entry("7", state, 0.0, ("b" * 12,), leads=False), **facts)  # type: ignore[arg-type]


NOTE = "belljar: " + write(Parts((("bait1", "a" * 12), ("bait2", "b" * 12))))
HELD = replace(WIDE, state=JobState.HELD, on=(), note=NOTE)
SECOND = replace(SETTINGS, name="bait2")


def seen(job: JobView | None = HELD, now: float = 1.0, lives: bool = True, node: NodeState | None = None) -> Seen:
    name = node_of("b" * 12)
    nodes = {} if node is None else {name: NodeView(name, node)}
    return Seen(now, {} if job is None else {"7": job}, nodes, frozenset({"b" * 12} if lives else ()))


def invited(job: JobView, room: Room = ROOM, bait: Bait = OPEN) -> Step | None:
    return invitation({}, seen(job, lives=False), bait, room, SECOND, nothing)


def test_a_part_is_taken_when_there_is_room_for_it_and_refused_where_it_can_never_be() -> None:
    assert invited(HELD) == Step(Entry("7", S.VM_REQUESTED, 1.0, ("b" * 12,), leads=False))
    assert invited(HELD, replace(ROOM, cpus=0)) is None and invited(HELD, replace(ROOM, memory=GIB // 4)) is None
    refused = invited(replace(HELD, image="el7"))
    assert refused is not None and "image el7: not among the images" in refused.acts[0].of
    assert invited(replace(HELD, note="belljar: its machine failed")) is None
    assert invited(replace(HELD, note=NOTE + f" failed={'a' * 12} no space")) is None
    assert invited(replace(HELD, state=JobState.RUNNING, on=NAMES)) is None
    assert invited(replace(HELD, note=NOTE.replace("bait2", "bait3"))) is None
    assert invitation({}, seen(lives=False), OPEN, ROOM, SETTINGS, nothing) is None  # it leads: its own journal tells


@pytest.mark.parametrize("state", [S.VM_REQUESTED, S.VM_BOOTING, S.VM_READY])
def test_a_part_ends_when_its_leader_takes_it_back(state: State) -> None:
    for note in ("", "belljar: its machine failed", NOTE.replace("b" * 12, "c" * 12)):
        step = next_step(part(state), seen(replace(HELD, note=note)), SECOND)
        assert (step.entry.state, step.entry.why) == (S.FINISHED, "its leader took it back")


def test_while_the_job_runs_on_its_node_the_note_means_nothing() -> None:
    there = replace(WIDE, on=(node_of("a" * 12), node_of("b" * 12)), note="an administrator's own words")
    running = next_step(part(S.VM_READY), seen(there, node=NodeState.BUSY), SECOND).entry
    assert running.state is S.RUNNING
    lost = next_step(running, seen(there, lives=False, node=NodeState.BUSY), SECOND).entry
    assert lost.state is S.LOST
    assert next_step(lost, seen(there, lives=False, node=NodeState.BUSY), SECOND).acts == (
        Act(Do.LOSE, node_of("b" * 12)),
    )
    assert next_step(lost, seen(HELD, lives=False, node=NodeState.OUT), SECOND).entry.state is S.FINISHED
    over = next_step(part(S.FINISHED), seen(replace(there, state=JobState.ENDED), node=NodeState.IDLE), SECOND)
    assert over.acts == (Act(Do.CLOSE, node_of("b" * 12)),)  # it still tells where it was
    late = next_step(part(S.FINISHED), seen(there, 500.0, node=NodeState.BUSY), SECOND)
    assert late == Step(part(S.FINISHED))  # it came at the last moment


def test_a_part_that_fails_is_told_to_its_leader_until_that_has_seen_it() -> None:
    late = next_step(part(S.VM_BOOTING), seen(now=SECOND.join + 1), SECOND).entry
    assert late.state is S.FINISHED and late.why == "a machine did not join within 300 s"
    told = next_step(late, seen(now=400.0), SECOND).acts[0]
    assert told == Act(
        Do.NOTE, f"{NOTE.removeprefix('belljar: ')} failed={'b' * 12} a machine did not join within 300 s"
    )
    note = f"belljar: {told.of}"
    leading = Entry("7", S.VM_BOOTING, 0.0, ("a" * 12, "b" * 12), on=NAMES)
    ready = replace(seen(replace(HELD, note=note), lives=False), machines=frozenset({"a" * 12}))
    failed = next_step(leading, ready, SETTINGS).entry
    assert (failed.state, failed.why) == (S.REPROCESS, "elsewhere: bait2: a machine did not join within 300 s")
    back = next_step(failed, ready, SETTINGS)
    assert back.acts[0] == Act(Do.NOTE, failed.why) and Act(Do.END, "a" * 12) in back.acts
    assert next_step(late, seen(replace(HELD, note=note), 400.0, lives=False), SECOND).entry.state is S.CLOSED


def test_what_the_job_was_given_stays_in_a_note_that_tells_of_a_failure() -> None:
    parts = Parts((("bait1", "a" * 12), ("bait2", "b" * 12)), given=(4, 1200 << 20))
    assert read("belljar: " + write(parts)) == parts
    failed = refusal(replace(HELD, note="belljar: " + write(parts)), "b" * 12, "no space")
    assert read(f"belljar: {failed.of}") == replace(parts, failed="b" * 12, why="no space")


def test_a_note_that_is_not_ours_names_no_parts() -> None:
    assert read(NOTE).machines == (("bait1", "a" * 12), ("bait2", "b" * 12)) and read(NOTE).of(("bait2",)) == (
        "b" * 12,
    )
    for wrong in (
        "",
        "parts bait1=" + "a" * 12,
        NOTE + " x",
        NOTE[:-1],
        NOTE.replace("bait2", "../bait2"),
        NOTE + "\n",
    ):
        assert read(wrong) == Parts()
    assert too_long(["n" * 60] * (LONGEST // 74 + 1)) and not too_long(NAMES)
