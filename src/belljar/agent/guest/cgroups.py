"""What keeps a payload's processes together: a control group, or its session where the kernel has none."""

from __future__ import annotations

import _signal as signal
import os
import select
from _collections_abc import Callable

from belljar.agent.guest.system import is_below, kill_quietly, processes, read_file, say, write_quietly
from belljar.agent.loop.channel import Channel
from belljar.agent.wire import MIB


class Cgroup:
    """A control group (version 2). Whatever a process of it forks stays in it."""

    count = 0
    is_patient = False  # what is left may end by itself

    def __init__(self, parent: str) -> None:
        Cgroup.count += 1
        self.path = f"{parent}/{os.getpid()}.{Cgroup.count}"
        os.mkdir(self.path)
        self.procs = os.open(self.path + "/cgroup.procs", os.O_RDWR | os.O_CLOEXEC)
        self.events = os.open(self.path + "/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        self.then: Callable[[], None] | None = None

    def join(self) -> None:
        """In the child."""
        os.write(self.procs, b"0")

    def clear(self, agent: Channel, pid: int, then: Callable[[], None]) -> None:
        """Kill all that is left, unless patient; call *then* once nothing is."""
        if self._is_empty():
            return then()
        self.agent, self.then = agent, then
        agent.watch(self.events, select.EPOLLPRI, self.look)
        self.look()

    def look(self, events: int = 0) -> None:
        """Once `clear` was called: whether all is over, and if not, whether to wait for that."""
        then = self.then
        if then is not None and self._is_empty():
            self.then = None
            self.agent.unwatch(self.events)
            then()
        elif then is not None and not self.is_patient:
            self._kill()

    def _is_empty(self) -> bool:
        return b"populated 0" in os.pread(self.events, 256, 0)

    def _kill(self) -> None:
        if write_quietly(self.path + "/cgroup.kill", b"1"):
            return
        write_quietly(self.path + "/cgroup.freeze", b"1")  # before Linux 5.14: what is frozen cannot fork away from us
        for pid in os.pread(self.procs, MIB, 0).split():
            kill_quietly(int(pid), signal.SIGKILL)

    def has_oom_kill(self) -> bool:
        counts = read_file(self.path + "/memory.events", 512).splitlines()
        return any(line.startswith(b"oom_kill ") and line != b"oom_kill 0" for line in counts)

    def discard(self) -> None:
        os.close(self.procs)
        os.close(self.events)
        try:
            os.rmdir(self.path)
        except OSError as exc:
            say(f"{self.path}: {exc.strerror}")


class Family:
    """Without control groups: the payload's session, and orphans; one with a new session is the last payload's."""

    live: list[Family] = []
    is_patient = False  # what is left may end by itself

    def __init__(self) -> None:
        self.pid = 0
        self.then: Callable[[], None] | None = None
        Family.live.append(self)

    def join(self) -> None:
        pass

    def clear(self, agent: Channel, pid: int, then: Callable[[], None]) -> None:
        self.pid, self.then = pid, then
        agent.on_child = self.look
        self.look()

    @staticmethod
    def look() -> None:
        for family in list(Family.live):
            if family.then is not None and not family._kill():
                then, family.then = family.then, None
                then()

    def _kill(self) -> bool:
        """Kill what is left; False when nothing is. SIGCHLD reports the end of each."""
        rows = processes()
        others = [family for family in Family.live if family is not self and (family.then is None or family.is_patient)]
        doomed = [pid for pid, row in rows.items() if row[1] == self.pid]
        if not others:
            doomed += [pid for pid in rows if is_below(os.getpid(), pid, rows)]
        for pid in () if self.is_patient else doomed:
            kill_quietly(pid, signal.SIGKILL)
        return bool(doomed)

    def has_oom_kill(self) -> bool:
        return False

    def discard(self) -> None:
        Family.live.remove(self)


Box = Cgroup | Family
