"""Work of the agent that may block: in a child, answered in time, never in the agent's way. And the words of a mount."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.contracts.payloads import fed
from tests.rehearsal import Rehearsal

from belljar.agent import wire
from belljar.agent.guest import mounts
from belljar.agent.guest.mounts import nfs_options
from belljar.agent.guest.system import Refused
from belljar.agent.loop.loop import Agent
from belljar.errors import ExportRefused, GuestRefused, MountFailed, NoNfs, ShareNotFlushed
from belljar.guest.process import refusal


def test_the_options_of_a_mount_are_the_agents_own() -> None:
    assert nfs_options("4.2", "10.0.2.2", 20490) == b"vers=4.2,addr=10.0.2.2,port=20490,proto=tcp,sec=sys,hard"
    assert nfs_options("4.1", "fd00::1", 2049) == b"vers=4.1,addr=fd00::1,port=2049,proto=tcp6,sec=sys,hard"
    for address, port in (("10.0.2.2,soft", 1), ("", 1), ("host", 1), ("10.0.2.2", 0), ("10.0.2.2", 65536)):
        with pytest.raises(Refused):
            nfs_options("4.2", address, port)


def mounting(monkeypatch: pytest.MonkeyPatch, *answers: int) -> list[bytes]:
    """The options of each try, where the kernel answers so."""
    tried: list[bytes] = []

    def answer(source: bytes, target: bytes, flags: int, options: bytes) -> int:
        tried.append(options[:8])
        return answers[len(tried) - 1]

    monkeypatch.setattr(mounts, "try_mount", answer)
    monkeypatch.setattr(mounts, "load_modules", lambda names: None)
    return tried


def test_an_older_version_is_tried_where_the_newer_one_is_not_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = mounting(monkeypatch, errno.EPROTONOSUPPORT, errno.EINVAL, 0)
    mounts.mount_nfs("10.0.2.2", 1, b"/x", b"/tmp", 0)
    assert tried == [b"vers=4.2", b"vers=4.1", b"vers=4.0"]


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((errno.ENODEV, errno.ENODEV), "no-nfs"),
        ((errno.EPROTONOSUPPORT,) * 3, "no-nfs"),  # the kernel that runs this has not loaded NFS 4
        ((errno.ENOENT,), "nfs-refused"),
        ((errno.EACCES,), "nfs-refused"),
        ((errno.ECONNREFUSED,), "nfs-silent"),
        ((errno.ETIMEDOUT,), "nfs-silent"),
    ],
)
def test_why_a_mount_failed_is_told_by_kind(monkeypatch: pytest.MonkeyPatch, answers: tuple[int], kind: str) -> None:
    mounting(monkeypatch, *answers)
    monkeypatch.setattr(mounts, "read_file", lambda path: b"nodev\tnfs\n")
    with pytest.raises(Refused) as caught:
        mounts.mount_nfs("10.0.2.2", 1, b"/x", b"/tmp", 0)
    assert caught.value.kind == kind


def test_each_kind_is_an_error_of_its_own() -> None:
    wanted = {"no-nfs": NoNfs, "nfs-refused": ExportRefused, "nfs-silent": MountFailed, "nfs-flush": ShareNotFlushed}
    for kind, error in (*wanted.items(), ("other", GuestRefused)):
        assert type(refusal(f"{kind}\0why".encode())) is error


class World(Rehearsal):
    """Has a file server's export, whose mount and whose release do what they are given."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work, self.is_remote = work, True
        self.errands[b"mount_nfs"] = lambda words: (*mounts.Mounts().mount_nfs(words)[:2], work)

    def has_remote(self) -> bool:
        return self.is_remote

    def forget_mounts(self) -> None:
        self.is_remote = False

    def release(self) -> None:
        self.work()


@contextmanager
def host_of(work: Callable[[], None]) -> Iterator[Callable[..., list[bytes]]]:
    """An agent in a process of its own, and a function: call it, and get what it answers."""
    here, there = socket.socketpair()
    pid = os.fork()
    if not pid:
        here.close()
        Agent(there.fileno(), World(work), is_port=False).run()
        os._exit(0)
    there.close()
    here.settimeout(30)
    parser = wire.Parser(wire.TO_HOST, wire.greeting(b"n" * 16))
    here.sendall(wire.greeting(b"n" * 16))

    def answers(count: int, *frames: bytes) -> list[bytes]:
        here.sendall(b"".join(frames))
        found: list[tuple[int, int, bytes]] = []
        while len(found) < count:
            found += [one for one in fed(parser, here.recv(65536)) if one[0] not in (wire.GREETING, wire.HELLO)]
        return [b"%d %d " % (kind, number) + body for kind, number, body in found]

    try:
        yield answers
    finally:
        here.close()
        os.waitpid(pid, 0)


def call(number: int, *words: bytes) -> bytes:
    return wire.frame(wire.CALL, number, wire.join(*words))


EXPORT = (b"10.0.2.2", b"2049", b"/export", b"/mnt", b"rw")
PING = wire.frame(wire.PING, 0, bytes(8))


def test_while_a_mount_blocks_the_agent_answers_and_at_its_deadline_the_mount_is_refused() -> None:
    began = time.monotonic()
    with host_of(threading.Event().wait) as answers:  # type: ignore[arg-type]
        pong, refused = answers(2, call(7, b"mount_nfs", b"1", *EXPORT), PING)
    assert pong == b"%d 0 " % wire.PONG + bytes(8)
    assert refused.startswith(b"%d 7 nfs-silent\0" % wire.ERROR) and b"within 1 s" in refused
    assert 1 <= time.monotonic() - began < 10


def test_a_flush_that_blocks_is_told_at_its_deadline() -> None:
    with host_of(threading.Event().wait) as answers:  # type: ignore[arg-type]
        (refused,) = answers(1, call(8, b"end_payload", b"1"))
    assert refused.startswith(b"%d 8 nfs-flush\0" % wire.ERROR)


def test_what_the_work_says_is_the_answer() -> None:
    def fails() -> None:
        raise Refused("nfs-flush", "no space")

    for work, wanted in ((fails, b"%d 8 nfs-flush\0no space" % wire.ERROR), (lambda: None, b"%d 8 " % wire.REPLY)):
        with host_of(work) as answers:
            assert answers(1, call(8, b"end_payload", b"5")) == [wanted]


def test_a_child_that_is_killed_is_an_answer_too() -> None:
    with host_of(lambda: os.kill(os.getpid(), 9)) as answers:
        (refused,) = answers(1, call(9, b"mount_nfs", b"20", *EXPORT))
    assert refused.startswith(b"%d 9 refused\0" % wire.ERROR)
