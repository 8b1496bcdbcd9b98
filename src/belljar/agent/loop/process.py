"""The agent's children: a payload, from its order to its EXIT, and errands, which may block."""

from __future__ import annotations

import _signal as signal
import os
import select
import time
from _collections_abc import Callable
from contextlib import suppress

from belljar.agent.guest.guest import Guest
from belljar.agent.guest.mounts import LongCall
from belljar.agent.guest.system import Refused, kill_quietly, shown
from belljar.agent.loop.channel import Channel, Usage
from belljar.agent.loop.payload import Job, Zygote, three_pipes
from belljar.agent.loop.streams import Inflow, Outflow
from belljar.agent.wire import CREDIT, DATA, END, EOF, EXIT, LEADER, REPLY, RESET, RESIZE, SIGNAL, STDIN, WINDOW

WAITS = b"held\0one of its programs waits for a job"
Gone = Callable[["Process"], None]


class Process:
    """A payload, or a file copy: one child, its streams, its box. Before its EXIT all is dead, and every byte sent."""

    def __init__(self, agent: Channel, guest: Guest, number: int, job: Job, zygote: Zygote | None, gone: Gone) -> None:
        self.agent, self.guest, self.number, self.job, self.gone = agent, guest, number, job, gone
        self.pid = 0
        self.inflows: dict[int, Inflow] = {}
        self.outflows: dict[int, Outflow] = {}
        self.zygote = zygote
        self.box = zygote.box if zygote else guest.box()
        self.trouble = -1
        self.master = -1
        self.end: tuple[int, Usage] | None = None
        self.was_ended = False  # TERM was sent to all of it
        self.is_empty = False  # no process of it is left
        self.is_held = False  # it waits for its job, in the clones of the template to be
        self.before = (0.0, 0.0)  # processor seconds that are not its job's
        self.is_silent = False  # its conversation is over
        self.is_over = False

    # -- the way in

    def launch(self) -> None:
        """Hand the order to a child: to the one that is there already, or to a new one. From now on it is the payload, and the
        outer ends are its streams."""
        base, is_terminal = 4 * self.number, bool(self.job.terminal)
        say_end = lambda terminal: os.write(terminal, b"\4")  # noqa: E731  # as a person says that nothing more comes
        if self.zygote is None:
            self.zygote = Zygote(self.guest, self.box, *(self._terminal() if is_terminal else three_pipes()))
        for fd in set(self.zygote.inner):
            self.guest.give(fd, self.job.account, 5 if is_terminal else None)
        zygote, self.zygote = self.zygote, None
        zygote.go(self.job)
        for fd in set(zygote.inner):
            os.close(fd)
        for index, (kind, fd) in enumerate(zip(self.job.stdio, zygote.outer, strict=False)):
            if kind != "s" and not is_terminal:
                os.close(fd)
            elif index == STDIN:
                self.inflows[base] = Inflow(self.agent, base, fd, self.advance, say_end if is_terminal else None)
            else:
                self.outflows[base + index] = Outflow(self.agent, base + index, fd, self.advance)
        self.pid, self.trouble = zygote.pid, zygote.trouble
        os.set_blocking(self.trouble, False)
        self.agent.children[self.pid] = self.ended

    def _terminal(self) -> tuple[list[int], list[int]]:
        """The payload's ends of a terminal, and ours: to be written to, and to be read."""
        self.master, slave = os.openpty()
        if self.job.terminal and self.job.terminal[0]:
            self.resize(*self.job.terminal)
        return [slave] * 3, [os.dup(self.master), os.dup(self.master)]

    @property
    def stays(self) -> bool:
        """Has it left something behind that goes on beyond the conversation, or does it wait itself?"""
        return self.is_held or (self.job.prepares and self.end is not None)

    # -- while it runs

    def take(self, kind: int, number: int, body: bytes) -> None:
        """A frame of the host's. One for a stream that is gone means nothing."""
        inflow, outflow = self.inflows.get(number), self.outflows.get(number)
        if kind == SIGNAL:
            self.signal(body[0])
        elif kind == RESIZE:
            self.resize(int.from_bytes(body[:2]), int.from_bytes(body[2:]))
        elif inflow and kind == DATA:
            inflow.feed(body)
        elif inflow and kind == EOF:
            inflow.end()
        elif inflow and kind == RESET:
            inflow.drop()
        elif outflow and kind == CREDIT:
            outflow.grant(int.from_bytes(body))
        elif outflow and kind == RESET:
            outflow.drop()

    def signal(self, number: int) -> None:
        """To its process group, or with LEADER to itself alone. What has ended is past hearing."""
        alone, number = number & LEADER, number & ~LEADER
        is_there = self.end is None or self.box.is_patient
        if self.pid and is_there and 0 < number <= 64:
            self.job.leaves = self.job.leaves and number != signal.SIGKILL
            if self.end is not None and number == signal.SIGKILL:
                self.box.is_patient = False
                return self.box.look()
            if alone:
                return kill_quietly(self.pid, number)
            self.was_ended = self.was_ended or number == signal.SIGTERM
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                if self.end is None:
                    kill_quietly(self.pid, number)  # its child has not come to its setsid yet

    def resize(self, rows: int, columns: int) -> None:
        import termios

        if self.master >= 0:
            termios.tcsetwinsize(self.master, (rows, columns))

    # -- the way out

    def ended(self, status: int, usage: Usage) -> None:
        """The main process is gone. What it left behind goes now, or in its own time where that was asked for."""
        user, system, peak = usage
        self.end = (status, (max(user - self.before[0], 0.0), max(system - self.before[1], 0.0), peak))
        for flow in self.inflows.values():
            flow.drop()
        self.box.is_patient = self.job.leaves or (self.job.lingers and self.was_ended)
        self.box.clear(self.agent, self.pid, self.emptied)
        if self.job.leaves and not self.is_empty:
            self._drain()

    def take_up(self) -> None:
        """Another conversation carries on with it, and has a window for each stream. It is told how much of its input it may send."""
        for flow in self.outflows.values():
            flow.credit = WINDOW
            flow.resume()
        for number, inflow in self.inflows.items():
            if inflow.fd < 0 or inflow.is_ended:
                self.agent.send(RESET, number)
            elif inflow.credit:
                self.agent.send(CREDIT, number, inflow.credit.to_bytes(4))
        self.agent.flush()

    def hold(self) -> None:
        """It waits for its job. For the host it ends so, once all that it said is sent."""
        self.is_held = True
        for flow in self.inflows.values():
            flow.drop()
        self._drain()

    def emptied(self) -> None:
        self.is_empty = True
        self._drain()

    def _drain(self) -> None:
        for flow in list(self.outflows.values()):
            flow.drain()
        self.advance()

    def advance(self) -> None:
        """Over, once all processes are dead and all output is sent. A job that leaves processes behind is over for the host before that."""
        is_told = self.is_empty or self.is_held or (self.job.leaves and self.end is not None)
        if not is_told or self.is_over or any(flow.fd >= 0 for flow in self.outflows.values()):
            return
        if not self.is_silent:
            status, usage = self.end or (0, (0.0, 0.0, 0))
            trouble = b"" if self.end else WAITS
            with suppress(BlockingIOError):
                trouble = trouble or os.read(self.trouble, 4096)
            is_killed = status & 0x7F == signal.SIGKILL  # to ask why takes a clone 4 ms
            end = END.pack(status, *usage, is_killed and self.box.has_oom_kill())
            self.agent.send(EXIT, self.number, end + (trouble or b"\0"))
            self.is_silent = True
        if self.is_empty:
            self.close()

    def leave(self) -> None:
        """Nobody listens any more: it goes on, and what it says is dropped."""
        self.is_silent = True
        for flow in self.inflows.values():
            flow.drop()
        for outflow in list(self.outflows.values()):
            outflow.mute()

    def abandon(self) -> None:
        """Nobody listens any more: kill it, drop what it says."""
        self.is_silent = True
        self.drop_flows()
        if self.pid:
            self.signal(signal.SIGKILL)
        else:
            self.close()
        self.advance()

    def drop_flows(self) -> None:
        for flow in (*self.inflows.values(), *self.outflows.values()):
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
        self.agent.later += [self.box.discard, self.guest.after_payload]
        self.gone(self)


