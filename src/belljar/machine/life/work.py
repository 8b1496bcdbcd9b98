"""What runs inside a machine: a payload that belljar starts, or a guest's own work (own_work.py)."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

from belljar import errors
from belljar.guest import BytesSink, ExitStatus, Guest, Process, Streams
from belljar.hints import TYPE_CHECKING, NoReturn
from belljar.host.files import private
from belljar.host.locks import Lock
from belljar.hypervisor import Domain, DomainSpec, EventKind
from belljar.machine import COLLECTED, JOBOUTPUTS
from belljar.machine.cleaning.put_away import MESSAGE, message
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras.features import features, values, with_features
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.output import CappedSink, Console
from belljar.machine.orders import Ended, first
from belljar.machine.services import Services
from belljar.machine.states import CLASSES
from belljar.model import Cause, Payload, PlainFile, RunPayload, StdinKind

if TYPE_CHECKING:
    from belljar.machine.planning.boot_plan import Plan

LONGEST_COLLECTING = 30.0  # seconds for all of it
FAILED = 400  # and all above it: banned, no environment, a fault of the grid's, a transient one


class Running:
    """What of a machine is there just now. The keeper fills this in; the others look here."""

    def __init__(self) -> None:
        self.extras: list[Extra] = []
        self.equipment = Equipment()
        self.is_up = asyncio.Event()  # its work has begun, or is about to
        self.forking = asyncio.Lock()  # one fork at a time
        self.forks = 0  # how many there were
        self.plan: Plan | None = None  # how it was started
        self.checkpoints: dict[Path, Lock] = {}  # folders that are its own, to its end
        self.clear()

    async def furnish(self, guest: Guest, payload: Payload) -> None:
        """All that it has beside its own disk is where the payload looks for it."""
        names = [disk.name for disk in self.equipment.disks if not disk.is_late]
        devices = dict(zip(names, await guest.find_disks(names), strict=True)) if names else {}
        for extra in self.extras:
            await extra.furnish(guest, payload, devices)

    def clear(self) -> None:
        """Nothing runs any more."""
        self.is_up.clear()
        self.domain: Domain | None = None
        self.spec: DomainSpec | None = None  # the domain's, with the disc that is in its drive
        self.guest: Guest | None = None
        self.process: Process | None = None
        self.console: Console | None = None


class Workload:
    """One machine's work on its way."""

    what: str  # in words
    ended_by: frozenset[int]  # signals after which it gets its grace, once it has begun
    may_power_off = True  # that the guest did so ends it well

    def __init__(self, life: Lifecycle, running: Running) -> None:
        self._life, self._running = life, running

    async def carry_out(self, streams: Streams) -> None:
        """From its begin to the outcome; raises what ended it otherwise."""
        raise NotImplementedError

    async def ask_to_end(self) -> None:
        """It may take its time, which others limit. Nobody hears this in a guest that is lost."""
        raise NotImplementedError

    def explain_off(self, kind: EventKind, last_line: str) -> errors.BelljarError:
        """What it amounts to that the guest powered itself off, or rebooted."""
        raise NotImplementedError

    async def await_ready(self, timeout: float) -> None:
        """Wait until the guest is ready for its work: it is when it has proved who it is. Raises BootTimeout."""

    async def tell_deadline(self) -> None:
        """Its deadline was moved: change the features in the guest. Raises GuestError."""

    async def end_in_time(self) -> NoReturn:
        """At its deadline it is asked to end; raises Ended where it has not after its grace."""
        life = self._life
        await life.deadline.passed.wait()
        why, grace = life.deadline.why, life.request.grace
        life.expect(Cause.WALLTIME, why)
        await self.ask_to_end()
        await asyncio.sleep(grace)
        raise Ended(Cause.WALLTIME, signal.SIGKILL, f"{why}; {self.what} did not end within {grace:g} s")

    async def signal(self, number: int, *, alone: bool = False) -> None:
        """Deliver a signal, at the begin if it comes before; a guest that is lost hears nothing."""

    async def kill(self) -> bool:
        """Kill what is left of it, after its grace; False where only the machine's end does that."""
        return False


