"""A space under a virtual clock: `decide` decides, as in the daemon, and what comes of it is counted.

What factories tell each other is summed up as it changes, so that a poll costs the same in a space of 5 and of 5000. A factory
decides by what was true when it asked; the answers take `ANSWER` seconds for each round of questions. In compatible mode it
behaves as Vac does: one decision a cycle while it has free processors, its last machine's message is all it remembers, and who
does not answer counts as nothing."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from math import inf

from bench.vacuum_policies.report import Report, Tally
from bench.vacuum_policies.scenario import Scenario

from belljar.records import replace
from belljar.vacuum import Mode, Space
from belljar.vacuum.decisions.backoff import Past, Total, View, after_failure
from belljar.vacuum.decisions.decide import Host, decide
from belljar.vacuum.decisions.packing import Machine

ANSWER, MOST_ROUNDS = 2.0, 6
REMEMBERED = 300.0  # improved mode: so long a silent factory counts as it was


class Guest:
    """A machine that runs."""

    __slots__ = ("ends", "factory", "found_work", "is_young", "machine", "message", "started", "type")

    def __init__(self, factory: Factory, machine: Machine, type_: int, started: float) -> None:
        self.factory, self.machine, self.type, self.started = factory, machine, type_, started
        self.ends, self.message, self.found_work, self.is_young = machine.ends, 200, False, True


class Factory:
    """A host that decides."""

    __slots__ = (
        "answers", "asks", "disk", "failing", "free", "guests", "last", "memory", "number", "past", "polls_at", "room", "seen", "space",
    )  # fmt: skip

    def __init__(self, number: int, space: Space, memory: float, disk: float) -> None:
        self.number, self.space, self.memory, self.disk = number, space, memory, disk
        self.free = self.room = space.processors
        self.guests: dict[Guest, None] = {}
        self.past: Past = {}
        self.failing: dict[str, tuple[float, str]] = {}
        self.answers = self.seen = True  # seen: it counts in what the others reckon with
        self.asks = False
        self.polls_at = inf
        self.last: dict[int, tuple[float, float]] = {}  # type: start of the machine that began last of those ended, its abort


class Simulation:
    """One run in one mode."""

    def __init__(self, scenario: Scenario, mode: Mode) -> None:
        self.scenario, self.mode, self.course = scenario, mode, scenario.course
        self.dice, self.lengths = random.Random(self.course.seed), random.Random(self.course.seed + 1)
        self.now, self.count = 0.0, 0
        self.events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        space, sizes = scenario.space(mode), [one for one in scenario.factories for _ in range(one.count)]
        self.factories = [
            Factory(n, replace(space, factory=f"f{n}", processors=one.processors), one.memory or inf, one.disk or inf)
            for n, one in enumerate(sizes)
        ]
        self.types = {kind.name: number for number, kind in enumerate(space.types)}
        types = range(len(self.types))
        self.hs06, self.young = [0.0 for _ in types], [0 for _ in types]
        self.aborts: list[list[tuple[float, int, float]]] = [[] for _ in types]
        self.last_abort, self.proved = [0.0 for _ in types], [0.0 for _ in types]
        self.fresh: list[deque[Guest]] = [deque() for _ in types]  # in the order of their starts
        self.room, self.answering = sum(one.room for one in self.factories), len(self.factories)
        self.totals: dict[str, Total] = {}
        self.is_stale = True
        self.tally = Tally(scenario, mode, sum(one.space.processors for one in self.factories))

    def run(self, progress: Callable[[float], None] = lambda _: None) -> Report:
        """All of it. *progress* is told the simulated seconds at every look."""
        for factory in self.factories:
            self.poll_at(factory, self.dice.uniform(0.0, self.course.cycle))
            if self.course.failures:
                self.after(self.dice.expovariate(self.course.failures / 86400.0), self.fail, factory)
            if self.course.kills:
                self.after(self.dice.expovariate(self.course.kills / 86400.0), self.kill, factory)
        self.after(self.course.sample, self.look, progress)
        while self.events and self.events[0][0] <= self.course.lasts:
            self.now, _, act, facts = heapq.heappop(self.events)
            act(*facts)
        self.tally.pass_to(self.course.lasts)
        return self.tally.report()

    def after(self, seconds: float, act: Callable[..., None], *facts: object) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now + seconds, self.count, act, facts))

    def look(self, progress: Callable[[float], None]) -> None:
        self.tally.look(self.now)
        progress(self.now)
        self.after(self.course.sample, self.look, progress)

    # -- a factory asks and decides --------------------------------------------------------------------------------------

    def poll_at(self, factory: Factory, moment: float) -> None:
        """Ask then, and not later; what was planned for later is dropped when its moment comes."""
        if moment < factory.polls_at:
            factory.polls_at = moment
            self.after(moment - self.now, self.poll, factory, moment)

    def poll(self, factory: Factory, moment: float) -> None:
        if factory.polls_at != moment or not factory.answers:
            return
        factory.polls_at = inf
        if factory.free and not factory.asks:
            factory.asks = True
            self.after(self.rounds() * ANSWER, self.act, factory, self.view(factory))

    def rounds(self) -> int:
        """Rounds of questions until all have answered; who is dead gets them all. They are counted."""
        dead, lost = len(self.factories) - self.answering, 1.0 - (1.0 - self.course.loss) ** 2
        rounds = 1
        if lost:
            rounds = max(1, math.ceil(math.log(2 * self.answering + 1) / -math.log(lost)))
        rounds = MOST_ROUNDS if dead else min(rounds, MOST_ROUNDS)
        asked = self.answering * (1 - lost**rounds) / (1 - lost) + dead * rounds
        self.tally.messages += asked + self.answering * len(self.types)
        return rounds

    def view(self, factory: Factory) -> View:
        """What this factory is told."""
        for number, fresh in enumerate(self.fresh):
            aged = self.now - self.scenario.experiments[number].kind.fizzle
            while fresh and fresh[0].started <= aged:
                self.grow_up(fresh.popleft())
        if self.is_stale:
            self.is_stale = False
            self.totals = {name: self.total(number) for name, number in self.types.items()}
        missed = self.missed()
        if missed and self.mode is Mode.COMPATIBLE:
            return View(self.without(missed))
        return View(self.totals, 0.0 if self.mode is Mode.COMPATIBLE else max(0, self.room - factory.room))

    def total(self, number: int) -> Total:
        if self.mode is Mode.IMPROVED:
            return Total(self.hs06[number], self.young[number], self.last_abort[number], self.proved[number])
        aborts = self.aborts[number]
        while aborts and not self.is_told(number, aborts[0]):
            heapq.heappop(aborts)
        return Total(self.hs06[number], self.young[number], -aborts[0][0] if aborts else 0.0)

    def is_told(self, type_: int, abort: tuple[float, int, float]) -> bool:
        """Is this abort what its factory says of the type?"""
        moment, number, started = abort
        factory = self.factories[number]
        return factory.seen and factory.last.get(type_) == (started, -moment)

    def missed(self) -> list[Factory]:
        """Those that never got through, drawn."""
        lost = 1.0 - (1.0 - self.course.loss) ** 2
        number, chance = 0, math.exp(-self.answering * lost**MOST_ROUNDS)
        drawn = self.dice.random() if lost else 0.0
        while drawn > chance and number < self.answering:  # of a Poisson distribution
            number, drawn = number + 1, drawn * self.dice.random()
        return self.dice.sample(self.factories, number)

    def without(self, missed: list[Factory]) -> dict[str, Total]:
        totals = dict(self.totals)
        for factory in [one for one in missed if one.seen]:
            for guest in factory.guests:
                name = guest.machine.machinetype
                total = totals[name]
                hs06, young = total.hs06 - guest.machine.processors, total.young - guest.is_young
                totals[name] = replace(total, hs06=hs06, young=young)
        return totals

    def act(self, factory: Factory, view: View) -> None:
        factory.asks = False
        if not factory.answers:
            return
        self.tally.decisions += 1
        host = Host(factory.space.processors, 0.0, factory.memory, factory.disk, failing=factory.failing)
        there = [guest.machine for guest in factory.guests]
        decision = decide(self.now, factory.space, there, view, factory.past, host, self.dice.random)
        factory.past = decision.past
        for machine in decision.starts:
            self.start(factory, machine)
        self.room, factory.room = self.room - factory.room, 0
        if self.mode is Mode.IMPROVED or factory.free:
            self.poll_at(factory, decision.again)

    # -- machines ----------------------------------------------------------------------------------------------------------

    def start(self, factory: Factory, machine: Machine) -> None:
        guest = Guest(factory, machine, self.types[machine.machinetype], self.now)
        self.live(guest)
        factory.guests[guest] = None
        self.take(factory, machine, 1)
        self.fresh[guest.type].append(guest)
        self.hs06[guest.type] += machine.processors
        self.young[guest.type] += 1
        self.is_stale = True
        self.tally.begin(self.now, guest.type, machine.processors, guest.ends, guest.found_work)
        self.after(guest.ends - self.now, self.end, guest)

    def live(self, guest: Guest) -> None:
        """All its life: jobs until there is no time for one more, or no work."""
        experiment, begun = self.scenario.experiments[guest.type], 0
        now, last = self.now + experiment.queue.boot, guest.machine.ends
        while now < last and (begun < experiment.queue.jobs or not experiment.queue.jobs):
            if not experiment.has_work(now):
                guest.ends, guest.message = min(last, now + experiment.queue.asks), 300
                return
            length = experiment.job(self.lengths)
            if begun and now + length > last:
                break
            guest.found_work, begun, now = True, begun + 1, min(last, now + length)
        guest.ends = min(last, now)

    def end(self, guest: Guest) -> None:
        factory = guest.factory
        if guest not in factory.guests:
            return  # it was lost with its factory
        self.forget(guest)
        self.tally.end(self.now, guest.type, guest.machine.processors)
        abort = self.now if guest.message >= 300 else 0.0
        if guest.started >= factory.last.get(guest.type, (0.0, 0.0))[0]:
            factory.last[guest.type] = (guest.started, abort)
            heapq.heappush(self.aborts[guest.type], (-abort, factory.number, guest.started))
        if factory.answers:
            self.last_abort[guest.type] = max(self.last_abort[guest.type], abort)
            if guest.found_work and not abort:
                self.proved[guest.type] = max(self.proved[guest.type], guest.started)
            factory.room += guest.machine.processors
            self.room += guest.machine.processors
        self.wake(factory)

    def kill(self, factory: Factory) -> None:
        """The host ends one of its machines, and starts no other of that type for a while."""
        if factory.answers and factory.guests:
            guest = self.dice.choice(list(factory.guests))
            kind, guest.message = self.scenario.experiments[guest.type].kind, 100
            guest.found_work &= self.now - guest.started >= kind.fizzle
            factory.failing[kind.name] = after_failure(None, kind, factory.space, self.now, "").until, "it was killed"
            self.end(guest)
        self.after(self.dice.expovariate(self.course.kills / 86400.0), self.kill, factory)

    def wake(self, factory: Factory) -> None:
        """Something ended: our own decide at once, those of the original in their next cycle."""
        if factory.asks:
            return  # it will see that when it decides
        if self.mode is Mode.IMPROVED:
            self.poll_at(factory, self.now)
        elif factory.polls_at == inf:
            phase = self.course.cycle * (factory.number / len(self.factories))
            self.poll_at(factory, self.now + self.course.cycle - (self.now - phase) % self.course.cycle)

    def forget(self, guest: Guest) -> None:
        del guest.factory.guests[guest]
        self.take(guest.factory, guest.machine, -1)
        if guest.factory.seen:
            self.hs06[guest.type] -= guest.machine.processors
            self.young[guest.type] -= guest.is_young
        guest.is_young, self.is_stale = False, True

    def grow_up(self, guest: Guest) -> None:
        if guest.is_young:
            guest.is_young, self.is_stale = False, True
            if guest.factory.seen:
                self.young[guest.type] -= 1
            if guest.found_work and guest.factory.answers:
                self.proved[guest.type] = max(self.proved[guest.type], guest.started)

    @staticmethod
    def take(factory: Factory, machine: Machine, sign: int) -> None:
        factory.free -= sign * machine.processors
        factory.memory -= sign * machine.memory
        factory.disk -= sign * machine.disk

    # -- factories that fail -----------------------------------------------------------------------------------------------

    def fail(self, factory: Factory) -> None:
        """It is gone with its machines, or silent. The others reckon with it a while longer in improved mode."""
        factory.answers = False
        self.answering -= 1
        self.room, factory.room = self.room - factory.room, 0
        if self.mode is Mode.COMPATIBLE:
            self.overlook(factory)
        else:
            self.after(REMEMBERED, self.overlook, factory)
        if self.course.machines_lost:
            self.tally.capacity(self.now, -factory.space.processors)
            for guest in list(factory.guests):
                self.forget(guest)
                self.tally.end(self.now, guest.type, guest.machine.processors)
        factory.polls_at = inf
        self.after(self.dice.expovariate(1.0 / self.course.failure_lasts), self.repair, factory)

    def overlook(self, factory: Factory) -> None:
        if not factory.answers:
            self.count_in(factory, -1)

    def count_in(self, factory: Factory, sign: int) -> None:
        if factory.seen is (sign > 0):
            return
        factory.seen, self.is_stale = sign > 0, True
        for guest in factory.guests:
            self.hs06[guest.type] += sign * guest.machine.processors
            self.young[guest.type] += sign * guest.is_young

    def repair(self, factory: Factory) -> None:
        if self.course.machines_lost:
            self.tally.capacity(self.now, factory.space.processors)
        factory.answers = True
        self.answering += 1
        self.count_in(factory, 1)
        for number, (started, abort) in factory.last.items():
            heapq.heappush(self.aborts[number], (-abort, factory.number, started))
        factory.room = factory.free
        self.room += factory.room
        self.poll_at(factory, self.now + self.dice.uniform(0.0, self.course.cycle))
        self.after(self.dice.expovariate(self.course.failures / 86400.0), self.fail, factory)
