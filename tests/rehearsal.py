"""The real agent as an ordinary process of this host: payloads really run, as this user; identity, clock, mounts and accounts are
only said to be changed."""

from __future__ import annotations

import inspect
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from belljar.agent import bundle
from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Family
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.system import Refused, libc, now
from belljar.agent.loop.loop import serve
from belljar.agent.wire import Words, join

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
        libc.adopt_orphans()

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

    def box(self) -> Family:
        return Family()

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
    own = (inspect.getsource(part) for part in (Rehearsal, begin))
    ours, its = socket.socketpair()
    program = "\n\n".join(
        (
            agent.decode(),
            "import shutil, tempfile",
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
