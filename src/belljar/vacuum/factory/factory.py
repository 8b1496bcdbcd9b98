"""A factory: decides, again and again, which machines to start, and looks after those it has. One process on each host.

It owns no machine. Machines live on when it is stopped, upgraded or killed, and it finds them again by their labels. Before a machine
is asked for, its id is written down, so one that was just being claimed when the factory was killed is counted until it shows."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, NoSuchMachine
from belljar.host.threads import in_thread
from belljar.records import dataclass, replace
from belljar.service import kept
from belljar.service.telling import Tell, Troubles
from belljar.vacuum import FactoryStatus, MachineStatus, MachineType, Mode, Space, TypeStatus, code_of, is_abort
from belljar.vacuum.decisions.backoff import Failing, after_failure, view_of
from belljar.vacuum.decisions.decide import Decision, Host, Reason, decide
from belljar.vacuum.decisions.packing import Machine
from belljar.vacuum.factory.keeper import JOBOUTPUTS, Living, Machines, request_for
from belljar.vacuum.factory.present import ended_status, own_status, slot_name, snapshot
from belljar.vacuum.factory.state import MEMORY, STATUS, Decisions, Finished, Memory, Status
from belljar.vacuum.protocol.query import Snapshot

SHOWS_WITHIN = 120.0  # seconds in which a machine that was asked for is claimed, or never will be
CLAIMED_WITHIN = 10.0  # seconds a cycle waits for what it starts; an image that is fetched goes on beside it
HOSTS_FAULTS = ("host-oom", "node-fault", "image-fault", "refused")  # they concern this host alone
ASKED_TO_END = ("cancelled", "walltime")  # by an operator, a drain, its deadline: no fault of its type
LOOK_AT_ONCE = 0.5  # seconds after the first event in which others join its decision; nothing is looked at meanwhile
Ask = Callable[[], Awaitable[tuple[tuple[TypeStatus, ...], tuple[str, ...]]]]
MakeData = Callable[[MachineType, Living, float], bytes]


class Factory:
    """`ask` tells what the other factories run, and which were silent; `make_data` makes a machine's user data, in a thread."""

    def __init__(
        self, space: Space, folder: Path, keeper: Machines, ask: Ask, make_data: MakeData, tell: Tell, *,
        clock: Callable[[], float] = time.time, luck: Callable[[], float] = random.random,
        load: Callable[[], tuple[float, float, float]] = os.getloadavg, steady: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.space, self.folder, self._keeper = space, folder, keeper
        self._ask, self._make_data, self._tell = ask, make_data, tell
        self._clock, self._luck, self._load, self._steady = clock, luck, load, steady
        self.memory: Memory = kept.read(folder / MEMORY, Memory) or Memory()
        self.living: list[Living] = []
        self.slots: dict[int, tuple[str, Finished]] = {}
        self.started, self.ended = Counter[str](), Counter[tuple[str, str]]()
        self.decision: Decision | None = None
        self.status = Status(space.name, space.factory, os.getpid(), clock(), space.cycle, clock())
        self._decisions, self._wake = Decisions(folder), asyncio.Event()
        self._reports: asyncio.Queue[MachineStatus | None] = asyncio.Queue()
        self._moved: dict[str, float] = {}  # machines whose deadline was set, and to when
        self._reasons: dict[str, str] = {}  # why machines were ended by us, as their message would say it
        self.troubles = Troubles(tell)
        self._group: asyncio.TaskGroup | None = None
        self._starting: set[str] = set()  # machines that are being asked for just now
        self._watched: set[str] = set()  # machines whose end is waited for
        self._failing: dict[str, Failing] = {}  # by type
        self._beats: dict[str, Beat] = {}  # of machines that have to give a sign of life
        self._room = float(space.processors)  # that the next decision gives away

    # -- what goes on --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled. Machines live on."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            group.create_task(self._follow())
            group.create_task(self._cycles())

    def use(self, space: Space, error: str | None = None) -> None:
        """Obey these settings from now on; *error*: why the files are not obeyed as they are, "" where they are."""
        self.space = space
        error = self.status.settings_error if error is None else error
        self.status = replace(self.status, settings_error=error, cycle=space.cycle)
        self.wake()

    async def reports(self) -> AsyncIterator[MachineStatus | None]:
        """What is to be told: a machine that ended, with its message; None: a cycle is over. One listener."""
        while True:
            yield await self._reports.get()

    def wake(self) -> None:
        """Decide now."""
        self._wake.set()

    async def _cycles(self) -> None:
        while True:
            try:
                again = await self.cycle()
                self.troubles.note("cycle")
            except (BelljarError, OSError) as exc:
                self.troubles.note("cycle", exc)
                again = self._clock() + self.space.cycle
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(again - self._clock(), 0.1), self.space.cycle)):
                    await self._wake.wait()
                    await asyncio.sleep(LOOK_AT_ONCE)
            self._wake.clear()

    async def cycle(self) -> float:
        """One decision, carried out. Returns when the next one makes sense, if nothing happens before."""
        began = self._clock()
        self.living = await in_thread(self._keeper.living)
        await self._enforce(began)
        others, silent = await self._ask()
        now = self._clock()
        status = FactoryStatus(self.space.factory)
        own = snapshot(self.space, self.all_living(), self.memory.finished, {}, now, status, self._room).types
        view = view_of([*own, *(status for status in others if status.factory != self.space.factory)], self.space)
        host = await self._host()
        self.decision = decide(now, self.space, self.all_living(), view, self.memory.past, host, self._luck)
        self.memory = replace(self.memory, past=dict(self.decision.past))
        given = sum(machine.processors for machine in (*self.all_living(), *self.decision.starts))
        self._room = (
            self.space.processors - given
            if any(verdict.reason is Reason.STARTING for verdict in self.decision.verdicts)
            else 0
        )
        entry = {"verdicts": self.decision.verdicts, "starts": self.decision.starts, "silent": silent}
        self._decisions.tell(now, entry)
        await self._start_all(self.decision.starts, now)
        for machine in self.living:
            if machine.id not in self._watched:
                self._watched.add(machine.id)
                self._begin(self._see_end(machine.id))
        self._write_status(began, silent)
        self._reports.put_nowait(None)
        return self.decision.again

    def all_living(self) -> list[Living]:
        """With those that were asked for and do not show yet."""
        shown = {machine.id for machine in self.living}
        return [*self.living, *(machine for machine in self.memory.pending if machine.id not in shown)]

    async def _host(self) -> Host:
        loads = self._load()
        memory = await in_thread(self._keeper.free_memory)
        waiting = sum(machine.memory for machine in self.memory.pending)
        load = loads[0] if self.space.mode is Mode.IMPROVED else max(loads)
        starts = self.space.starting - sum(machine.began is None for machine in self.all_living())
        for name in self._failing.keys() - {kind.name for kind in self.space.types if kind.share > 0}:
            del self._failing[name]  # nobody wants it any more
            self.troubles.note(name)
        for machine in self.living:
            failure = self._failing.get(machine.machinetype)
            if failure and machine.began is not None and machine.created >= failure.until:
                del self._failing[machine.machinetype]  # it works again
        failing = {name: (failure.until, failure.why) for name, failure in self._failing.items()}
        return Host(os.cpu_count() or 1, load, max(memory - waiting, 0), starts=starts, failing=failing)

    # -- starting ------------------------------------------------------------------------------------------------------

    async def _start_all(self, places: tuple[Machine, ...], now: float) -> None:
        """Side by side. What is about to be started is on disk before any is."""
        kinds, power = {kind.name: kind for kind in self.space.types}, self.space.hs06_per_processor
        taken = {machine.slot for machine in self.all_living()}
        free = (slot for slot in range(10_000) if slot not in taken)
        orders = [
            Living(**vars(place), id=os.urandom(6).hex(), slot=next(free), created=now, hs06=place.processors * power)
            for place in places
        ]
        if not orders:
            return
        self._remember(pending=(*self.memory.pending, *orders), durable=True)
        self._starting |= {machine.id for machine in orders}
        starts = [self._begin(self._start(kinds[machine.machinetype], machine)) for machine in orders]
        await asyncio.wait(starts, timeout=CLAIMED_WITHIN)

    async def _start(self, kind: MachineType, order: Living) -> None:
        try:
            data = await in_thread(lambda: self._make_data(kind, order, self._clock()))
            await self._keeper.start(request_for(self.space, kind, order, data, self._clock()))
        except (BelljarError, OSError) as exc:
            self._remember(pending=self._pending_without(order.id))
            self.troubles.note(kind.name, exc)
            self._fail(kind.name, self._clock(), self.troubles.now[kind.name])
        else:
            self.started[kind.name] += 1
            self.troubles.note(kind.name)
            slot = slot_name(self.space, order.slot)
            self._tell("machine started", machine=order.id, machinetype=kind.name, slot=slot)
        finally:
            self._starting.discard(order.id)

    def _fail(self, name: str, now: float, why: str) -> None:
        """No machine of this type is started here for a while."""
        for kind in (kind for kind in self.space.types if kind.name == name):
            self._failing[name] = after_failure(self._failing.get(name), kind, self.space, now, why)

    def _pending_without(self, id: str) -> tuple[Living, ...]:
        return tuple(machine for machine in self.memory.pending if machine.id != id)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Something that goes on beside the cycles, and ends with the factory."""
        return asyncio.create_task(work) if self._group is None else self._group.create_task(work)

    # -- looking after machines ----------------------------------------------------------------------------------------

    async def _enforce(self, now: float) -> None:
        """Deadlines are what was promised, or the factory's end where that comes first; who shows no sign of life is ended."""
        kinds = {kind.name: kind for kind in self.space.types}
        shown = {machine.id for machine in self.living}
        done = shown | self._moved.keys()
        pending = tuple(
            machine for machine in self.memory.pending
            if machine.id in self._starting or (machine.id not in done and abs(now - machine.created) < SHOWS_WITHIN)
        )  # fmt: skip
        if pending != self.memory.pending:
            self._remember(pending=pending)
        self._moved = {id: at for id, at in self._moved.items() if id in shown}
        self._beats = {id: beat for id, beat in self._beats.items() if id in shown}
        orders = list[tuple[str, Callable[[], None]]]()
        for machine in self.living:
            deadline = min(machine.ends, self.space.shutdown_time or machine.ends)
            if machine.began is not None and self._moved.get(machine.id) != deadline:
                self._moved[machine.id] = deadline
                orders.append((machine.id, functools.partial(self._keeper.move, machine.id, deadline)))
            reason = self._silent(machine, kinds.get(machine.machinetype))
            if reason and machine.id not in self._reasons:
                self._reasons[machine.id] = reason
                self._tell("no sign of life", machine=machine.id, machinetype=machine.machinetype, why=reason)
                orders.append((machine.id, functools.partial(self._keeper.stop, machine.id)))
        # One that is just ending refuses; one that hangs keeps the others from nothing, and is asked again.
        answers = await asyncio.gather(*(in_thread(order) for _, order in orders), return_exceptions=True)
        for id in (id for (id, _), answer in zip(orders, answers, strict=True) if answer is not None):
            self._moved.pop(id, None)
            self._reasons.pop(id, None)

    def _silent(self, machine: Living, kind: MachineType | None) -> str:
        """The message for a machine whose heartbeat stands still; "": it lives, or nobody asks. By what we saw, and by a clock that
        nobody sets."""
        if kind is None or not kind.heartbeat_file or machine.began is None:
            return ""
        now, at = self._steady(), None
        with suppress(OSError):
            at = Path(machine.folder, JOBOUTPUTS, kind.heartbeat_file).stat().st_mtime
        beat = self._beats.get(machine.id, Beat(now, at, now))
        self._beats[machine.id] = beat = beat if at == beat.at else Beat(beat.first, at, now)
        if now - beat.first <= max(kind.fizzle, kind.heartbeat):
            return ""
        if at is None:
            return "700 Heartbeat file not created"
        return "700 Heartbeat file not updated" if kind.heartbeat and now - beat.seen > kind.heartbeat else ""

    async def _see_end(self, id: str) -> None:
        """What a keeper that was killed left of its machine is finished, so its end is told and its place is free."""
        try:
            with suppress(NoSuchMachine):
                await self._keeper.ended(id)
        except (BelljarError, OSError) as exc:
            self.troubles.note(f"machine {id}", exc)
        finally:
            self._watched.discard(id)

    # -- what ended ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Each end, also those of the time when no factory ran. An end makes room: a decision follows."""
        async for event in self._keeper.events(self.memory.position):
            if event["event"] == "ended":
                self._note(event)
            elif event.get("state") == "running":
                self.wake()  # its deadline is set now

    def _note(self, event: dict[str, Any]) -> None:
        labels = {str(key): str(value) for key, value in event.get("labels", ())}
        if labels.get("space") != self.space.name or labels.get("factory") != self.space.factory:
            self._remember(position=event["position"])
            return
        name, id = labels.get("machinetype", ""), event["machine"]
        self._room += next((machine.processors for machine in self.living if machine.id == id), 0)
        finished = finish(self.memory.finished.get(name), event, labels, self._reasons.pop(id, ""), self.space)
        self.troubles.note(f"machine {id}")
        if event.get("cause") in HOSTS_FAULTS:
            self._fail(name, finished.at, str(event.get("reason") or event.get("cause")))
        slot = int(labels.get("slot") or 0)
        self.slots[slot] = (name, finished)
        all_finished, pending = {**self.memory.finished, name: finished}, self._pending_without(id)
        self._remember(position=event["position"], finished=all_finished, pending=pending)  # in one: it counts once
        code = code_of(finished.message)
        self.ended[name, f"{code // 100}00" if code else "none"] += 1
        self._reports.put_nowait(ended_status(self.space, id, finished, event, labels))
        self._tell("machine ended", machine=id, machinetype=name, message=finished.message, cause=event.get("cause"))
        self.wake()

    # -- what is written down ------------------------------------------------------------------------------------------

    def _remember(self, *, durable: bool = False, **changes: Any) -> None:
        before, self.memory = self.memory, replace(self.memory, **changes)
        try:
            kept.keep(self.folder / MEMORY, self.memory, durable=durable)
            self.troubles.note(MEMORY)
        except (OSError, BelljarError) as exc:
            self.troubles.note(MEMORY, exc)
            if durable:
                self.memory = before
                raise

    def _write_status(self, began: float, silent: tuple[str, ...]) -> None:
        now, living = self._clock(), self.all_living()
        processors, hs06 = sum(machine.processors for machine in living), sum(machine.hs06 for machine in living)
        reasons = {failure.why for failure in self._failing.values() if now < failure.until}
        self.status = replace(
            self.status, cycled=now, took=now - began, machines=len(living), processors=processors, hs06=hs06,
            most_processors=self.space.processors, draining=self.space.draining, silent=silent,
            error="; ".join(sorted(reasons)), troubles=dict(self.troubles.now),
        )  # fmt: skip
        with suppress(OSError, BelljarError):
            kept.keep(self.folder / STATUS, self.status)

    def snapshot(self) -> Snapshot:
        """What others are told now."""
        now, living = self._clock(), self.all_living()
        own = own_status(self.space, living, now, self.status.cycled, self.folder)
        return snapshot(self.space, living, self.memory.finished, self.slots, now, own, self._room)