class Errand:
    """Work that may block, in a child: its call is answered when it is done, or out of time."""

    def __init__(self, agent: Channel, errands: list[Errand], number: int, name: bytes, call: LongCall) -> None:
        seconds, work = call
        self.late = f"{shown(name)}: not done in the guest within {seconds} s"
        self.agent, self.errands, self.number = agent, errands, number
        self.deadline = time.monotonic() + seconds
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            signal.set_wakeup_fd(-1)
            os.write(writing, self._answer(work))
            os._exit(0)
        os.close(writing)
        errands.append(self)
        agent.watch(self.reading, select.EPOLLIN, self._done)
        look_at_the_clock(errands)

    @staticmethod
    def _answer(work: Callable[[], bytes | None]) -> bytes:
        try:
            return b"done\0" + (work() or b"")
        except Refused as exc:
            return f"{exc.kind}\0{exc.message[:2000]}".encode("utf-8", "replace")
        except BaseException as exc:
            return f"refused\0{type(exc).__name__}: {exc}".encode("utf-8", "replace")[:2000]

    def _done(self, events: int) -> None:
        kind, _, answer = os.read(self.reading, 4096).partition(b"\0")
        self._close()
        if kind == b"done":
            return self.agent.send(REPLY, self.number, answer)
        message = answer.decode("utf-8", "replace") or "a child of the agent was killed"
        self.agent.refuse(self.number, kind.decode() or "refused", message)

    def _close(self) -> None:
        self.agent.unwatch(self.reading)
        os.close(self.reading)
        self.errands.remove(self)

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        kill_quietly(self.pid, signal.SIGKILL)
        self._close()


def look_at_the_clock(errands: list[Errand]) -> None:
    """One that is out of time is answered without its child, which may be where no signal reaches it."""
    now = time.monotonic()
    for errand in [errand for errand in errands if errand.deadline <= now]:
        errand.abandon()
        errand.agent.refuse(errand.number, "refused", errand.late)
    if errands:
        signal.alarm(1 + int(min(errand.deadline for errand in errands) - now))
