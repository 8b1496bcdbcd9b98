"""What the outside asks of a machine while it lives, turned into acts: signals, stop, pause, and the control socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, GuestError, HostError, HypervisorError
from belljar.guest import second_client
from belljar.hints import TYPE_CHECKING, TypeGuard
from belljar.machine.life.control import Answer
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running, Workload
from belljar.machine.orders import (
    CANCELLING,
    Ended,
    Freeze,
    GraceOver,
    Kill,
    Orders,
    Pause,
    Resize,
    Resume,
    Signal,
    Stop,
    unless_cancelled,
)
from belljar.machine.services import Services
from belljar.model import Cause, Port, State, to_json

if TYPE_CHECKING:
    from belljar.machine.life.ports import Ports

FAR = 1e11  # seconds since the epoch: the year 5138
IN_TIME = (State.REQUESTED, State.PREPARING, State.STARTING, State.BOOTING, State.READY, State.RUNNING)
LAST_MOMENT = 2.0  # seconds for a payload that was killed to be gone


class Commands:
    """Follows one machine's orders and answers its control socket."""

    def __init__(
        self, life: Lifecycle, orders: Orders, running: Running, workload: Workload, services: Services
    ) -> None:
        self.running = running
        self._life, self._orders, self._workload, self._services = life, orders, workload, services
        self._grace: asyncio.TimerHandle | None = None
        self._ports: Ports | None = None

    def close(self) -> None:
        """No grace runs any more."""
        if self._grace is not None:
            self._grace.cancel()

    async def publish(self, port: Port) -> Port:
        """Listen for the guest, and return where. Raises BadOption, NoSpace."""
        from belljar.machine.life.ports import Ports

        self._ports = self._ports or Ports(self._life, self.running, self._services.rules.publish)
        return await self._ports.open(port)

    async def close_ports(self) -> None:
        if self._ports is not None:
            await self._ports.close()

    async def run(self) -> None:
        """Follow orders for as long as the machine lives. Ends by raising Ended, or by being cancelled."""
        workload = self._workload
        while True:
            match await self._orders.next():
                case Signal(number=number) if number in workload.ended_by and workload.is_begun():
                    await self._begin_grace(self._life.request.grace, workload.cancelled)
                case Stop(grace=grace, why=why) if workload.is_begun():
                    await self._begin_grace(self._life.request.grace if grace is None else grace, why)
                case Signal(number=number) if number in CANCELLING and not workload.is_begun():
                    raise Ended(Cause.CANCELLED, number, workload.never_begun)
                case Signal(number=number, alone=alone):
                    await workload.signal(number, alone=alone)
                case Stop() | Kill():
                    raise Ended(Cause.CANCELLED, signal.SIGKILL, "killed on request")
                case Resize(rows=rows, columns=columns) if self.running.process is not None:
                    with suppress(GuestError):
                        await self.running.process.resize(rows, columns)
                case Pause(done=done):
                    await self._pause(done)
                case Resume():
                    await self._resume()
                case Freeze() as order:
                    await self._freeze(order)
                case GraceOver(reason=reason, is_last=False) if await workload.kill():
                    # Its first process may be gone, and how it ended is the payload's end: only what is left is killed.
                    self._orders_later(LAST_MOMENT, GraceOver(reason, is_last=True))
                case GraceOver(reason=reason):
                    raise Ended(Cause.CANCELLED, signal.SIGTERM, reason)

    async def _begin_grace(self, grace: float, why: str) -> None:
        """First time: the work is asked to end, and ended after the grace. Second time: it is ended now."""
        if self._grace is not None:
            raise Ended(Cause.CANCELLED, signal.SIGTERM, f"{why} twice")
        self._life.expect(Cause.CANCELLED, why)
        await self._workload.ask_to_end()
        self._orders_later(grace, GraceOver(f"{why}; {self._workload.what} did not end within {grace:g} s"))

    def _orders_later(self, seconds: float, over: GraceOver) -> None:
        self._grace = asyncio.get_running_loop().call_later(seconds, self._orders.give, over)

    async def _freeze(self, order: Freeze) -> None:
        """All other orders but to kill it wait: what is asked of a payload that stands still must not be half of it."""
        from belljar.machine.checkpoints.freezing import freeze

        try:
            work = freeze(order, self._life, self.running, self._services)
            number = await unless_cancelled(work, self._orders, only_kill=True)
        except BelljarError as error:
            return settle(order.done, error)
        except BaseException:  # re-raised: whoever waits learns that there will be no answer
            order.done.cancel()
            raise
        settle(order.done, number)
        if order.stop:
            raise Ended(Cause.CHECKPOINTED, None, f"checkpoint {number} of it was written to {order.folder}")

    async def _pause(self, done: asyncio.Event) -> None:
        try:
            if self.running.domain is not None:
                with suppress(HypervisorError):  # SIGSTOP of the process group halts the vcpus too
                    await self.running.domain.pause()
                    self._life.record.tell("paused")
        finally:
            done.set()

    async def _resume(self) -> None:
        if self.running.domain is not None:
            with suppress(HypervisorError):
                await self.running.domain.resume()
                self._life.record.tell("resumed")
        if self.running.guest is not None and self.running.process is not None:
            with suppress(GuestError):
                await self.running.guest.set_clock()

    async def answer(self, question: Answer, connection: socket.socket) -> Answer | None:
        """One question from the control socket."""
        match question.get("do"):
            case "stop":
                grace = question.get("grace")
                self._orders.give(Stop(float(grace) if isinstance(grace, (int, float)) else None))
                return {"ok": True}
            case "kill":
                self._orders.give(Kill())
                return {"ok": True}
            case "deadline":
                return await self._move_deadline(question)
            case "checkpoint":
                return await self._checkpoint(question)
            case "publish":
                return await self._publish(question)
            case "relay":
                return await self._relay(connection)
            case "console":
                return await self._attach_console(connection)
            case other:
                return {"error": f"unknown request {str(other)[:40]!r}"}

    async def _move_deadline(self, question: Answer) -> Answer:
        """`at` a moment, or `by` some seconds later than it was. Journaled, then done, then told to the guest."""
        life, deadline = self._life, self._life.deadline
        at, by = question.get("at"), question.get("by")
        if is_number(by):
            if deadline.at is None:
                return {"error": "it has no deadline that could come later; `belljar stop --at TIME` gives it one"}
            at = deadline.at + by
        if not is_number(at):
            return {"error": f"deadline: neither a moment nor seconds: {str(question)[:80]}"}
        if deadline.has_passed or life.state not in IN_TIME:
            return {"error": "it is being ended: its deadline cannot be moved any more"}
        try:
            life.record.write("deadline", at=at)
            deadline.move(at)
            await self._workload.tell_deadline()
        except (HostError, GuestError) as exc:
            return {"error": f"its deadline was not told everywhere: {exc.message}"}
        return {"ok": True, "at": at}

    async def _publish(self, question: Answer) -> Answer:
        if self._life.state not in IN_TIME:
            return {"error": "it is being ended: no port of it can be published any more"}
        from belljar.reading import from_json

        try:
            port = from_json(Port, question.get("port"))
            return {"ok": True, "port": to_json(await self.publish(port))}
        except ValueError as exc:
            return {"error": f"publish: {exc}"}
        except BelljarError as exc:
            return {"error": exc.message, "hint": exc.hint}

    async def _checkpoint(self, question: Answer) -> Answer:
        folder, within = question.get("folder"), question.get("within")
        if not isinstance(folder, str) or not folder.startswith("/"):
            return {"error": f"checkpoint: not an absolute path of a folder: {str(folder)[:80]}"}
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stop = question.get("stop") is True
        self._orders.give(Freeze(Path(folder), done, stop, float(within) if is_number(within) else None))
        try:
            return {"ok": True, "number": await done}
        except BelljarError as exc:
            return {"error": exc.message, "hint": exc.hint}

    async def _relay(self, connection: socket.socket) -> Answer | None:
        if self._life.state is State.RUNNING and self.running.guest is None:
            return {"error": "the machine's guest knows its own work, and has no agent of belljar's"}
        if self.running.guest is None or self._life.state is not State.RUNNING:
            return {"error": f"the machine is {self._life.state.value}, not running"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await second_client(self.running.guest, connection)
        return None

    async def _attach_console(self, connection: socket.socket) -> Answer | None:
        if self.running.console is None:
            return {"error": f"the machine is {self._life.state.value}: it has no console yet"}
        await asyncio.get_running_loop().sock_sendall(connection, b'{"ok": true}\n')
        await self.running.console.attach(connection)
        return None


def settle(done: asyncio.Future[int], answer: int | BelljarError) -> None:
    """Answer whoever still waits."""
    if done.done():
        return
    if isinstance(answer, int):
        return done.set_result(answer)
    done.set_exception(answer)
    done.exception()  # it is not a mistake when nobody waits any more


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < FAR
