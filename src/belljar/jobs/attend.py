"""Stands between the supervisor and the caller's process: signals, job control, the terminal, the standard streams.

The event loop's clock leaves out the time this process was stopped, so no deadline passes while a job is suspended.
"""

from __future__ import annotations

from belljar.host import quick_asyncio  # isort: skip - it must come before asyncio

import asyncio
import os
import selectors
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext, suppress

from belljar.guest import BytesSource, Streams
from belljar.guest.stdio import FdSink, FdSource
from belljar.hints import TYPE_CHECKING, Any, TypeVar
from belljar.host.processes import die_by
from belljar.hypervisor import Template
from belljar.jobs import Runtime
from belljar.jobs.batch.notice import LATE, Notice
from belljar.machine.orders import Ended, Order, Orders, Pause, Resize, Resume, Signal, Stop, first, unless_cancelled
from belljar.model import Outcome, Payload, Request, RunPayload, StdinKind
from belljar.records import replace

assert quick_asyncio

if TYPE_CHECKING:
    from belljar.jobs.batch.checkpoints import Checkpoints
    from belljar.machine.extras import Extra

T = TypeVar("T")
FORWARDED = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU", "ALRM")
UNLIKELY = 2.0  # seconds beyond what was asked for: then the process was stopped
PAUSE_LIMIT = 1.5  # seconds for the vcpus to stand still; Slurm and its like wait 2 before they send STOP


class StoppableLoop(asyncio.SelectorEventLoop):
    """A loop whose clock stands still while the process is stopped.

    Some batch systems send STOP without notice, and no process learns how long it was stopped. So a wait that took much
    longer than asked for is left out whole: a deadline may come later by one such wait, never earlier."""

    def __init__(self) -> None:
        self.stopped, self.woke = 0.0, time.monotonic()
        super().__init__(selector := selectors.DefaultSelector())
        self._wait, selector.select = selector.select, self._select  # type: ignore[method-assign]

    def time(self) -> float:
        return super().time() - self.stopped

    def _check_signal(self, sig: int) -> None:
        """They are known to be signals. asyncio looks each up in a list that Python makes anew each time, 0.1 ms."""

    def leave_out(self, begin: float, end: float) -> None:
        """This time did not pass."""
        self.stopped += end - begin
        self.woke = end

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Notices waits, and work between two waits, that took longer than they can have."""
        begin = time.monotonic()
        if begin - self.woke > UNLIKELY:
            self.leave_out(self.woke, begin)
        events = self._wait(timeout)
        self.woke = end = time.monotonic()
        if timeout is not None and end - begin > max(timeout, 0.0) + UNLIKELY:
            self.leave_out(begin, end)
        return events


def in_loop(work: Callable[[StoppableLoop], Coroutine[Any, Any, T]]) -> T:
    """Carry it out in a loop of its own."""
    loop = StoppableLoop()
    try:
        return loop.run_until_complete(work(loop))
    finally:
        loop.close()


def attend(
    runtime: Runtime, request: Request, streams: Streams | None = None, *, stdin: bytes | None = None, alone: bool = False,
    notice: Notice | None = None, tie: int | None = None, claimed: Callable[[], None] | None = None, checkpoints: Checkpoints | None = None,
) -> Outcome:  # fmt: skip
    """Keep the machine to its end, with this process's signals, and its own streams where no others are given. *stdin*
    replaces descriptor 0. *alone*: signals but TERM go to the payload's first process, not to its group. When TERM does
    not follow a *notice* in time, it is assumed. *tie*: a descriptor; when its other end is closed, the machine is
    stopped. *claimed* is called once it is claimed. *checkpoints* hears the signals first. Raises InputMissing, BadOption."""
    payload = request.work.payload if isinstance(request.work, RunPayload) and streams is None else None
    further: list[Extra] = [checkpoints.output] if checkpoints else []
    if request.machine.secrets:
        from belljar.jobs.reach import value_of
        from belljar.machine.extras.secrets import Secrets

        further.append(Secrets([(secret, value_of(secret)) for secret in request.machine.secrets]))

    async def keep(loop: StoppableLoop) -> Outcome:
        try:
            with raw_terminal(payload is not None and payload.terminal) as terminal:
                orders = listen(loop, terminal, alone, notice, checkpoints)
                if tie is not None:
                    loop.add_reader(tie, look_at_tie, loop, tie, orders)
                ours = streams or (streams_of(payload) if payload else Streams(None, None, None))
                if stdin is not None:
                    ours = replace(ours, stdin=BytesSource(stdin))
                keeping = runtime.supervisor().keep(request, ours, orders, further, claimed=claimed)
                return await (keeping if checkpoints is None else first(keeping, checkpoints.mind()))
        finally:
            if notice is not None:  # a system that announces the end again is not to kill a job that has ended
                signal.pthread_sigmask(signal.SIG_BLOCK, {notice[0]})

    return in_loop(keep)


def look_at_tie(loop: StoppableLoop, tie: int, orders: Orders) -> None:
    if not os.read(tie, 1 << 12):  # what is written there means nothing
        loop.remove_reader(tie)
        orders.give(Stop())


def build_template(runtime: Runtime, request: Request, *, exact: bool, streams: Streams | None = None) -> Template:
    """Make the template that this machine would be cloned from, or with *exact* one of its own size, where there is
    none. *streams*: of what prepares a warm image. A signal that cancels a job ends this process too, after clearing up."""
    runtime.images.ensure(request.machine.image)

    async def build(loop: StoppableLoop) -> Template:
        making = runtime.supervisor().make_template(request, exact=exact, streams=streams)
        return await unless_cancelled(making, listen(loop))

    try:
        return in_loop(build)
    except Ended as ended:
        die_by(ended.number or signal.SIGKILL)


class Announced(Orders):
    """Orders of a job whose system announces its end. Grid Engine sends the notice to its own terminate method too;
    when that dies of it, no order to end follows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, orders: Orders, notice: Notice) -> None:
        self._loop, self._orders, (self._number, self._seconds) = loop, orders, notice
        self._due: asyncio.TimerHandle | None = None
        self._is_given = self._is_lost = False

    def give(self, order: Order) -> None:
        """Pass it on. TERM that comes after all, when it was given up, is not a second one."""
        number = order.number if isinstance(order, Signal) else None
        if number == signal.SIGTERM and self._is_lost:
            self._is_lost = False
            return
        if number == signal.SIGTERM:
            self._is_given = True
            if self._due is not None:
                self._due.cancel()
        elif number == self._number and self._due is None and not self._is_given:
            self._due = self._loop.call_later(self._seconds + LATE, self._end)
        self._orders.give(order)

    def _end(self) -> None:
        self.give(Signal(signal.SIGTERM))
        self._is_lost = True


