"""Guests that know their own work: they end when they power themselves off. Whether they are ready is asked by a probe.

What came of it they may say in a joboutput, `shutdown_message`: three digits, a blank, free text (HSF-TN-2016-04).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from belljar.errors import (
    BelljarError,
    BootFailed,
    ContextImpossible,
    GuestError,
    GuestPoweredOff,
    HypervisorError,
    NoSpace,
)
from belljar.guest import Streams
from belljar.host.files import free_bytes, no_space_as_error
from belljar.host.guard.egress import Egress, rule
from belljar.hypervisor import EventKind, ExtraDisk, Nic
from belljar.machine import JOBOUTPUTS
from belljar.machine.cleaning.put_away import MESSAGE, OURS, deadline, message
from belljar.machine.life.life import Life
from belljar.machine.life.work import Furnish, Present, off_too_soon
from belljar.machine.orders import CANCELLING, Ended
from belljar.machine.states import CLASSES
from belljar.model import MIB, Account, Cause, Context, NetworkMode, OwnWork, Payload, Sign, State

EMPTY, SMALLEST_ROOM = "empty", 256 * MIB
FAILED = 400  # and all above it: banned, no environment, a fault of the grid's, a transient one
ROOT = Account("root", 0, 0, "root", home="/root")
EVERYWHERE = rule("0.0.0.0/0")
LOOK_AGAIN = 1.0  # seconds between two looks at a port or a file: nothing tells of either
GREETING = 2.0  # seconds in which a server that speaks first has spoken
ANYBODY = b"HEAD / HTTP/1.0\r\n\r\n"  # said to one that waits to be spoken to
AWAITED = {
    Sign.AGENT: "the guest's agent to answer{}",
    Sign.PORT: "TCP port {} of the guest to answer",
    Sign.FILE: "the file {} in the guest",
    Sign.LINE: "a line with {!r} on the guest's console",
}


class OwnRun:
    """A guest at its own work."""

    what = "the guest"
    ended_by = frozenset(int(number) for number in CANCELLING)
    cancelled = never_begun = "cancelled"

    def __init__(self, work: OwnWork, life: Life, now: Present, furnish: Furnish) -> None:
        self._work, self._life, self._now, self._furnish = work, life, now, furnish

    def is_begun(self) -> bool:
        return self._life.state is State.RUNNING

    async def await_ready(self, timeout: float) -> None:
        """Its shares and disks are in their places, and what shows that it is ready was seen."""
        probe, guest = self._work.ready, self._now.guest
        if guest is not None:
            await self._furnish(guest, Payload((), ROOT))
        if probe.sign in (Sign.NONE, Sign.AGENT):
            return
        async with deadline(timeout if probe.within is None else probe.within, AWAITED[probe.sign].format(probe.of)):
            match probe.sign:
                case Sign.PORT:
                    await self._until(self._answers)
                case Sign.FILE:
                    await self._until(self._has_file)
                case Sign.LINE:
                    assert self._now.console is not None
                    await self._now.console.seen.wait()
        self._life.record.tell("ready", sign=probe.sign.value, of=probe.of)

    async def carry_out(self, streams: Streams) -> None:
        """Until its time is over: then its power button is pressed, and after the grace it is the machine's end."""
        life = self._life
        life.begin_work()
        life.is_begun = True
        grace = life.request.grace
        with life.phase("run"):
            await life.deadline.passed()
            why = life.deadline.why
            life.expect(Cause.WALLTIME, why)
            await self.ask_to_end()
            await asyncio.sleep(grace)
        raise Ended(Cause.WALLTIME, signal.SIGKILL, f"{why}; the guest did not power itself off within {grace:g} s")

    async def tell_deadline(self) -> None:
        """Its metadata service tells it when it asks."""

    async def ask_to_end(self) -> None:
        """Press its power button. With belljar's own init nobody heeds that: what runs there is ended, and the machine."""
        if self._now.guest is not None and self._life.outcome.context == Context.RAMDISK.value:
            with suppress(GuestError):
                await self._now.guest.end_payload()
            raise Ended(self._life.outcome.cause, signal.SIGTERM, self._life.outcome.reason)
        if self._now.domain is not None:
            with suppress(HypervisorError):
                await self._now.domain.press_power()
                self._life.record.tell("power-button")

    async def signal(self, number: int, *, alone: bool = False) -> None:
        """Nobody takes one."""

    async def kill(self) -> bool:
        return False

    def explain_off(self, kind: EventKind, last_line: str) -> BelljarError:
        if self._now.guest is not None and not self._life.is_proved:
            return off_too_soon(kind, last_line)
        if kind is EventKind.RESET:  # so ends a firmware that finds nothing to boot, too
            before = f": {last_line}" if last_line else ""
            return BootFailed(f"the guest rebooted instead of powering itself off{before}")
        if last_line.startswith(OURS):  # belljar's own init gives up so, too
            return BootFailed(last_line)
        return GuestPoweredOff("the guest powered itself off")

    def conclude_off(self, error: GuestPoweredOff) -> None:
        conclude(self._life)

    # -- the probes --------------------------------------------------------------------------------------------------

    async def _until(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Look again and again, until the caller's deadline."""
        is_there = await look()
        while not is_there:
            await asyncio.sleep(LOOK_AGAIN)
            is_there = await look()

    async def _answers(self) -> bool:
        """A server speaks first, as ssh's does, or it answers who speaks HTTP. QEMU takes each connection before it knows
        whether the guest does, so one that is taken tells nothing."""
        assert self._now.domain is not None
        loop = asyncio.get_running_loop()
        try:
            with await self._now.domain.dial() as line:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GREETING):
                        return bool(await loop.sock_recv(line, 1))
                await loop.sock_sendall(line, ANYBODY)
                async with asyncio.timeout(GREETING):
                    return bool(await loop.sock_recv(line, 1))
        except (OSError, TimeoutError):
            return False

    async def _has_file(self) -> bool:
        assert self._now.guest is not None
        sink = Anything()
        await self._now.guest.collect((self._work.ready.of,), sink)
        return sink.came


