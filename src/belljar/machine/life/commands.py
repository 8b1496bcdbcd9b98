"""What the outside asks of a machine while it lives, turned into acts: signals, stop, pause, and the control socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, GuestError, HostError, HypervisorError, MachineBusy
from belljar.guest import second_client
from belljar.hints import TYPE_CHECKING
from belljar.machine import orders
from belljar.machine.life.control import Answer, say
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running, Workload
from belljar.machine.orders import CANCELLING, Ended, unless_cancelled
from belljar.machine.services import Services
from belljar.model import Cause, Port, State, to_json

if TYPE_CHECKING:
    from belljar.machine.life.ports import Ports

FAR = 1e11  # seconds since the epoch: the year 5138
IN_TIME = (State.REQUESTED, State.PREPARING, State.STARTING, State.BOOTING, State.READY, State.RUNNING)
MOST_FORKS = 1000  # at a time
LAST_MOMENT = 2.0  # seconds for a payload that was killed to be gone


class Commands:
    """Follows one machine's orders and answers its control socket."""

    def __init__(
        self, life: Lifecycle, given: orders.Orders, running: Running, workload: Workload, services: Services
    ) -> None:  # fmt: skip
        self.running = running
        self._life, self._orders, self._workload, self._services = life, given, workload, services
        self._grace: asyncio.TimerHandle | None = None
        self._ports: Ports | None = None

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
                case orders.Signal(number=number) if number in workload.ended_by and workload.is_begun():
                    await self._begin_grace(self._life.request.grace, workload.cancelled)
                case orders.Stop(grace=grace, why=why) if workload.is_begun():
                    await self._begin_grace(self._life.request.grace if grace is None else grace, why)
                case orders.Signal(number=number) if number in CANCELLING and not workload.is_begun():
                    raise Ended(Cause.CANCELLED, number, workload.never_begun)
                case orders.Signal(number=number, alone=alone):
                    await workload.signal(number, alone=alone)
                case orders.Stop() | orders.Kill():
                    raise Ended(Cause.CANCELLED, signal.SIGKILL, "killed on request")
                case orders.Resize(rows=rows, columns=columns) if self.running.process is not None:
                    with suppress(GuestError):
                        await self.running.process.resize(rows, columns)
                case orders.Pause(done=done):
                    await self._pause(done)
                case orders.Resume():
                    await self._resume()
                case orders.Freeze() as order:
                    await self._freeze(order)
                case orders.GraceOver(reason=reason, is_last=False) if await workload.kill():
                    # Its first process may be gone, and how it ended is the payload's end: only what is left is killed.
                    self._orders_later(LAST_MOMENT, orders.GraceOver(reason, is_last=True))
                case orders.GraceOver(reason=reason):
                    raise Ended(Cause.CANCELLED, signal.SIGTERM, reason)

    async def _begin_grace(self, grace: float, why: str) -> None:
        """First time: the work is asked to end, and ended after the grace. Second time: it is ended now."""
        if self._grace is not None:
            raise Ended(Cause.CANCELLED, signal.SIGTERM, f"{why} twice")
        self._life.expect(Cause.CANCELLED, why)
        await self._workload.ask_to_end()
        self._orders_later(grace, orders.GraceOver(f"{why}; {self._workload.what} did not end within {grace:g} s"))

    def _orders_later(self, seconds: float, over: orders.GraceOver) -> None:
        self._grace = asyncio.get_running_loop().call_later(seconds, self._orders.give, over)

    async def _freeze(self, order: orders.Freeze) -> None:
        """All other orders but to kill it wait: what is asked of a payload that stands still must not be half of it."""
        from belljar.machine.checkpoints.freezing import freeze

        try:
            work = freeze(order, self._life, self.running, self._services)
            number = await unless_cancelled(work, self._orders, only_kill=True)
        except BelljarError as error:
            if not order.done.done():
                order.done.set_exception(error)
                order.done.exception()  # it is not a mistake when nobody waits any more
            return
        if not order.done.done():
            order.done.set_result(number)
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
        """One question from the control socket. None: its connection was used for something longer."""
        try:
            match question.get("do"):
                case "stop":
                    self._orders.give(orders.Stop(number_in(question, "grace")))
                case "kill":
                    self._orders.give(orders.Kill())
                case "deadline":
                    return {"ok": True, "at": await self._move_deadline(question)}
                case "checkpoint":
                    return {"ok": True, "number": await self._checkpoint(question)}
                case "publish":
                    return {"ok": True, "port": to_json(await self._publish(question))}
                case "fork":
                    await self._fork(question.get("count"), connection)
                    return None
                case "relay":
                    await self._relay(connection)
                    return None
                case "console":
                    await self._attach_console(connection)
                    return None
                case other:
                    raise MachineBusy(f"unknown request {str(other)[:40]!r}")
        except BelljarError as exc:
            return {"error": exc.message, "hint": exc.hint}
        return {"ok": True}

    async def _move_deadline(self, question: Answer) -> float:
        """`at` a moment, or `by` some seconds later than it was. Journaled, then done, then told to the guest."""
        life, deadline = self._life, self._life.deadline
        at, by = number_in(question, "at"), number_in(question, "by")
        if by is not None:
            if deadline.at is None:
                raise MachineBusy("it has no deadline that could come later; `belljar stop --at TIME` gives it one")
            at = deadline.at + by
        if at is None:
            raise MachineBusy(f"deadline: neither a moment nor seconds: {str(question)[:80]}")
        if deadline.has_passed or life.state not in IN_TIME:
            raise MachineBusy("it is being ended: its deadline cannot be moved any more")
        try:
            life.record.write("deadline", at=at)
            deadline.move(at)
            await self._workload.tell_deadline()
        except (HostError, GuestError) as exc:
            raise MachineBusy(f"its deadline was not told everywhere: {exc.message}") from exc
        return at

    async def _publish(self, question: Answer) -> Port:
        from belljar.reading import from_json

        if self._life.state not in IN_TIME:
            raise MachineBusy("it is being ended: no port of it can be published any more")
        try:
            return await self.publish(from_json(Port, question.get("port")))
        except ValueError as exc:
            raise MachineBusy(f"publish: {exc}") from exc

    async def _fork(self, count: object, connection: socket.socket) -> None:
        """Say which template it has become, and hold that until whoever asked hangs up: by then machines of it do."""
        from belljar.machine.life.forking import check, forked

        if self._grace is not None or self._life.deadline.has_passed:
            raise MachineBusy("it is being ended: it cannot be forked any more")
        if not isinstance(count, int) or not 0 < count <= MOST_FORKS:
            raise MachineBusy(f"fork: {str(count)[:20]} is not a number of machines from 1 to {MOST_FORKS}")
        await check(self._services, self._life, self.running, count)
        async with forked(self._services, self._life, self.running) as key:
            await say(connection, {"ok": True, "fork": key})
            await asyncio.get_running_loop().sock_recv(connection, 1)

    async def _checkpoint(self, question: Answer) -> int:
        folder = question.get("folder")
        if not isinstance(folder, str) or not folder.startswith("/"):
            raise MachineBusy(f"checkpoint: not an absolute path of a folder: {str(folder)[:80]}")
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._orders.give(
            orders.Freeze(Path(folder), done, question.get("stop") is True, number_in(question, "within"))
        )
        return await done

    async def _relay(self, connection: socket.socket) -> None:
        if self._life.state is not State.RUNNING:
            raise MachineBusy(f"the machine is {self._life.state.value}, not running")
        if self.running.guest is None:
            raise MachineBusy("the machine's guest knows its own work, and has no agent of belljar's")
        await say(connection, {"ok": True})
        await second_client(self.running.guest, connection)

    async def _attach_console(self, connection: socket.socket) -> None:
        if self.running.console is None:
            raise MachineBusy(f"the machine is {self._life.state.value}: it has no console yet")
        await say(connection, {"ok": True})
        await self.running.console.attach(connection)


def number_in(question: Answer, name: str) -> float | None:
    """A moment or seconds; None where there is no such number."""
    match question.get(name):
        case int() | float() as number if not isinstance(number, bool) and abs(number) < FAR:
            return float(number)
    return None