@dataclass(frozen=True)
class Beat:
    """A machine's heartbeat, as it was seen: moments of a clock that nobody sets."""

    first: float  # when it was looked for first
    at: float | None  # the file's own time; None: there is none
    seen: float  # when that changed last


def finish(
    before: Finished | None, event: dict[str, Any], labels: dict[str, str], reason: str, space: Space
) -> Finished:
    """What is known of a type after this end. A machine that said nothing was aborted where its image did not boot, or it ended
    within its fizzle time; not where its host failed it."""
    before = before or Finished()
    ended, started = int(event.get("time") or 0), float(event.get("started") or 0)
    code, lived = event.get("shutdown_code"), ended - started
    fizzle = float(labels.get("fizzle") or 0)
    message = f"{code} {event.get('shutdown_message', '')}".strip() if code else reason
    if not message and event.get("cause") in (*HOSTS_FAULTS, "boot-failed"):
        message = f"{500 if event['cause'] == 'boot-failed' else 100} {event.get('reason') or event['cause']}"
    if not message and lived < fizzle and event.get("cause") not in ASKED_TO_END:
        message = f"300 Fizzled after {lived:.0f} seconds"
    found_work = 200 <= (code_of(message) or 0) < 300 or (lived >= fizzle and not is_abort(message))
    return Finished(
        slot_name(space, int(labels.get("slot") or 0)), ended, message,
        proved=max(before.proved, int(started)) if found_work else before.proved,
        aborted=max(before.aborted, ended) if is_abort(message) else before.aborted,
    )  # fmt: skip