def streams_of(payload: Payload) -> Streams:
    """This process's own 0, 1 and 2 where the payload has streams."""
    if payload.terminal:
        columns, lines = os.get_terminal_size(0)
        return Streams(FdSource(0), FdSink(1), None, (lines, columns))
    stdin, stdout, stderr = (kind is StdinKind.STREAM for kind in (payload.stdin, payload.stdout, payload.stderr))
    return Streams(FdSource(0) if stdin else None, FdSink(1) if stdout else None, FdSink(2) if stderr else None)


def listen(
    loop: StoppableLoop, terminal: RawTerminal | None = None, alone: bool = False, notice: Notice | None = None,
    checkpoints: Checkpoints | None = None,
) -> Orders:  # fmt: skip
    """Turn signals into orders. A signal the caller ignores (nohup, background jobs) stays ignored."""
    orders = Orders()
    give: Callable[[Order], None] = Announced(loop, orders, notice).give if notice else orders.give
    if checkpoints is not None:
        checkpoints.give, give = give, checkpoints.hear
    for name in FORWARDED:
        number = getattr(signal, f"SIG{name}")
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, give, Signal(number, alone))
    if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGTSTP, lambda: loop.create_task(suspend(loop, orders, terminal)))
    loop.add_signal_handler(signal.SIGCONT, orders.give, Resume())
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)  # the source of stdin knows when it may not read a terminal
    if terminal is not None:
        loop.add_signal_handler(signal.SIGWINCH, tell_size, orders)
    return orders


def tell_size(orders: Orders) -> None:
    with suppress(OSError):  # a terminal that hung up has no size
        columns, rows = os.get_terminal_size(0)
        orders.give(Resize(rows, columns))


async def suspend(loop: StoppableLoop, orders: Orders, terminal: RawTerminal | None) -> None:
    """Halt the vcpus, then stop as the caller's shell or batch system expects. Goes on at SIGCONT."""
    done = asyncio.Event()
    orders.give(Pause(done))
    with suppress(TimeoutError):
        async with asyncio.timeout(PAUSE_LIMIT):
            await done.wait()
    if terminal is not None:
        terminal.restore()
    begin = time.monotonic()
    os.kill(os.getpid(), signal.SIGSTOP)
    loop.leave_out(begin, time.monotonic())
    if terminal is not None:
        terminal.enter()
        tell_size(orders)  # of a change while we were stopped only those in the foreground were told


def raw_terminal(is_wanted: bool) -> AbstractContextManager[RawTerminal | None]:
    """The caller's terminal for a while, where it is wanted."""
    return RawTerminal() if is_wanted else nullcontext()


class RawTerminal:
    """The caller's terminal, of which every byte goes to the guest, which echoes and interprets them; and always back again."""

    def enter(self) -> RawTerminal:
        import termios
        import tty

        self._before: list[Any] = termios.tcgetattr(0)
        tty.setraw(0, termios.TCSADRAIN)
        return self

    def restore(self, *_: object) -> None:
        """Give it back as it was. A terminal that is gone is fine."""
        import termios

        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, self._before)

    __enter__, __exit__ = enter, restore
