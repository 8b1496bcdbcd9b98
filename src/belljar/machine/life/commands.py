"""What the outside asks of a machine while it lives, turned into acts: signals, stop, pause, and the control socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress

from belljar.errors import GuestError, HypervisorError
from belljar.guest import Guest, Process
from belljar.hypervisor import Domain
from belljar.machine.life.console import Console
from belljar.machine.life.control import Answer
from belljar.machine.life.life import Life
from belljar.machine.orders import CANCELLING, Ended, GraceOver, Kill, Orders, Pause, Resize, Resume, Signal, Stop
from belljar.machine.parts import Relay
from belljar.model import Cause, State

LAST_MOMENT = 2.0  # seconds for a payload that was killed to be gone


class Present:
    """What of a machine is there just now. Whoever keeps it fills this in; whoever obeys looks here."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.domain: Domain | None = None
        self.guest: Guest | None = None
        self.process: Process | None = None
        self.console: Console | None = None


class Obeying:
    """Follows one machine's orders and answers its control socket."""

    def __init__(self, life: Life, orders: Orders, now: Present, relay: Relay) -> None:
        self.now = now
        self._life, self._orders, self._serve_relay = life, orders, relay
        self._early: list[Signal] = []  # signals that came before the payload did
        self._grace: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """No grace runs any more."""
        if self._grace is not None:
            self._grace.cancel()

    async def run(self) -> None:
        """Follow orders for as long as the machine lives. Ends by raising Ended, or by being cancelled."""
        while True:
            match await self._orders.next():
                case Signal(number=number) if number in CANCELLING and self._is_alone():
                    await self._begin_grace(self._life.request.grace, "cancelled")
                case Stop(grace=grace) if self._is_alone():
                    await self._begin_grace(self._life.request.grace if grace is None else grace, "stopped")
                case Signal(number=signal.SIGTERM) if self.now.process is not None:
                    await self._begin_grace(self._life.request.grace, "cancelled by TERM")
                case Stop(grace=grace) if self.now.process is not None:
                    await self._begin_grace(self._life.request.grace if grace is None else grace, "stopped")
                case Signal() as order if self.now.process is not None:
                    await self._signal(order)
                case Signal(number=number) if number in CANCELLING:
                    raise Ended(Cause.CANCELLED, number, self._why_cancelled())
                case Signal() as order:
                    self._early.append(order)
                case Stop() | Kill():
                    raise Ended(Cause.CANCELLED, signal.SIGKILL, "killed on request")
                case Resize(rows=rows, columns=columns) if self.now.process is not None:
                    with suppress(GuestError):
                        await self.now.process.resize(rows, columns)
                case Pause(done=done):
                    await self._pause(done)
                case Resume():
                    await self._resume()
                case GraceOver(reason=reason, is_last=False) if self._lingers():
                    # Its first process may be gone, and how it ended is the payload's end: only what is left is killed.
                    await self._signal(Signal(signal.SIGKILL))
                    self._orders_later(LAST_MOMENT, GraceOver(reason, is_last=True))
                case GraceOver(reason=reason):
                    raise Ended(Cause.CANCELLED, signal.SIGTERM, reason)

    async def _begin_grace(self, grace: float, why: str) -> None:
        """First time: TERM to the payload, and its end after the grace. Second time: its end now."""
        if self._grace is not None:
            raise Ended(Cause.CANCELLED, signal.SIGTERM, f"{why} twice")
        self._life.expect(Cause.CANCELLED, why)
        what = "the guest" if self._is_alone() else "the payload"
        await (self.press_power() if self._is_alone() else self._signal(Signal(signal.SIGTERM)))
        self._orders_later(grace, GraceOver(f"{why}; {what} did not end within {grace:g} s"))

    def _orders_later(self, seconds: float, over: GraceOver) -> None:
        self._grace = asyncio.get_running_loop().call_later(seconds, self._orders.give, over)

    def _is_alone(self) -> bool:
        """Is there a guest at its own work, which can only be asked by its power button?"""
        return self._life.request.payload is None and self._life.state is State.RUNNING

    async def press_power(self) -> None:
        """A guest that does not heed it is ended after the grace; so is one whose hypervisor does not."""
        if self.now.domain is not None:
            with suppress(HypervisorError):
                await self.now.domain.press_power()
                self._life.record.tell("power-button")

    def _why_cancelled(self) -> str:
        return "cancelled" if self._life.request.payload is None else "cancelled before the payload was started"

    def _lingers(self) -> bool:
        payload = self._life.request.payload
        return payload is not None and payload.lingers

    async def deliver_early(self) -> None:
        early, self._early = self._early, []
        for order in early:
            await self._signal(order)

    async def _signal(self, order: Signal) -> None:
        """To the payload. A guest that is lost cannot hear; that it is lost is told by others."""
        if self.now.process is not None:
            with suppress(GuestError):
                await self.now.process.signal(order.number, alone=order.alone)

    async def _pause(self, done: asyncio.Event) -> None:
        try:
            if self.now.domain is not None:
                with suppress(HypervisorError):  # SIGSTOP of the process group halts the vcpus too
                    await self.now.domain.pause()
                    self._life.record.tell("paused")
        finally:
            done.set()

    async def _resume(self) -> None:
        if self.now.domain is not None:
            with suppress(HypervisorError):
                await self.now.domain.resume()
                self._life.record.tell("resumed")
        if self.now.guest is not None and self.now.process is not None:
            with suppress(GuestError):
                await self.now.guest.set_clock()

    async def answer(self, question: Answer, connection: socket.socket) -> Answer | None:
        """One question from the control socket."""
        match question.get("do"):
            case "status":
                pid = self.now.domain.pid if self.now.domain is not None else None
                return {"id": self._life.request.id, "state": self._life.state.value, "pid": pid}
            case "stop":
                grace = question.get("grace")
                self._orders.give(Stop(float(grace) if isinstance(grace, (int, float)) else None))
                return {"ok": True}
            case "kill":
                self._orders.give(Kill())
                return {"ok": True}
            case "relay":
                return await self._relay(connection)
            case "console":
                return await self._attach_console(connection)
            case other:
                return {"error": f"unknown request {str(other)[:40]!r}"}

    async def _relay(self, connection: socket.socket) -> Answer | None:
        if self.now.guest is None or self._life.state is not State.RUNNING:
            return {"error": f"the machine is {self._life.state.value}, not running"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await self._serve_relay(self.now.guest, connection)
        return None

    async def _attach_console(self, connection: socket.socket) -> Answer | None:
        if self.now.console is None:
            return {"error": f"the machine is {self._life.state.value}: it has no console yet"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await self.now.console.attach(connection)
        return None
