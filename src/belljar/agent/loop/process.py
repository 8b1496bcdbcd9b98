"""The agent's children: a payload, from its order to its EXIT, and errands, which may block."""

import os
import select
import struct
import time

from belljar.agent.guest.system import Refused, kill_quietly
from belljar.agent.loop.payload import Job, Zygote, run_child
from belljar.agent.loop.streams import Inflow, Outflow, ScriptFlow
from belljar.agent.wire import END, EXIT, FAILED, KIB, LEADER, REPLY, SCRIPT, STDIN, STDOUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, Callable

    from belljar.agent.roles import Late, Reactor, Work, World
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


class Process:
    """A payload, or a file copy: one child, its streams, its box. Everything of it is dead and every byte of it sent
    before its EXIT is."""

    def __init__(
        self,
        agent: "Reactor",
        world: "World",
        number: int,
        job: Job,
        zygote: "Zygote | None",
        gone: "Callable[[Process], None]",
    ) -> None:
        self.agent, self.world, self.number, self.job, self.gone = agent, world, number, job, gone
        self.pid = 0
        self.inflows = {}  # type: dict[int, Inflow]
        self.outflows = {}  # type: dict[int, Outflow]
        self.zygote = zygote
        self.box = zygote.box if zygote else world.box()
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
        self.job.path = (
            self.world.new_folder(self.job.account) + b"/" + (name if name not in (b"", b".", b"..") else b"script")
        )
        fd = os.open(self.job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
        os.fchmod(fd, 0o700)
        self.world.give(fd, self.job.account)
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
        """Fork, or let the child go on that is there already. The parent keeps the far ends of the pipes."""
        if self.zygote is not None:
            zygote, self.zygote = self.zygote, None
            if self._release(zygote):
                return
        files, inner = self._terminal() if self.job.terminal else self._pipes()
        trouble, trouble_inner = os.pipe()
        inner.append(trouble_inner)
        try:
            pid = os.fork()
        except OSError:
            os.close(trouble)
            raise
        if not pid:
            run_child(self.job, self.world, self.box, files, trouble_inner)
        for fd in inner:
            os.close(fd)
        self.pid, self.trouble = pid, trouble
        os.set_blocking(trouble, False)
        self.agent.children[pid] = self.ended

    def _release(self, zygote: Zygote) -> bool:
        """The zygote becomes the payload; False when it died before its time."""
        base = 4 * self.number
        try:
            for fd in zygote.inner:
                self.world.give(fd, self.job.account)
            zygote.go(self.job)
        except OSError:
            zygote.discard()
            self.box = self.world.box()
            return False
        for fd in zygote.inner:
            os.close(fd)
        for index, (kind, fd) in enumerate(zip(self.job.stdio, zygote.outer)):
            if kind != "s":
                os.close(fd)
            elif index == STDIN:
                self.inflows[base] = Inflow(self.agent, base, fd)
            else:
                self.outflows[base + index] = Outflow(self.agent, base + index, fd, self.advance)
        self.pid, self.trouble = zygote.pid, zygote.trouble
        os.set_blocking(self.trouble, False)
        self.agent.children[self.pid] = self.ended
        return True

    def _pipes(self) -> "tuple[list[int], list[int]]":
        """The child's three descriptors, and those of them the parent closes afterwards."""
        files, inner = [], []
        base = 4 * self.number
        for index, kind in enumerate(self.job.stdio):
            if kind in ("c", "o"):
                files.append(STDOUT if kind == "o" else -1)
                continue
            if kind == "n":
                fd = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            else:
                reader, writer = os.pipe()
                if index == STDIN:
                    fd = reader
                    self.inflows[base] = Inflow(self.agent, base, writer)
                else:
                    fd = writer
                    self.outflows[base + index] = Outflow(self.agent, base + index, reader, self.advance)
                self.world.give(fd, self.job.account)
            files.append(fd)
            inner.append(fd)
        return files, inner

    def _terminal(self) -> "tuple[list[int], list[int]]":
        base = 4 * self.number
        self.master, slave = os.openpty()
        if self.job.terminal and self.job.terminal[0]:
            self.resize(*self.job.terminal)
        self.world.give(slave, self.job.account, 5)
        self.inflows[base] = Inflow(self.agent, base, os.dup(self.master), is_terminal=True)
        self.outflows[base + STDOUT] = Outflow(self.agent, base + STDOUT, os.dup(self.master), self.advance)
        return [slave] * 3, [slave]

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
        end = END.pack(status, user, system, peak, self.box.has_oom_kill())
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
        self.agent.later.append(self.world.after_payload)
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
