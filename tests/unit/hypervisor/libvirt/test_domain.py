"""A domain of libvirt's and what ends it: a process stands in for QEMU, a connection without libvirt for libvirt's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import DomainDied, LibvirtLost, LibvirtRefused
from belljar.hypervisor import DomainEvent, EventKind
from belljar.hypervisor.libvirt import domain as domains
from belljar.hypervisor.libvirt.domain import LibvirtDomain


class Connection:
    """A connection whose calls go as told."""

    on_event: Any
    on_loss: Any

    def __init__(self) -> None:
        self.lost, self.error, self.asked = "", None, list[str]()
        self.ended = asyncio.Event()
        self.channel, self.console = socket.socketpair()

    async def call(self, verb: str, *words: Any, what: str) -> None:
        self.asked.append(words[0])
        if self.error is not None:
            raise self.error

    def end(self, why: str = "closed") -> None:
        self.lost = self.lost or why
        self.ended.set()

    def break_down(self, why: str) -> None:
        self.end(why)
        self.on_loss(why)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        self.connection: Any = Connection()
        (folder / "libvirts.log").write_bytes(b"")
        logs = folder / "libvirts.log", folder / "qemu.log"
        self.domain = LibvirtDomain(self.connection, self.process.pid, logs)

    def tell(self, kind: EventKind, detail: str = "") -> None:
        self.connection.on_event(DomainEvent(kind, detail))

    async def events(self) -> list[DomainEvent]:
        async with asyncio.timeout(20):
            return [event async for event in self.domain.events()]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    try:
        yield bench
    finally:
        bench.process.kill()
        bench.process.wait()
        bench.tell(EventKind.EXITED, "destroyed")  # as libvirt does of each
        await bench.domain.quit(grace=0.0)
        bench.domain.channel.close()
        bench.domain.console.close()
    assert not (folder / "libvirts.log").exists()


async def test_a_connection_that_is_lost_ends_the_domain(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.connection.break_down("it ended the connection")
        last = (await bench.events())[-1]
        assert last.kind is EventKind.EXITED and isinstance(last.why, LibvirtLost)
        assert last.why.message == "libvirt's daemon was lost while the machine ran: it ended the connection"
        assert last.status is not None and os.WIFEXITED(last.status)  # or nobody would ask why
        assert bench.process.wait(5) == -signal.SIGKILL


async def test_a_domain_that_ended_with_its_connection_is_a_loss_whichever_is_seen_first(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.process.kill()  # by the daemon, whose connection broke
        await bench.domain._gone.wait()
        bench.connection.break_down("it ended the connection")
        (last,) = await bench.events()
        assert isinstance(last.why, LibvirtLost)


async def test_a_call_to_a_lost_daemon_says_why(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.connection.error = LibvirtLost("hangs")
        bench.connection.break_down("hangs")
        with pytest.raises(LibvirtLost, match="lost while the machine ran: hangs"):
            await bench.domain.connect()


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [("shut down", 0, None), ("destroyed", 9, None), ("crashed", 256, DomainDied), ("failed", 256, DomainDied)],
)
async def test_an_end_by_itself_is_what_libvirt_says(tmp_path: Path, reason: str, status: int, why: Any) -> None:
    async with running(tmp_path) as bench:
        bench.process.kill()
        bench.tell(EventKind.EXITED, reason)
        (last,) = await bench.events()
        assert last.status == status and (last.why is None if why is None else isinstance(last.why, why))


async def test_an_end_that_libvirt_never_explains_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(domains, "DONE", 0.05)
    async with running(tmp_path) as bench:
        bench.process.kill()
        (last,) = await bench.events()
        assert isinstance(last.why, DomainDied)


async def test_what_the_guest_did_comes_before_its_end(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.tell(EventKind.SHUTDOWN)
        bench.tell(EventKind.EXITED, "shut down")
        bench.process.kill()
        assert [event.kind for event in await bench.events()] == [EventKind.SHUTDOWN, EventKind.EXITED]


async def test_the_power_button_and_a_pause_are_libvirts(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.domain.press_power()
        await bench.domain.pause()
        assert bench.connection.asked == ["shutdownFlags", "suspend"]
        bench.connection.error = LibvirtRefused("no")
        with pytest.raises(LibvirtRefused, match="no"):
            await bench.domain.pause()


async def test_use_of_the_host_outlives_the_process(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        before = bench.domain.usage()
        assert before[2] > 0
        bench.tell(EventKind.EXITED, "destroyed")
        await bench.domain.quit(grace=0.0)
        assert bench.domain.usage()[2] >= before[2]


async def test_a_process_that_ended_before_its_guest_was_started_is_no_domain(tmp_path: Path) -> None:
    connection: Any = None  # nothing is asked of it
    with pytest.raises(DomainDied, match="before its guest was started"):
        LibvirtDomain(connection, 0, (tmp_path / "a", tmp_path / "b"))
