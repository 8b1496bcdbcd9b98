"""Guests that know their own work: they end when they power themselves off. Whether they are ready is asked by a probe.

What came of it they may say in a joboutput, `shutdown_message`: three digits, a blank, free text (HSF-TN-2016-04).
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

from belljar.errors import BelljarError, BootFailed, GuestError, GuestPoweredOff, GuestRebooted, HypervisorError
from belljar.guest import Streams
from belljar.hypervisor import EventKind
from belljar.machine.cleaning.put_away import OURS, deadline
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.output import CappedSink
from belljar.machine.life.work import Running, Workload, off_too_soon
from belljar.machine.orders import CANCELLING, Ended
from belljar.model import Account, Context, OwnWork, Payload, Sign

ROOT = Account("root", 0, 0, "root", home="/root")
# Seconds between two looks at a file. There is no event: the guest's kernel tells nothing of a file in a folder that is
# not there yet, or that comes with a mount.
LOOK_AGAIN = 1.0
BLOCK = 512  # bytes, of a tar archive
AWAITED = {Sign.FILE: "the file {} in the guest", Sign.LINE: "a line with {!r} on the guest's console"}


class OwnWorkload(Workload):
    """A guest at its own work."""

    what = "the guest"
    ended_by = frozenset(int(number) for number in CANCELLING)

    def __init__(self, work: OwnWork, life: Lifecycle, running: Running) -> None:
        super().__init__(life, running)
        self._work = work

    async def await_ready(self, timeout: float) -> None:
        """Its shares and disks are in their places, and what shows that it is ready was seen."""
        probe, guest = self._work.ready, self._running.guest
        if guest is not None:
            await self._running.furnish(guest, Payload((), ROOT))
        if probe.sign in (Sign.NONE, Sign.AGENT):
            return
        async with deadline(timeout if probe.within is None else probe.within, AWAITED[probe.sign].format(probe.of)):
            match probe.sign:
                case Sign.FILE:
                    while not await self._has_file():  # noqa: ASYNC110 - there is no event
                        await asyncio.sleep(LOOK_AGAIN)
                case Sign.LINE:
                    assert self._running.console is not None
                    await self._running.console.seen.wait()
        self._life.record.tell("ready", sign=probe.sign.value, of=probe.of)

    async def carry_out(self, streams: Streams) -> None:
        """Until its time is over: then its power button is pressed, and after the grace it is the machine's end."""
        life = self._life
        if not life.time_began:
            life.begin_time()
        life.begin_work()
        with life.phase("run"):
            await self.end_in_time()

    async def ask_to_end(self) -> None:
        """Press its power button. With belljar's own init nobody heeds that: what runs there is ended, and the machine."""
        if self._running.guest is not None and self._life.outcome.context == Context.RAMDISK.value:
            machine, grace = self._life.request.machine, self._life.request.grace
            # A silent guest has no longer than its grace, unless others would lose what it has not written yet.
            with suppress(GuestError, TimeoutError):
                async with asyncio.timeout(None if machine.shares else grace):
                    await self._running.guest.end_payload()
            raise Ended(self._life.outcome.cause, signal.SIGTERM, self._life.outcome.reason)
        if self._running.domain is not None:
            with suppress(HypervisorError):
                await self._running.domain.press_power()
                self._life.record.tell("power-button")

    def explain_off(self, kind: EventKind, last_line: str) -> BelljarError:
        if kind is EventKind.RESET and self._work.reboots and self._life.is_begun:
            return GuestRebooted("the guest rebooted")
        if self._running.guest is not None and self._life.identity is None:
            return off_too_soon(kind, last_line)
        if kind is EventKind.RESET:  # so ends a firmware that finds nothing to boot, too
            return off_too_soon(kind, last_line, "instead of powering itself off")
        if last_line.startswith(OURS):  # belljar's own init gives up so, too
            return BootFailed(last_line)
        return GuestPoweredOff("the guest powered itself off")

    async def _has_file(self) -> bool:
        assert self._running.guest is not None
        head = bytearray()  # of an archive: of an empty one it is all zeros
        await self._running.guest.collect((self._work.ready.of,), CappedSink(head.extend, BLOCK))
        return any(head)