class PayloadWorkload(Workload):
    """A payload in the guest's agent's hands."""

    what = "the payload"
    ended_by = frozenset({int(signal.SIGTERM)})

    def __init__(self, work: RunPayload, life: Lifecycle, running: Running, services: Services) -> None:
        super().__init__(life, running)
        self._payload, self._services = work.payload, services
        self._early: list[tuple[int, bool]] = []  # signals that came before the payload did
        self.may_power_off = False

    async def carry_out(self, streams: Streams) -> None:
        """Everything that happens inside: folders, account, files in, the payload itself, files out."""
        life, guest = self._life, self._running.guest
        assert guest is not None
        life.begin_time()
        payload = with_features(self._payload, self._features(), self._running.equipment.outputs_url)
        with life.phase("setup"), self._services.showing("Copying files into the machine"):
            await self._running.furnish(guest, payload)
        with life.phase("run"):
            status = await self._run(guest, payload, streams)
        life.conclude(status)
        life.record.tell("payload-ended", exit_code=status.exit_code, signal=status.signal)
        with life.phase("fetch"), self._services.showing("Copying files out of the machine"):
            try:
                await self._fetch(guest, payload)
            except (errors.UsageError, errors.GuestRefused, errors.HostError) as error:
                life.fail(error)
        life.point("status-written")
        life.settle()
        if life.request.collect:
            with life.phase("collect"):
                await collect(guest, life)

    async def _run(self, guest: Guest, payload: Payload, streams: Streams) -> ExitStatus:
        life = self._life
        life.point("payload-sent")
        life.record.write("payload", argv=[word[:200] for word in payload.argv[:20]])
        life.begin_work()
        self._running.process = await self._begin(guest, payload, streams)
        life.point("payload-started")
        early, self._early = self._early, []
        for number, alone in early:
            await self.signal(number, alone=alone)
        status = await first(self._running.process.wait(), self.end_in_time())
        life.point("payload-ended")
        return status

    async def _begin(self, guest: Guest, payload: Payload, streams: Streams) -> Process:
        checkpoint = self._life.checkpoint
        if checkpoint is None:
            return await guest.start(payload, streams)
        # What nobody takes must not stop it.
        stdout = (streams.stdout or BytesSink(0)) if payload.stdout is StdinKind.STREAM else None
        stderr = (streams.stderr or BytesSink(0)) if payload.stderr is StdinKind.STREAM else None
        stdin = streams.stdin if payload.stdin is StdinKind.STREAM else None
        process = await guest.take_up(checkpoint.standstill, Streams(stdin, stdout, stderr))
        await guest.place(self._features(), payload.account)
        return process

    async def _fetch(self, guest: Guest, payload: Payload) -> None:
        """Copy every output that can be read, then complain about the first that cannot."""
        trouble: errors.BelljarError | None = None
        for item in payload.outputs:
            try:
                await guest.get(item, payload.account, payload.cwd)
            except (errors.UsageError, errors.GuestRefused, errors.HostError) as error:
                trouble = trouble or error
        if self._life.request.machine.shares or self._life.request.keep:
            await guest.end_payload()
        has_failed = self._life.outcome.exit_code != 0
        if trouble is not None and not (has_failed and isinstance(trouble, errors.OutputMissing)):
            raise trouble  # what a failing payload did not write is its own affair

    async def tell_deadline(self) -> None:
        if self._running.guest is not None and self._running.process is not None:
            await self._running.guest.place(self._features(), self._payload.account)

    def _features(self) -> tuple[PlainFile, ...]:
        life, hs06 = self._life, self._services.rules.hs06_per_cpu
        return features(*values(life.request, life.time_began, hs06, life.deadline.moved_to))

    async def ask_to_end(self) -> None:
        await self.signal(signal.SIGTERM)

    async def signal(self, number: int, *, alone: bool = False) -> None:
        if self._running.process is None:
            self._early.append((number, alone))
            return
        with suppress(errors.GuestError):  # that it is lost is told by others
            await self._running.process.signal(number, alone=alone)

    async def kill(self) -> bool:
        if self._payload.lingers:
            await self.signal(signal.SIGKILL)
        return self._payload.lingers

    def explain_off(self, kind: EventKind, last_line: str) -> errors.BelljarError:
        if self._life.is_begun:
            is_off = kind is EventKind.SHUTDOWN
            # A script that is its machine's user data may end so, as a guest at its own work does.
            self.may_power_off = is_off and self._life.request.work.user_data is not None
            what = "powered the guest off" if is_off else "rebooted the guest"
            return errors.GuestPoweredOff(f"the payload {what}")
        return off_too_soon(kind, last_line)


async def collect(guest: Guest, life: Lifecycle) -> None:
    """Keep the folders of the guest that `request.collect` names with the machine's records: as one tar archive, which belljar
    never unpacks. The job's files are delivered by now, so an error is journaled and is not the job's. Raises nothing."""
    trouble, size, is_cut = "", 0, False
    try:
        with open(life.folder / COLLECTED, "xb", opener=private) as file:  # noqa: ASYNC230
            archive = CappedSink(file.write, life.request.collect_limit)
            try:
                async with asyncio.timeout(LONGEST_COLLECTING):
                    await guest.collect(life.request.collect, archive)
            finally:
                size, is_cut = archive.size, archive.is_cut
    except TimeoutError:
        trouble = f"not finished after {LONGEST_COLLECTING:g} s"
    except errors.BelljarError as error:
        trouble = error.message
    except OSError as error:
        trouble = errors.in_words(error)
    life.record.tell("collected", bytes=size, cut_off=is_cut, trouble=trouble)


def conclude(life: Lifecycle) -> None:
    """The machine powered itself off: its own message is the outcome. Codes from 400 on are exit code 1, others 0."""
    code, text = message(life.folder / JOBOUTPUTS / MESSAGE)
    reason = f"the guest powered itself off{f': {text}' if text else ' and said nothing about it'}"
    cause = life.outcome.cause if life.outcome.cause in (Cause.CANCELLED, Cause.WALLTIME) else Cause.FINISHED
    if cause is not Cause.FINISHED:
        reason = f"{life.outcome.reason}; {reason}"
    life.note(cause=cause, klass=CLASSES[cause], exit_code=int(code >= FAILED), reason=reason, hint="", error="")
    life.record.tell("shutdown-message", code=code, text=text)


def off_too_soon(kind: EventKind, last_line: str, when: str = "before a payload was started") -> errors.BootFailed:
    """A guest that ended while it was booted for something."""
    what = "powered itself off" if kind is EventKind.SHUTDOWN else "rebooted"
    before = f": {last_line}" if last_line else ""
    return errors.BootFailed(f"the guest {what} {when}{before}")
