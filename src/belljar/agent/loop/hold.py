"""Held programs: one of a preparation says that it is ready, and waits in the template. In each clone it gets the first payload's
order, and is that payload from then on.

It speaks over a socket that is there as long as a preparation runs. To connect is to say "I am ready". The answer is an order, as
words with the standard streams beside them, or a reason; then the line is closed. belljar_hold.py is the other end.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import sys

from belljar.agent.guest.system import Refused, read_file, say, write_file
from belljar.agent.loop.channel import Channel
from belljar.agent.loop.payload import Job, Zygote, three_pipes
from belljar.agent.loop.process import Process
from belljar.agent.wire import join

HOLD_FOLDER = "/usr/lib/belljar"
HOLD_FILES = {"belljar_hold.py": "@belljar_hold.py", "belljar_hold.h": "@belljar_hold.h"}  # filled in by the bundle
HOLD_COMMAND = '#!/bin/sh\nexec {0}/loader --library-path {0} {0}/python -I -S {1}/belljar_hold.py "$@"\n'
CREDENTIALS = struct.Struct("3i")


def install_hold() -> None:
    """Put what programs of the guest hold themselves by where they look for it. Our own interpreter is beside this program."""
    agent = os.path.dirname(os.path.abspath(sys.argv[0]))
    try:
        os.makedirs(HOLD_FOLDER, exist_ok=True)
        for name, text in HOLD_FILES.items():
            write_file(f"{HOLD_FOLDER}/{name}", text.encode())
        write_file(f"{HOLD_FOLDER}/belljar-hold", HOLD_COMMAND.format(agent, HOLD_FOLDER).encode(), 0o755)
    except OSError as exc:
        say(f"{HOLD_FOLDER}: {exc.strerror}: no program can be held")


class Held(Zygote):
    """A child that is there already: it runs, has loaded what it needs, and waits for its order."""

    def __init__(self, process: Process, line: _socket.socket) -> None:
        self.box, self.pid, self.trouble, self.line = process.box, process.pid, process.trouble, line
        self.inner, self.outer = three_pipes()

    def go(self, job: Job) -> None:
        """Hand over the order and the standard streams."""
        job.read_rest()
        account, null = job.account, os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        argv = [job.path, *job.argv[1:]] if job.path else job.argv
        groups = [b"%d" % group for group in account.group_ids]
        limits = [word for row in job.rlimits for word in row]
        env = [word for pair in job.env.items() for word in pair]
        head = [b"job", job.stdio.encode(), b"%d" % job.umask, job.cwd, b"%d" % account.uid, b"%d" % account.gid]
        data = join(
            *head, b"%d" % len(groups), *groups, b"%d" % len(job.rlimits), *limits, b"%d" % len(argv), *argv,
            b"%d" % len(job.env), *env,
        )  # fmt: skip
        files = [{"s": fd, "o": self.inner[1]}.get(kind, null) for kind, fd in zip(job.stdio, self.inner, strict=True)]
        try:  # a child that was forked since has the line, too: that it ends is said
            rights = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("3i", *files))
            self.line.sendall(data[self.line.sendmsg([data], [rights]) :])
            self.line.shutdown(_socket.SHUT_WR)
        except OSError:
            pass  # its end says more
        os.close(null)
        self.line.close()


class Holder:
    """Where the programs of a preparation say that they are ready; at most one is held."""

    def __init__(self, agent: Channel, path: str) -> None:
        self.agent, self.path = agent, path
        self.listener: _socket.socket | None = None
        self.preparation: Process | None = None  # whose program is held
        self.line: _socket.socket | None = None
        self.uid = 0  # of that program

    def open(self, preparation: Process) -> None:
        """From now on it may say so."""
        self.preparation, self.listener = preparation, _socket.socket(_socket.AF_UNIX)
        self.listener.bind(self.path)
        os.chmod(self.path, 0o666)
        self.listener.listen()
        self.agent.watch(self.listener.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """What is held stays so; no other can be."""
        if self.listener is not None:
            self.agent.unwatch(self.listener.fileno())
            self.listener.close()
            os.unlink(self.path)
            self.listener = None
        if self.line is None:
            self.preparation = None

    def _accept(self, events: int) -> None:
        assert self.listener is not None and self.preparation is not None
        line = _socket.socket(fileno=self.listener._accept()[0])  # type: ignore[attr-defined]
        if self.line is not None or self.preparation.end is not None:
            line.send(b"another program is held already, or the preparation has ended")
            line.shutdown(_socket.SHUT_WR)
            return line.close()
        self.line = line
        self.uid = CREDENTIALS.unpack(line.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, CREDENTIALS.size))[1]
        self.preparation.hold()

    def take(self, job: Job) -> Held | None:
        """The held program for its job, once; None where there is none. Raises Refused."""
        if self.preparation is None or self.line is None or self.listener is not None:
            return None
        if job.terminal:
            raise Refused("refused", "a held program takes no terminal: leave --tty out")
        if self.uid not in (0, job.account.uid):
            problem = f"the held program runs as uid {self.uid} and cannot become uid {job.account.uid}"
            raise Refused("refused", f"{problem}: prepare the image as root, or as the job's user")
        if self.preparation.end is not None or select.select([self.line], [], [], 0)[0]:
            raise Refused("refused", "the held program has ended before it was given a job")
        held, self.preparation = Held(self.preparation, self.line), None
        return held


def spent(pid: int) -> tuple[float, float]:
    """Processor seconds of a process and the children that it has waited for, the user's and the system's, so far."""
    words = read_file(f"/proc/{pid}/stat", 1024).rpartition(b")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return (int(words[11]) + int(words[13])) / tick, (int(words[12]) + int(words[14])) / tick
