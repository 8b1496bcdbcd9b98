"""A site in virtual time: a batch system, pilots and machines that are simulated, and the real desk, store, `advance` and `heard` between
them. Whatever may go wrong is a method; an observer with its own clock says at every moment whether the promises hold.
"""

import shutil
import tempfile
from math import ceil
from pathlib import Path

from tests.stories.lease.sim_pilot import SETTINGS, SimJob, SimMachine, SimPilot

from belljar.lease import Cause, Do, Facts, Instance, InstanceState, Lease, Order, Report, Tell
from belljar.lease.decisions.advance import advance, drained, lease_of, strays
from belljar.lease.decisions.case import Act, Kind, Seen
from belljar.lease.decisions.margins import KILL, Queue, margins
from belljar.lease.decisions.policy import Policy
from belljar.lease.decisions.reports import heard
from belljar.lease.desk import Desk, Owner
from belljar.lease.states import EC2, INSTANCE_MOVES, LEASE_ENDS, LEASE_MOVES, SLOT_MOVES
from belljar.lease.store import Book, Store, open_store
from belljar.model import GIB
from belljar.pool import JobState
from belljar.pool import NamedJob as Job

POLICY = Policy("all", users=("*",), machines=6, reserved=0.6)
OWNERS = (Owner("ada"), Owner("bob"))
RANKS = {"pending": 0, "running": 1, "shutting-down": 2, "terminated": 3}


class Crash(Exception):
    """The service was killed here."""


