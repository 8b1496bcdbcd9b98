"""A start that is given up: whatever moment that comes at, nothing of the machine is made on this host afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BelljarError, LibvirtRefused
from belljar.hypervisor import LibvirtSettings
from belljar.hypervisor.libvirt.lines import Lines
from belljar.hypervisor.libvirt.starting import Attempt, Started

LONGEST = 20.0  # seconds for a thread to do its part


class Moment:
    """Where a thread stands until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.may_go = threading.Event(), threading.Event()

    def stand(self) -> None:
        self.reached.set()
        assert self.may_go.wait(LONGEST)


class Link:
    def __init__(self) -> None:
        self.lost = ""

    def call(self, what: str, work: Any, timeout: float | None = None) -> Any:
        raise AssertionError(f"a start that was given up asks for {what}")

    def abandon(self, why: str = "closed") -> None:
        self.lost = self.lost or why


class Daemon:
    def __init__(self) -> None:
        self.link, self.connecting = Link(), Moment()

    def connect(self) -> Link:
        self.connecting.stand()
        return self.link


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "l" / "0123456789ab"
        self.daemon, self.writing = Daemon(), Moment()
        self.error: BaseException | None = None
        self.lines = Lines(self.folder, (os.geteuid(), os.getegid()))
        spec: Any = None  # nothing is asked of libvirt
        connect: Any = self.daemon.connect
        self.attempt = Attempt(spec, connect, LibvirtSettings(), self.lines, self._write, lambda: 0, "qemu")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _write(self) -> str:
        self.writing.stand()
        (self.folder / "kernel").touch()  # a copy for QEMU's user
        return "<domain/>"

    def _run(self) -> None:
        try:
            self.attempt.run()
        except BelljarError as error:
            self.error = error

    def start(self) -> None:
        self._thread.start()

    def ended(self) -> BaseException | None:
        self._thread.join(LONGEST)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def was_given_up(bench: Bench) -> None:
    error = bench.ended()
    assert isinstance(error, LibvirtRefused) and "given up" in error.message
    assert not bench.folder.exists()


def test_a_start_that_was_given_up_before_it_began_makes_nothing(bench: Bench) -> None:
    bench.attempt.give_up()
    bench.start()
    was_given_up(bench)
    assert not bench.writing.reached.is_set() and not bench.folder.parent.exists()


def test_giving_up_waits_for_what_is_being_made(bench: Bench) -> None:
    bench.start()
    assert bench.writing.reached.wait(LONGEST)
    giving_up = threading.Thread(target=bench.attempt.give_up, daemon=True)
    giving_up.start()
    giving_up.join(0.05)
    assert giving_up.is_alive() and bench.folder.exists()
    bench.writing.may_go.set()
    giving_up.join(LONGEST)
    assert not giving_up.is_alive()
    bench.daemon.connecting.may_go.set()
    was_given_up(bench)


def test_a_connection_that_comes_too_late_is_not_used(bench: Bench) -> None:
    bench.start()
    bench.writing.may_go.set()
    assert bench.daemon.connecting.reached.wait(LONGEST)
    bench.attempt.give_up()
    bench.daemon.connecting.may_go.set()
    was_given_up(bench)
    assert bench.daemon.link.lost


def test_a_domain_that_nobody_takes_ends(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start was done when it was given up, and the cancelled task never saw it."""
    process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
    ends = [*socket.socketpair(), *socket.socketpair()]

    def start(document: str) -> Started:
        link: Any = bench.daemon.link
        pidfd = os.pidfd_open(process.pid)
        return Started(link, None, process.pid, pidfd, ("qemu",), ends[0], ends[2], None, bench.lines)

    monkeypatch.setattr(bench.attempt, "_start", start)
    bench.writing.may_go.set()
    bench.start()
    assert bench.ended() is None and bench.folder.exists()
    bench.attempt.give_up()
    assert process.wait(LONGEST) == -signal.SIGKILL and bench.daemon.link.lost
    assert not bench.folder.exists() and {ends[0].fileno(), ends[2].fileno()} == {-1}
    for end in ends:
        end.close()
