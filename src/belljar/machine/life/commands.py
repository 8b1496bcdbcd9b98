"""What the outside asks of a machine while it lives, turned into acts: signals, stop, pause, and the control socket."""

from __future__ import annotations

import asyncio
import signal
import socket
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, GuestError, HostError, HypervisorError, MachineBusy
from belljar.guest import second_client
from belljar.hints import TYPE_CHECKING, Any
from belljar.machine import orders
from belljar.machine.life.control import Answer, say
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running, Workload
from belljar.machine.orders import CANCELLING, Ended, unless_cancelled
from belljar.machine.services import Services
from belljar.model import Cause, Port, State, to_json
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.machine.life.ports import Ports

FAR = 1e11  # seconds since the epoch: the year 5138
IN_TIME = (State.REQUESTED, State.PREPARING, State.STARTING, State.BOOTING, State.READY, State.RUNNING)
MOST_FORKS = 1000  # at a time
LAST_MOMENT = 2.0  # seconds for a payload that was killed to be gone


@dataclass(frozen=True)
class Question:
    """What may be asked: what to do, and of the rest what goes with that."""

    do: str
    grace: float | None = None  # seconds
    at: float | None = None  # a moment
    by: float = 0.0  # seconds later than it was
    folder: Path = Path()
    stop: bool = False
    within: float | None = None  # seconds
    port: Port | None = None
    count: int = 0


class Commands:
    """Follows one machine's orders and answers its control socket."""

    def __init__(
        self, life: Lifecycle, given: orders.Orders, running: Running, workload: Workload, services: Services
    ) -> None:  # fmt: skip
        self.running = running
        self._life, self._orders, self._workload, self._services = life, given, workload, services
        self._grace_end: float | None = None  # by the event loop's clock, once its work was asked to end
        self._why, self._is_killed = "", False
        self._ports: Ports | None = None

    async def publish(self, port: Port) -> Port:
        """Listen for the guest, and return where. Raises BadOption, NoSpace, MachineBusy."""
        from belljar.machine.life.ports import Ports

        if self._life.state not in IN_TIME:
            raise MachineBusy("it is being ended: no port of it can be published any more")
        self._ports = self._ports or Ports(self._life, self.running, self._services.rules.publish)
        return await self._ports.open(port)

    async def close_ports(self) -> None:
        if self._ports is not None:
            await self._ports.close()

    async def run(self) -> None:
        """Follow orders for as long as the machine lives. Ends by raising Ended, or by being cancelled."""
        life, workload = self._life, self._workload
        while True:
            try:
                async with asyncio.timeout_at(self._grace_end):
                    order = await self._orders.next()
            except TimeoutError:
                await self._end_grace()
                continue
            match order:
                case orders.Signal(number=number) if number in workload.ended_by and life.is_begun:
                    await self._begin_grace(life.request.grace, "cancelled")
                case orders.Stop(grace=grace, why=why) if life.is_begun:
                    await self._begin_grace(life.request.grace if grace is None else grace, why)
                case orders.Signal(number=number) if number in CANCELLING and not life.is_begun:
                    raise Ended(Cause.CANCELLED, number, "cancelled before its work had begun")
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
                case orders.Freeze():
                    await self._freeze(order)

    async def _begin_grace(self, grace: float, why: str) -> None:
        """First time: the work is asked to end, and ended after the grace. Second time: it is ended now."""
        if self._grace_end is not None:
            raise Ended(Cause.CANCELLED, signal.SIGTERM, f"{why} twice")
        self._life.expect(Cause.CANCELLED, why)
        await self._workload.ask_to_end()
        self._why = f"{why}; {self._workload.what} did not end within {grace:g} s"
        self._grace_end = asyncio.get_running_loop().time() + grace

    async def _end_grace(self) -> None:
        """Its first process may be gone, and how it ended is the payload's end: only what is left of it is killed, and has a moment."""
        if self._is_killed or not await self._workload.kill():
            raise Ended(Cause.CANCELLED, signal.SIGTERM, self._why)
        self._is_killed, self._grace_end = True, asyncio.get_running_loop().time() + LAST_MOMENT

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

    async def answer(self, value: Any, connection: socket.socket) -> Answer | None:
        """One question from the control socket. None: its connection was used for something longer. Raises ValueError."""
        from belljar.reading import from_json

        question = from_json(Question, value)
        try:
            match question.do:
                case "stop":
                    self._orders.give(orders.Stop(question.grace))
                case "kill":
                    self._orders.give(orders.Kill())
                case "deadline":
                    return {"ok": True, "at": await self._move_deadline(question)}
                case "checkpoint":
                    return {"ok": True, "number": await self._checkpoint(question)}
                case "publish" if question.port is not None:
                    return {"ok": True, "port": to_json(await self.publish(question.port))}
                case "fork":
                    await self._fork(question.count, connection)
                    return None
                case "relay":
                    await self._relay(connection)
                    return None
                case "console":
                    await self._attach_console(connection)
                    return None
                case other:
                    raise MachineBusy(f"unknown request {other[:40]!r}")
        except BelljarError as exc:
            return {"error": exc.message, "hint": exc.hint}
        return {"ok": True}

    async def _move_deadline(self, question: Question) -> float:
        """`at` a moment, or `by` some seconds later than it was. Journaled, then done, then told to the guest."""
        life, deadline = self._life, self._life.deadline
        at = deadline.at if question.at is None else question.at
        if at is None:
            raise MachineBusy("it has no deadline that could come later; `belljar stop --at TIME` gives it one")
        if not abs(at := at + question.by) < FAR:
            raise MachineBusy(f"deadline: not a moment: {at}")
        if deadline.passed.is_set() or life.state not in IN_TIME:
            raise MachineBusy("it is being ended: its deadline cannot be moved any more")
        try:
            life.record.write("deadline", at=at)
            deadline.move(at)
            await self._workload.tell_deadline()
        except (HostError, GuestError) as exc:
            raise MachineBusy(f"its deadline was not told everywhere: {exc.message}") from exc
        return at

    async def _fork(self, count: int, connection: socket.socket) -> None:
        """Say which template it has become, and hold that until whoever asked hangs up: by then machines of it do."""
        from belljar.machine.life.forking import check, forked

        if self._grace_end is not None or self._life.deadline.passed.is_set():
            raise MachineBusy("it is being ended: it cannot be forked any more")
        if not 0 < count <= MOST_FORKS:
            raise MachineBusy(f"fork: {count} is not a number of machines from 1 to {MOST_FORKS}")
        await check(self._services, self._life, self.running, count)
        async with forked(self._services, self._life, self.running) as key:
            await say(connection, {"ok": True, "fork": key})
            await asyncio.get_running_loop().sock_recv(connection, 1)

    async def _checkpoint(self, question: Question) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._orders.give(orders.Freeze(question.folder, done, question.stop, question.within))
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
