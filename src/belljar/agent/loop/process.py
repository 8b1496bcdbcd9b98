"""The agent's children: a payload, from its order to its EXIT, and errands, which may block."""

import os
import select
import struct
import time

from belljar.agent.guest.system import Refused, close_quietly, kill_quietly
from belljar.agent.loop.payload import Job, Zygote, three_pipes
from belljar.agent.loop.streams import Inflow, Outflow, ScriptFlow
from belljar.agent.wire import END, EXIT, FAILED, KIB, LEADER, REPLY, SCRIPT, STDIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, Callable

    from belljar.agent.guest.guest import Guest
    from belljar.agent.roles import Late, Reactor, Work
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


class Process:
    """A payload, or a file copy: one child, its streams, its box. Before its EXIT all is dead, and every byte sent."""

    def __init__(
        self,
        agent: "Reactor",
        guest: "Guest",
        number: int,
        job: Job,
        zygote: "Zygote | None",
        gone: "Callable[[Process], None]",
    ) -> None:
        self.agent, self.guest, self.number, self.job, self.gone = agent, guest, number, job, gone
        self.pid = 0
        self.inflows = {}  # type: dict[int, Inflow]
        self.outflows = {}  # type: dict[int, Outflow]
        self.zygote = zygote
        self.box = zygote.box if zygote else guest.box()
        self.trouble = -1
        self.master = -1
        self.end = None  # type: tuple[int, Any] | None
        self.was_told = False  # TERM was sent to all of it
        self.is_empty = False  # no process of it is left
        self.is_silent = False  # its conversation is over
        self.is_over = False

    # -- the way in

    def begin(self) -> None:
        """Start it, once its script is there."""
        if not self.job.script:
            return self.launch()
        name = os.path.basename(self.job.script.rstrip(b"/"))
        name = b"script" if name in (b"", b".", b"..") else name
        self.job.path = self.guest.new_folder(self.job.account) + b"/" + name
        fd = os.open(self.job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
        os.fchmod(fd, 0o700)
        self.guest.give(fd, self.job.account)
        number = 4 * self.number + SCRIPT
        self.inflows[number] = ScriptFlow(self.agent, number, fd, self.launch_or_refuse)

    def launch_or_refuse(self) -> None:
        try:
            self.launch()
        except OSError as exc:
            self.refuse("failed", exc.strerror or str(exc))

    def refuse(self, kind: str, message: str) -> None:
        """It never came to be: an EXIT says why."""
        self.drop_flows()
        if not self.is_silent:
            self._tell(FAILED << 8, 0.0, 0.0, 0, kind + "\0" + message)
        self.close()

    def launch(self) -> None:
        """Hand the order to a child: to the one that is there already, or to a new one where that died before its time."""
        zygote, self.zygote = self.zygote, None
        if zygote is not None:
            try:
                return self._hand_over(zygote)
            except OSError:
                zygote.discard()
                self.box = self.guest.box()
        zygote = Zygote(self.guest, self.box, *(self._terminal() if self.job.terminal else three_pipes()))
        try:
            self._hand_over(zygote)
        except BrokenPipeError:  # it has ended, and says why
            close_quietly(zygote.orders)
            self._adopt(zygote)
        except OSError:
            zygote.discard()
            raise

    def _hand_over(self, zygote: Zygote) -> None:
        for fd in set(zygote.inner):
            self.guest.give(fd, self.job.account, 5 if self.job.terminal else None)
        zygote.go(self.job)
        self._adopt(zygote)

    def _adopt(self, zygote: Zygote) -> None:
        """From now on it is the payload, and the outer ends are its streams."""
        base, is_terminal = 4 * self.number, bool(self.job.terminal)
        for fd in set(zygote.inner):
            os.close(fd)
        for index, (kind, fd) in enumerate(zip(self.job.stdio, zygote.outer)):
            if kind != "s" and not is_terminal:
                os.close(fd)
            elif index == STDIN:
                self.inflows[base] = Inflow(self.agent, base, fd, is_terminal)
            else:
                self.outflows[base + index] = Outflow(self.agent, base + index, fd, self.advance)
        self.pid, self.trouble = zygote.pid, zygote.trouble
        os.set_blocking(self.trouble, False)
        self.agent.children[self.pid] = self.ended

    def _terminal(self) -> "tuple[list[int], list[int]]":
        """The payload's ends of a terminal, and ours: to be written to, and to be read."""
        self.master, slave = os.openpty()
        if self.job.terminal and self.job.terminal[0]:
            self.resize(*self.job.terminal)
        return [slave] * 3, [os.dup(self.master), os.dup(self.master)]

    # -- while it runs

    def signal(self, number: int) -> None:
        """To its process group, or with LEADER to itself alone. What has ended is past hearing."""
        alone, number = number & LEADER, number & ~LEADER
        is_there = self.end is None or self.box.is_patient
        if self.pid and is_there and 0 < number <= 64:
            if self.end is not None and number == signal.SIGKILL:
                return self.box.hurry(self.agent)
            if alone:
                return kill_quietly(self.pid, number)
            self.was_told = self.was_told or number == signal.SIGTERM
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                if self.end is None:
                    kill_quietly(self.pid, number)  # its child has not come to its setsid yet

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import termios

        if self.master >= 0:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    # -- the way out

    def ended(self, status: int, usage: "Any") -> None:
        """The main process is gone. What it left behind goes now, or in its own time where that was asked for."""
        self.end = (status, usage)
        for flow in self.inflows.values():
            flow.drop()
        self.box.is_patient = self.job.lingers and self.was_told
        self.box.clear(self.agent, self.pid, self.emptied)

    def emptied(self) -> None:
        self.is_empty = True
        for flow in list(self.outflows.values()):
            flow.drain()
        self.advance()

    def advance(self) -> None:
        """Over, once all is dead and sent."""
        if not self.is_empty or self.is_over or any(flow.fd >= 0 for flow in self.outflows.values()):
            return
        if not self.is_silent:
            assert self.end is not None
            status, usage = self.end
            self._tell(status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * KIB, self._trouble_text())
        self.close()

    def _tell(self, status: int, user: float, system: float, peak: int, trouble: str) -> None:
        is_killed = status & 0x7F == signal.SIGKILL  # to ask why takes a clone 4 ms
        end = END.pack(status, user, system, peak, is_killed and self.box.has_oom_kill())
        self.agent.send(EXIT, self.number, end + (trouble or "\0").encode("utf-8", "replace"))

    def _trouble_text(self) -> str:
        try:
            return os.read(self.trouble, 4096).decode("utf-8", "replace")
        except BlockingIOError:
            return ""

    def abandon(self) -> None:
        """Nobody listens any more: kill it, drop what it says."""
        self.is_silent = True
        self.drop_flows()
        if not self.pid:
            self.close()
        elif self.end is None:
            self.signal(signal.SIGKILL)
        else:
            self.box.hurry(self.agent)
        self.advance()

    def drop_flows(self) -> None:
        for flow in list(self.inflows.values()) + list(self.outflows.values()):
            flow.drop()

    def close(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        for fd in (self.trouble, self.master):
            if fd >= 0:
                os.close(fd)
        if self.zygote is not None:
            self.zygote.discard()
        self.agent.later.append(self.box.discard)
        self.agent.later.append(self.guest.after_payload)
        self.gone(self)


class Errand:
    """Work that may block, in a child: whoever asked for it is answered when it is done, or out of time."""

    def __init__(
        self,
        agent: "Reactor",
        among: "list[Errand]",
        numbers: "list[int]",
        seconds: int,
        late: "Late",
        work: "Work",
    ) -> None:
        self.agent, self.among, self.numbers, self.late = agent, among, numbers, late
        self.deadline = time.monotonic() + seconds
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.set_wakeup_fd(-1)
            os._exit(self._run(writing, work))
        os.close(writing)
        among.append(self)
        agent.watch(self.reading, select.EPOLLIN, self._done)
        signal.alarm(max(1, seconds))

    @staticmethod
    def _run(writing: int, work: "Work") -> int:
        try:
            said = b"done\0" + (work() or b"")
        except Refused as exc:
            said = ("%s\0%s" % (exc.kind, exc.message[:2000])).encode("utf-8", "replace")
        except BaseException as exc:
            said = ("refused\0%s: %s" % (type(exc).__name__, exc)).encode("utf-8", "replace")[:2000]
        os.write(writing, said)
        return 0

    def _done(self, events: int) -> None:
        said = os.read(self.reading, 4096)
        self._close()
        kind, _, message = said.decode("utf-8", "replace").partition("\0")
        for number in self.numbers:
            if kind == "done":
                self.agent.send(REPLY, number, message.encode("utf-8"))
            else:
                self.agent.refuse(number, kind or "refused", message or "a child of the agent was killed")

    def look_at_the_clock(self) -> None:
        """Out of time: the answer is given without the child, which may be where no signal reaches it."""
        if time.monotonic() < self.deadline:
            return
        self.abandon()
        for number in self.numbers:
            self.agent.refuse(number, *self.late)

    def _close(self) -> None:
        self.agent.unwatch(self.reading)
        os.close(self.reading)
        self.among.remove(self)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        kill_quietly(self.pid, signal.SIGKILL)
        self._close()