class World:
    """All of it. `now` is the observer's clock."""

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="bj-world-", dir=shared if shared.is_dir() else None))
        self.now, self.is_up, self.up = 1000.0, True, 1000.0
        self.jobs: dict[str, SimJob] = {}
        self.pilots: list[SimPilot] = []
        self.is_silent = self.has_forgotten = False
        self.refuses = self.loses_answers = False
        self.knows_late = False  # a look comes between a hello and its connection
        self.crash_in: int | None = None
        self.next_look = self.now
        self.seen_by_client: dict[str, str] = {}
        self.known: set[str] = set()
        self.counts = {"looks": 0, "reports": 0}
        self.store: Store = open_store("", self.folder)
        self.desk = self._desk()

    def _desk(self) -> Desk:
        return Desk(self.store, SETTINGS, lambda: [POLICY], lambda name: Queue(900, 1), lambda: self.now)

    def close(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    # -- the service ---------------------------------------------------------------------------------------------------

    def deliver(self, pilot: SimPilot, report: Report) -> None:
        """To the service; its answer comes back, unless the connection or the service is gone by then."""
        if not self.is_up or not pilot.connected:
            return
        self.counts["reports"] += 1

        def change(book: Book) -> tuple[tuple[Order, ...], int]:
            case = book.case(report.lease)
            if case is None:
                return (Order(Do.VOID),), 0
            after, orders = heard(case, report, self.now, SETTINGS)
            book.save(case, after, self.now, report)
            slot = next((one for one in after.slots if (one.id, one.pilot) == (report.slot, report.pilot)), None)
            return orders, slot.seq if slot is not None else 0

        orders, acked = self.store.write(change)
        if report.tell is not Tell.HELLO or acked:
            pilot.acked = max(pilot.acked, acked)
        for order in orders:
            pilot.obey(order)

    def look(self) -> None:
        """One look of the service at everything."""
        self.counts["looks"] += 1
        answer = None if self.is_silent else () if self.has_forgotten else tuple(self.jobs.values())
        jobs = None if answer is None else [Job(one.name, one.id, one.state) for one in answer]
        leases = {one.id: one for one in self.store.read(lambda book: book.find(Lease))}
        for act in strays(jobs or (), leases.__contains__):
            self.act("", act)
        ours = {lease_of(one.name) for one in jobs or ()}
        for id, lease in sorted(leases.items(), key=lambda item: item[1].created):
            if lease.is_live or id in ours:
                mine = None if jobs is None else tuple(one for one in jobs if lease_of(one.name) == id)
                while self._step(id, mine):
                    pass

    def _step(self, id: str, jobs: tuple[Job, ...] | None) -> bool:
        connected = frozenset(one.slot for one in self.pilots if one.is_known)

        def change(book: Book) -> tuple[bool, tuple[Act, ...]]:
            case = book.case(id)
            assert case is not None
            step = advance(case, Seen(self.now, self.up, jobs, connected), SETTINGS)
            book.save(case, step.case, self.now)
            return step.case.lease.state is not case.lease.state, step.acts

        has_moved, acts = self.store.write(change)
        for act in acts:
            if self.crash_in is not None:
                self.crash_in -= 1
                if self.crash_in < 0:
                    raise Crash
            self.act(id, act)
        return has_moved

    def act(self, id: str, act: Act) -> None:
        if act.kind is Kind.SUBMIT:
            self.submit(id)
        elif act.kind is Kind.CANCEL:
            self.cancel(act.of)
        elif act.order is not None:
            for pilot in self.pilots:
                if pilot.is_known and pilot.slot == act.of:
                    pilot.obey(act.order)

    def crash(self) -> None:
        self.is_up, self.crash_in = False, None
        for pilot in self.pilots:
            pilot.cut()
        self.store.close()

    def restart(self) -> None:
        """I8: it answers as before."""
        self.store = open_store("", self.folder)
        self.desk = self._desk()
        self.is_up, self.up = True, self.now

    # -- the batch system ----------------------------------------------------------------------------------------------

    def submit(self, id: str) -> None:
        lease = self.store.read(lambda book: book.get(Lease, id))
        assert lease is not None
        if self.is_silent:
            return
        if self.refuses:

            def refuse(book: Book) -> None:
                case = book.case(id)
                assert case is not None
                book.save(case, drained(case, Cause.REJECTED, "no such partition", self.now), self.now)

            self.store.write(refuse)
            return
        number = str(len(self.jobs) + 1)
        limit = margins(lease.wanted.seconds, lease.wanted.nodes, SETTINGS).walltime
        self.jobs[number] = SimJob(lease.job_name, number, lease.wanted.nodes, limit)
        if self.loses_answers:
            raise Crash  # before it can write down the job's id

    def cancel(self, id: str) -> None:
        job = self.jobs[id]
        if job.state in (JobState.WAITING, JobState.HELD):
            job.state = JobState.ENDED
        elif job.state is JobState.RUNNING and not job.killed_at:
            self.terminate(job)

    def start(self, job: SimJob, missing: int, is_small: bool) -> None:
        job.state, job.began = JobState.RUNNING, self.now
        lease = self.store_lease(lease_of(job.name))
        before = margins(lease.wanted.seconds if lease else 60, job.nodes, SETTINGS).pilot
        host = Facts("small", cpus=1, memory=GIB) if is_small else Facts("large", cpus=8, memory=32 * GIB)
        for rank in range(job.nodes - missing):
            self.pilots.append(
                SimPilot(
                    self, job, rank, f"p{len(self.pilots)}", self.now, self.now + before, host, down_since=self.now
                )
            )

    def store_lease(self, id: str) -> Lease | None:
        with_store = self.store if self.is_up else open_store("", self.folder)
        found = with_store.read(lambda book: book.get(Lease, id))
        if with_store is not self.store:
            with_store.close()
        return found

    def terminate(self, job: SimJob) -> None:
        """TERM to its pilots, and KILL after the batch system's own grace time."""
        job.killed_at = self.now + SETTINGS.grace + 5
        for pilot in self.of(job):
            if pilot.holds:
                pilot.end(Cause.PREEMPTED, SETTINGS.grace)
            else:
                pilot.say(Tell.ENDED, cause=Cause.PREEMPTED)
                pilot.exit()

    def kill(self, job: SimJob) -> None:
        for pilot in self.of(job):
            pilot.exit()
        job.state = JobState.ENDED

    def of(self, job: SimJob) -> list[SimPilot]:
        return [one for one in self.pilots if one.job is job and one.is_alive]

    # -- time ----------------------------------------------------------------------------------------------------------

    def passes(self, seconds: float) -> None:
        """Second by second: pilots and the batch system by their clocks, the service by its cycle."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for pilot in [one for one in self.pilots if one.is_alive]:
                pilot.tick()
            for job in self.jobs.values():
                if job.state is not JobState.RUNNING:
                    continue
                if not self.of(job) or (job.killed_at and self.now >= job.killed_at):
                    self.kill(job)
                elif self.now >= job.began + job.walltime and not job.killed_at:
                    self.terminate(job)
            if self.is_up and self.now >= self.next_look:
                self.next_look = self.now + SETTINGS.cycle
                try:
                    self.look()
                except Crash:
                    self.crash()
                for pilot in self.pilots:
                    pilot.is_known = pilot.connected
            self.observe()

    # -- the observer --------------------------------------------------------------------------------------------------

    def observe(self) -> None:
        """What holds at every moment."""
        alive: set[str] = set()
        for pilot in self.pilots:
            assert pilot.job.state is JobState.RUNNING or not pilot.is_alive
            assert pilot.is_alive or not pilot.living
            for machine in pilot.living:
                assert machine.id not in alive, f"I6: {machine.id} lives twice"
                alive.add(machine.id)
                if machine.up is not None:
                    late = self.now - (machine.up + machine.seconds + SETTINGS.grace + KILL)
                    assert late <= 1, f"I5: {machine.id} runs {late} s too long"
                assert self.now <= pilot.ends + 1, f"I5: {machine.id} after its pilot's end"
                assert self.now <= pilot.job.began + pilot.job.walltime + SETTINGS.grace + 6, (
                    "I5: after its job's limit"
                )

    def asked(self) -> None:
        """What a client sees: I7, and I9 by the sums."""
        for owner in OWNERS:
            machines = self.desk.machines(owner)
            sums = self.store.read(lambda book, name=owner.name: book.sums(name))  # type: ignore[misc]
            assert sums.machines <= POLICY.machines and sums.reserved <= POLICY.reserved * 3600, f"I9: {sums}"
            for one in machines:
                word = EC2[one.instance.state][1]
                before = self.seen_by_client.get(one.instance.id, "pending")
                assert RANKS[word] >= RANKS[before], f"I7: {one.instance.id} went from {before} to {word}"
                self.seen_by_client[one.instance.id] = word

    def extend(self, owner: Owner, lease: Lease) -> None:
        """The batch system's limit first, then the lease, then its pilots. Raises BelljarError."""
        _, limit = self.desk.longer(owner, lease.id, 60)
        for job in self.jobs.values():
            if job.name == lease.job_name:
                job.walltime = max(job.walltime, limit)
        self.tell(self.desk.extend(owner, lease.id, 60))

    def reboot(self, owner: Owner, id: str) -> None:
        """Raises BelljarError."""
        self.tell(self.desk.reboot(owner, [id]))

    def tell(self, orders: list[tuple[str, Order]]) -> None:
        for slot, order in orders:
            for pilot in self.pilots:
                if pilot.is_known and pilot.slot == slot:
                    pilot.obey(order)

    def cause_of(self, machine: SimMachine) -> Cause:
        return {InstanceState.STAGING: Cause.STAGING, InstanceState.BOOTING: Cause.BOOT}.get(machine.state, Cause.GUEST)

    def answers(self) -> object:
        return [[(one.instance, one.lease) for one in self.desk.machines(owner)] for owner in OWNERS]

    def settle(self) -> None:
        """Nothing goes wrong any more, and everybody releases what they have. I1 to I4 must hold then."""
        self.is_silent = self.has_forgotten = self.refuses = self.loses_answers = False
        self.crash_in = None
        if not self.is_up:
            self.restart()
        for owner in OWNERS:
            for lease in self.desk.leases(owner):
                self.desk.release(owner, lease.id)
        for _ in range(40):
            for pilot in self.pilots:
                pilot.connect()
            self.passes(10)
            if all(not one.is_live for one in self.store.read(lambda book: book.find(Lease))):
                break
        self.passes(3 * SETTINGS.cycle)
        self.asked()
        self.check_the_end()

    def check_the_end(self) -> None:
        assert not [one for one in self.pilots if one.is_alive], "I1: a pilot is left"
        left = [one for one in self.jobs.values() if one.state is not JobState.ENDED]
        assert not left, f"I1: jobs are left: {left}"
        leases = self.store.read(lambda book: book.find(Lease))
        for lease in leases:
            assert lease.state in LEASE_ENDS and lease.cause is not None, f"I2: {lease}"
        machines = self.store.read(lambda book: book.find(Instance))
        assert all(one.state is InstanceState.TERMINATED and one.cause is not None for one in machines), "I2"
        self.check_the_events()
        self.check_the_charge(machines)

    def check_the_events(self) -> None:
        """I3: a chain without gaps for each thing, by the tables; reports of a slot in their order."""
        last: dict[str, str] = {}
        seqs: dict[str, int] = {}
        moves = {
            "r": {a.value: {b.value for b in after} for a, after in LEASE_MOVES.items()},
            "i": {a.value: {b.value for b in after} for a, after in INSTANCE_MOVES.items()},
            "s": {a.value: {b.value for b in after} for a, after in SLOT_MOVES.items()},
        }
        for _, event in self.store.read(lambda book: book.events(limit=1 << 30)):
            kind = "i" if event.of.startswith("i-") else "s" if "." in event.of else "r"
            assert event.before == last.get(event.of, ""), f"I3: {event}"
            assert not event.before or event.after in moves[kind][event.before], f"I3: {event}"
            last[event.of] = event.after
            if event.seq:
                assert event.seq >= seqs.get(event.slot, 0), f"I3: {event} after {seqs[event.slot]}"
                seqs[event.slot] = event.seq

    def check_the_charge(self, machines: list[Instance]) -> None:
        """I4: what is charged is what ran by the pilot's journal; less where the pilot died with what it had to say, never more."""
        ran = {id: span for pilot in self.pilots for id, span in pilot.ran.items()}
        told = {
            one.instance
            for pilot in self.pilots
            for one in pilot.said[: pilot.acked]
            if one.tell is Tell.INSTANCE and one.state is InstanceState.TERMINATED
        }
        for one in machines:
            began, ended = ran.get(one.id, (0.0, 0.0))
            assert 0 <= one.charged <= ceil(ended - began) + 1, f"I4: {one.id}: {one.charged} of {ended - began}"
            if one.id in told and one.cause is not Cause.NODE_LOST:
                assert abs(one.charged - (ended - began)) <= 1, f"I4: {one.id}: {one.charged} of {ended - began}"
