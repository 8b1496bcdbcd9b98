"""The real agent as an ordinary process of this host: payloads really run, as this user; identity, clock, mounts and accounts are
only said to be changed."""

from __future__ import annotations

import inspect
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from belljar.agent import bundle
from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Box
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import Refused, libc, now, read_file
from belljar.agent.loop.channel import Channel
from belljar.agent.loop.loop import serve
from belljar.agent.wire import Words, join

LIVE: list[OrphansBox] = []


class OrphansBox(Box):
    """In the place of a control group, which an ordinary user may not have: a payload's session, and once no other payload runs, all
    that is below us. Whatever is left is watched by its pidfd."""

    def __init__(self) -> None:
        self.pid, self.left = 0, dict[int, int]()
        LIVE.append(self)

    def join(self) -> None:
        pass

    def clear(self, agent: Channel, pid: int, then: Callable[[], None]) -> None:
        self.agent, self.pid, self.then = agent, pid, then
        self._look()

    def _look(self, events: int = 0) -> None:
        for box in [box for box in LIVE if box.pid]:
            box.look()

    def look(self) -> None:
        mine = self.remaining()
        for pid in self.left.keys() - mine:
            self.agent.unwatch(self.left[pid])
            os.close(self.left.pop(pid))
        for pid in mine:
            with suppress(ProcessLookupError):
                if pid not in self.left:
                    self.left[pid] = os.pidfd_open(pid)
                    self.agent.watch(self.left[pid], select.EPOLLIN, self._look)
                if not self.is_patient:
                    os.kill(pid, signal.SIGKILL)
        if not mine and self.then:
            then, self.pid, self.then = self.then, 0, None
            then()

    def remaining(self) -> set[int]:
        """Processes that have not ended: of the session, and of nobody else's."""
        rows = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            words = read_file(f"/proc/{entry}/stat", 1024).rpartition(b")")[2].split()
            if words and words[0] not in (b"Z", b"X"):
                rows[int(entry)] = int(words[1]), int(words[3])
        left = {pid for pid, (_, session) in rows.items() if session == self.pid}
        if any(box is not self and (not box.pid or box.is_patient) for box in LIVE):
            return left
        for pid in rows:
            above = rows[pid][0]
            while above in rows and above != os.getpid():
                above = rows[above][0]
            if above == os.getpid():
                left.add(pid)
        return left

    def has_oom_kill(self) -> bool:
        return False

    def discard(self) -> None:
        LIVE.remove(self)


GUARD = b'\nif __name__ == "__main__":'


class Rehearsal(Guest):
    """A guest to which nothing happens."""

    quiet = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.hold_socket = f"/tmp/belljar-rehearsal-{os.getpid()}.sock"
        self.made: list[str] = []
        self.calls = {
            b"identify": self.identify, b"set_clock": lambda words: now(), b"prepare": lambda words: b"",
            b"renew_keys": lambda words: b"", b"mount": self.mount_nothing,
        }  # fmt: skip

    def prepare(self) -> None:
        libc._call("prctl", "prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: the payloads' orphans are ours

    def identify(self, words: Words) -> bytes:
        name, machine_id, nonce, mac = words.next(), words.next(), words.next(), words.next()
        return join(name, machine_id, nonce, mac, os.urandom(32).hex().encode("ascii"), now())

    def mount_nothing(self, words: Words) -> bytes:
        raise Refused("no-filesystem", "a rehearsal mounts nothing")

    def growth(self) -> bytes:
        return b""

    def add_account(self, account: Account) -> None:
        pass

    def new_folder(self, account: Account) -> bytes:
        self.made.append(tempfile.mkdtemp(prefix="belljar-rehearsal-"))
        return self.made[-1].encode()

    def box(self) -> OrphansBox:
        return OrphansBox()

    def warm(self, fork: Callable[[], None]) -> None:
        fork()

    def release(self) -> None:
        while self.made:
            shutil.rmtree(self.made.pop(), ignore_errors=True)

    def make_place(self, path: bytes, account: Account) -> None:
        pass

    def after_payload(self) -> None:
        pass

    def give(self, what: int | bytes, account: Account, group: int | None = None) -> None:
        pass

    def leave_agent(self) -> None:
        pass

    def become(self, account: Account) -> None:
        pass


def begin(fd: int) -> None:
    os.set_inheritable(fd, False)
    world = Rehearsal()
    world.prepare()
    serve(fd, world, is_port=False)


@contextmanager
def rehearse() -> Iterator[socket.socket]:
    """Our end of a channel to the agent, as guests get it: one file. It ends with the block."""
    agent, guard, _ = bundle.source().partition(GUARD)
    assert guard
    own = (inspect.getsource(part) for part in (OrphansBox, Rehearsal, begin))
    ours, its = socket.socketpair()
    program = "\n\n".join(
        (
            agent.decode(),
            "import shutil, tempfile",
            "LIVE = []",
            *own,
            f"begin({its.fileno()})",
        )
    )
    command = [sys.executable, "-I", "-S", "-"]
    with ours, its, subprocess.Popen(command, pass_fds=(its.fileno(),), stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(program.encode())
        process.stdin.close()
        its.close()
        try:
            yield ours
        finally:
            ours.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
