"""A pilot, its machines and its job, in virtual time: what `lease/pilot/pilot.py` does, without sockets and processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from belljar.lease import Cause, Do, Facts, InstanceState, Order, Report, Settings, Tell
from belljar.lease.decisions.margins import KILL
from belljar.pool import JobState

SETTINGS = Settings(
    staging=30, barrier=20, grace=6, margin=30, silence=15, lost=120, unseen=10, queue_time=300, cycle=5, tries=2,
    longest_time=600, shown=600, preemptible_queue="spare",
)  # fmt: skip


class Site(Protocol):
    """What is around a pilot."""

    now: float
    is_up: bool
    knows_late: bool

    def deliver(self, pilot: SimPilot, report: Report) -> None: ...


@dataclass
class SimJob:
    name: str
    id: str
    nodes: int
    walltime: float
    state: JobState = JobState.WAITING
    began: float = 0.0
    killed_at: float = 0.0  # when what was told to end is killed


@dataclass
class SimMachine:
    id: str
    state: InstanceState
    seconds: float
    up: float | None = None
    stop_by: float | None = None  # told to stop: by then it is gone
    cause: Cause | None = None


@dataclass
class SimPilot:
    """One process on one node."""

    world: Site
    job: SimJob
    rank: int
    name: str
    began: float
    ends: float
    host: Facts
    is_alive: bool = True
    holds: bool = False  # it was told to go
    connected: bool = False
    is_known: bool = False  # orders reach it: a moment after its hello was written down
    answered: float = 0.0
    machines: dict[str, SimMachine] = field(default_factory=dict)
    said: list[Report] = field(default_factory=list)  # its journal
    acked: int = 0
    ending: Cause | None = None
    down_since: float = 0.0
    ran: dict[str, tuple[float, float]] = field(default_factory=dict)  # by its own clock: from, until

    @property
    def slot(self) -> str:
        lease, _, attempt = self.job.name.removeprefix("belljar-").rpartition("-")
        return f"{lease}.{attempt}.{self.rank}"

    def report(self, tell: Tell, seq: int, **facts: object) -> Report:
        lease, attempt, rank = self.slot.rsplit(".", 2)
        mono = self.world.now - self.began
        return Report(tell, lease, int(attempt), int(rank), self.name, seq, self.world.now, mono, **facts)  # type: ignore[arg-type]

    def say(self, tell: Tell, **facts: object) -> None:
        self.said.append(self.report(tell, len(self.said) + 1, **facts))
        self.flush()

    def flush(self) -> None:
        while self.connected and self.acked < len(self.said):
            before = self.acked
            self.world.deliver(self, self.said[self.acked])
            if self.acked == before:
                return

    def connect(self) -> None:
        if self.is_alive and not self.connected and self.world.is_up:
            self.connected, self.is_known = True, not self.world.knows_late
            self.world.deliver(self, self.report(Tell.HELLO, 0, facts=self.host))
            self.flush()

    def cut(self) -> None:
        if self.connected:
            self.connected, self.is_known, self.down_since = False, False, self.world.now

    def obey(self, order: Order) -> None:
        if not self.is_alive:
            return
        if not self.holds:
            self._at_gate(order)
        elif order.do in (Do.RELEASE, Do.VOID):
            self.end(Cause.USER, SETTINGS.grace)
        elif order.do is Do.GO:
            self.ends = self.world.now + order.seconds
        elif order.do is Do.START and order.instance not in self.machines and self.ending is None:
            self.machines[order.instance] = SimMachine(order.instance, InstanceState.STAGING, order.seconds)
            self.say(Tell.INSTANCE, instance=order.instance, state=InstanceState.STAGING)
        elif order.do is Do.STOP and order.instance not in self.machines:
            self.machines[order.instance] = SimMachine(order.instance, InstanceState.TERMINATED, 0)
            self.say(Tell.INSTANCE, instance=order.instance, state=InstanceState.TERMINATED, cause=Cause.USER)
        elif order.do is Do.STOP:
            self.stop(self.machines[order.instance], Cause.USER, SETTINGS.grace)
        elif order.do is Do.EXTEND and order.instance in self.machines:
            self.machines[order.instance].seconds = order.seconds

    def _at_gate(self, order: Order) -> None:
        if order.do is Do.GO:
            self.holds, self.ends = True, self.world.now + order.seconds
        elif order.do is Do.WAIT:
            self.answered = self.answered or self.world.now
        elif order.do is Do.VOID:
            self.exit()
        elif order.do is Do.RELEASE:
            self.say(Tell.ENDED, cause=Cause.USER)
            self.exit()

    def stop(self, machine: SimMachine, cause: Cause, grace: float) -> None:
        if machine.state is not InstanceState.TERMINATED and machine.stop_by is None:
            machine.stop_by, machine.cause = self.world.now + grace, cause
            machine.state = InstanceState.STOPPING
            self.say(Tell.INSTANCE, instance=machine.id, state=InstanceState.STOPPING)

    def gone(self, machine: SimMachine, cause: Cause) -> None:
        if machine.state is InstanceState.TERMINATED:
            return
        machine.state = InstanceState.TERMINATED
        if machine.up is not None:
            self.ran[machine.id] = (machine.up - self.began, self.world.now - self.began)
        self.say(Tell.INSTANCE, instance=machine.id, state=InstanceState.TERMINATED, cause=machine.cause or cause)

    def progress(self, machine: SimMachine) -> None:
        if machine.state is InstanceState.STAGING:
            machine.state = InstanceState.BOOTING
        elif machine.state is InstanceState.BOOTING:
            machine.state, machine.up = InstanceState.RUNNING, self.world.now
        else:
            return
        self.say(Tell.INSTANCE, instance=machine.id, state=machine.state)

    @property
    def living(self) -> list[SimMachine]:
        return [one for one in self.machines.values() if one.state is not InstanceState.TERMINATED]

    def end(self, cause: Cause, grace: float) -> None:
        if self.is_alive and self.ending is None:
            self.ending = cause
            for machine in self.living:
                self.stop(machine, cause, grace)
            self.tick()

    def tick(self) -> None:
        """What its own clock says."""
        now = self.world.now
        if not self.is_alive:
            return
        if not self.holds:
            limit = self.answered + SETTINGS.barrier + 40 if self.answered else self.began + 60
            if now >= limit:
                self.say(Tell.ENDED, cause=Cause.CAPACITY)
                self.exit()
            return
        for machine in self.living:
            if machine.up is not None and now >= machine.up + machine.seconds:
                self.stop(machine, Cause.EXPIRED, SETTINGS.grace)
            if machine.stop_by is not None and now >= machine.stop_by:
                self.gone(machine, Cause.USER)
        if now >= self.ends - SETTINGS.grace - KILL:
            self.end(Cause.EXPIRED, SETTINGS.grace)
        if not self.living and not self.connected and now >= self.down_since + 60:
            self.end(Cause.GUEST, 0)
        if self.ending is not None and not self.living:
            self.say(Tell.ENDED, cause=self.ending)
            self.exit()

    def exit(self) -> None:
        """Killed, or by itself: none of its machines survives it."""
        for machine in self.living:
            if machine.up is not None:
                self.ran[machine.id] = (machine.up - self.began, self.world.now - self.began)
            machine.state = InstanceState.TERMINATED
        self.is_alive, self.connected, self.is_known = False, False, False