class Anything:
    """A `Sink` that wants to know whether an archive has anything in it: an empty one is all zeros."""

    came = False

    async def write(self, data: bytes) -> None:
        if data.strip(b"\0"):
            self.came = True
            raise BrokenPipeError

    async def close(self) -> None:
        pass


def with_port(nic: Nic | None, work: OwnWork) -> Nic | None:
    """The card, by which the port is reached at which a guest shows that it is ready. Raises ContextImpossible."""
    if work.ready.sign is not Sign.PORT:
        return nic
    if nic is None or nic.mode is not NetworkMode.USER or nic.forward:
        raise ContextImpossible(
            f"--ready port:{work.ready.of}: only a port in a user network is reached from this host",
            hint="Give the machine `--network user` and another context than ssh, or wait for another sign.",
        )
    return replace(nic, forward=int(work.ready.of), egress=nic.egress or Egress(allow=(EVERYWHERE,)))


def conclude(life: Life) -> None:
    """The machine powered itself off: its own message is the outcome. Codes from 400 on are exit code 1, every other end
    is 0: that there was no work (300) is no failure."""
    code, text = message(life.folder / JOBOUTPUTS / MESSAGE)
    reason = (
        f"the guest powered itself off: {text}" if text else "the guest powered itself off and said nothing about it"
    )
    cause = life.outcome.cause if life.outcome.cause in (Cause.CANCELLED, Cause.WALLTIME) else Cause.FINISHED
    if cause is not Cause.FINISHED:
        reason = f"{life.outcome.reason}; {reason}"
    life.note(cause=cause, klass=CLASSES[cause], exit_code=int(code >= FAILED), reason=reason, hint="", error="")
    life.record.tell("shutdown-message", code=code, text=text)
    if life.left_in_order:
        from belljar.machine.extras.cache import left_in_order

        left_in_order(life)


def add_empty_disk(life: Life, size: int) -> None:
    """A disk without anything on it, which goes away with the machine. A guest that boots from a disc makes its file systems
    there itself; it takes no room until it is written to. Raises NoSpace."""
    path = life.attach(EMPTY, EMPTY)
    if (free := free_bytes(path.parent)) < SMALLEST_ROOM:
        raise NoSpace(f"{path.parent}: {free // MIB} MiB free, a machine's empty disk wants {SMALLEST_ROOM // MIB} MiB")
    with no_space_as_error(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    life.disks += (ExtraDisk(EMPTY, path, "raw", readonly=False),)
