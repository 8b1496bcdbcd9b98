"""What keeps a payload's processes together: a control group, or its session where the kernel has none."""

import os
import select

from belljar.agent.guest.system import is_below, kill_quietly, processes, read_file, say, write_file
from belljar.agent.wire import MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Callable

    from belljar.agent.roles import Reactor
else:  # what is below the library's modules of these names, and much quicker to import
    import _signal as signal


class Cgroup:
    """A control group (version 2). Whatever a process of it forks stays in it."""

    count = 0
    is_patient = False  # what is left may end by itself

    def __init__(self, parent: str) -> None:
        Cgroup.count += 1
        self.path = "%s/%d.%d" % (parent, os.getpid(), Cgroup.count)
        os.mkdir(self.path)
        self.procs = os.open(self.path + "/cgroup.procs", os.O_RDWR | os.O_CLOEXEC)
        self.events = os.open(self.path + "/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
        self.then = None  # type: Callable[[], None] | None

    def join(self) -> None:
        os.write(self.procs, b"0")

    def clear(self, reactor: "Reactor", pid: int, then: "Callable[[], None]") -> None:
        if self._is_empty():
            return then()
        self.then = then
        reactor.watch(self.events, select.EPOLLPRI, lambda events: self._changed(reactor))
        self._changed(reactor)

    def _changed(self, reactor: "Reactor") -> None:
        then = self.then
        if then is None:
            return
        if self._is_empty():
            self.then = None
            reactor.unwatch(self.events)
            then()
        elif not self.is_patient:
            self._kill()

    def hurry(self, reactor: "Reactor") -> None:
        self.is_patient = False
        self._changed(reactor)

    def _is_empty(self) -> bool:
        return b"populated 0" in os.pread(self.events, 256, 0)

    def _kill(self) -> None:
        try:
            write_file(self.path + "/cgroup.kill", b"1", flags=0)
        except OSError:  # older than Linux 5.14: what is frozen cannot fork away from us
            try:
                write_file(self.path + "/cgroup.freeze", b"1", flags=0)
            except OSError:
                pass
            for pid in os.pread(self.procs, MIB, 0).split():
                kill_quietly(int(pid), signal.SIGKILL)

    def has_oom_kill(self) -> bool:
        for line in read_file(self.path + "/memory.events", 512).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1]) > 0
        return False

    def discard(self) -> None:
        os.close(self.procs)
        os.close(self.events)
        try:
            os.rmdir(self.path)
        except OSError as exc:
            say("%s: %s" % (self.path, exc.strerror))


class Family:
    """Without control groups: the payload's session, and orphans; one with a new session is the last payload's."""

    live = []  # type: list[Family]
    is_patient = False  # what is left may end by itself

    def __init__(self) -> None:
        self.pid = 0
        self.then = None  # type: Callable[[], None] | None
        Family.live.append(self)

    def join(self) -> None:
        pass

    def clear(self, reactor: "Reactor", pid: int, then: "Callable[[], None]") -> None:
        self.pid, self.then = pid, then
        reactor.on_child = self._look_again
        self._look_again()

    @staticmethod
    def _look_again() -> None:
        for family in list(Family.live):
            if family.then is not None and not family._kill():
                then, family.then = family.then, None
                then()

    def _kill(self) -> bool:
        """Kill what is left; False when nothing is. The end of each is told to us by SIGCHLD."""
        rows = processes()
        others = set(family.pid for family in Family.live if family.then is None)
        doomed = [pid for pid, row in rows.items() if row[1] == self.pid]
        if not others:
            doomed += [pid for pid in rows if is_below(os.getpid(), pid, rows)]
        for pid in () if self.is_patient else doomed:
            kill_quietly(pid, signal.SIGKILL)
        return bool(doomed)

    def hurry(self, reactor: "Reactor") -> None:
        self.is_patient = False
        self._look_again()

    def has_oom_kill(self) -> bool:
        return False

    def discard(self) -> None:
        Family.live.remove(self)
