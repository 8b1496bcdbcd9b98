"""A domain of libvirt's and what ends it: a process stands in for QEMU, a daemon without libvirt for libvirt's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import DomainDied, LibvirtLost, LibvirtRefused, NetworkFailed, NoGuard
from belljar.hypervisor import DomainEvent, EventKind
from belljar.hypervisor.libvirt import domain as domains
from belljar.hypervisor.libvirt.domain import LibvirtDomain
from belljar.hypervisor.libvirt.lines import Lines
from belljar.hypervisor.libvirt.starting import Heard, Started

ME = (os.geteuid(), os.getegid())


class Link:
    """A connection whose calls go as told."""

    def __init__(self) -> None:
        self.lost, self.error = "", None
        self.connection = self
        self.listeners: list[Any] = []

    def call(self, what: str, work: Any, timeout: float | None = None) -> Any:
        if self.error is not None:
            raise self.error
        return work(self)

    def on_loss(self, listener: Any) -> None:
        self.listeners.append(listener)

    def abandon(self, why: str = "closed") -> None:
        self.lost = self.lost or why

    def break_down(self, why: str) -> None:
        self.lost = why
        for listener in self.listeners:
            listener(why)


class Handle:
    """libvirt's domain. Each call is one that is answered."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def state(self) -> list[int]:
        return [1, 0]

    def suspend(self) -> None:
        self.asked.append("suspend")

    def shutdownFlags(self, flags: int) -> None:
        self.asked.append(f"shutdown {flags}")


class Bench:
    def __init__(self, folder: Path, carry: Any = None, card: socket.socket | None = None) -> None:
        self.process = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
        self.link, self.handle, self.heard = Link(), Handle(), Heard()
        self.lines = Lines(folder / "l" / "0123456789ab", ME)
        self.lines.open()
        self.ends = [*socket.socketpair(), *socket.socketpair()]
        pid = self.process.pid
        started = Started(
            self.link, self.handle, pid, os.pidfd_open(pid), ("qemu",), self.ends[0], self.ends[2], card, self.lines,
            self.heard,
        )  # type: ignore[arg-type]  # fmt: skip
        try:
            self.domain = LibvirtDomain(started, carry)
        except BaseException:
            assert self.process.wait(10) == -signal.SIGKILL and self.link.lost
            assert {self.ends[0].fileno(), self.ends[2].fileno()} == {-1}
            for end in self.ends:
                end.close()
            raise

    async def events(self) -> list[DomainEvent]:
        async with asyncio.timeout(20):
            return [event async for event in self.domain.events()]


@asynccontextmanager
async def running(folder: Path, carry: Any = None, card: socket.socket | None = None) -> AsyncIterator[Bench]:
    bench = Bench(folder, carry, card)
    try:
        yield bench
    finally:
        bench.process.kill()
        bench.process.wait()
        bench.heard.tell(DomainEvent(EventKind.EXITED, "destroyed"))  # as libvirt does of each
        await bench.domain.quit(grace=0.0)
        for end in bench.ends:
            end.close()
    assert list((folder / "l").iterdir()) == []


def why_of(events: list[DomainEvent]) -> str:
    last = events[-1]
    assert last.kind is EventKind.EXITED and isinstance(last.why, LibvirtLost)
    assert last.status is not None and os.WIFEXITED(last.status)  # or nobody would ask why
    return last.why.message


async def test_a_connection_that_ends_is_heard(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        threading.Thread(target=bench.link.break_down, args=("it ended the connection",)).start()
        assert why_of(await bench.events()) == (
            "libvirt's daemon was lost while the machine ran: it ended the connection"
        )
        assert bench.process.wait(5) == -signal.SIGKILL


async def test_whoever_asks_a_lost_daemon_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        bench.link.error = LibvirtLost("hangs")  # type: ignore[assignment]
        with pytest.raises(LibvirtLost, match="lost while the machine ran: hangs"):
            await bench.domain.connect()


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [("shut down", 0, None), ("destroyed", 9, None), ("crashed", 256, DomainDied), ("failed", 256, DomainDied)],
)
async def test_an_end_by_itself_is_what_libvirt_says(tmp_path: Path, reason: str, status: int, why: Any) -> None:
    async with running(tmp_path) as bench:
        bench.process.kill()
        bench.heard.tell(DomainEvent(EventKind.EXITED, reason))
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
        bench.heard.tell(DomainEvent(EventKind.SHUTDOWN))
        bench.heard.tell(DomainEvent(EventKind.EXITED, "shut down"))
        bench.process.kill()
        assert [event.kind for event in await bench.events()] == [EventKind.SHUTDOWN, EventKind.EXITED]


async def test_the_power_button_and_a_pause_are_libvirts(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        await bench.domain.press_power()
        await bench.domain.pause()
        assert bench.handle.asked == ["shutdown 1", "suspend"]
        bench.link.error = LibvirtRefused("no")  # type: ignore[assignment]
        with pytest.raises(LibvirtRefused, match="no"):
            await bench.domain.pause()


async def test_use_of_the_host_outlives_the_process(tmp_path: Path) -> None:
    async with running(tmp_path) as bench:
        before = bench.domain.usage()
        assert before[2] > 0
        bench.heard.tell(DomainEvent(EventKind.EXITED, "destroyed"))
        await bench.domain.quit(grace=0.0)
        assert bench.domain.usage()[2] >= before[2]


# -- a network that is carried by a process of ours ----------------------------------------------------------------------


class Carrier:
    """What a domain asks of the process that carries its frames."""

    def __init__(self, on_end: Any) -> None:
        self.on_end, self.closed = on_end, 0
        self.outside = self

    def close(self) -> None:
        self.closed += 1

    async def traffic(self) -> AsyncIterator[str]:
        yield "a refusal"


async def test_a_domain_ends_its_carrier_and_asks_it_for_what_its_network_tells(tmp_path: Path) -> None:
    made: list[Carrier] = []
    card, far = socket.socketpair()

    def carry(on_end: Any) -> Carrier:
        made.append(Carrier(on_end))
        return made[0]

    async with running(tmp_path, carry=carry, card=card) as bench:
        assert card.fileno() == -1 and made[0].closed == 0
        assert [item async for item in bench.domain.traffic()] == ["a refusal"]
    assert made[0].closed == 1
    far.close()


async def test_a_machine_whose_carrier_ends_is_ended_and_says_so(tmp_path: Path) -> None:
    made: list[Carrier] = []

    def carry(on_end: Any) -> Carrier:
        made.append(Carrier(on_end))
        return made[0]

    async with running(tmp_path, carry=carry) as bench:
        made[0].on_end(NetworkFailed("killed"))
        bench.process.wait(10)
        bench.heard.tell(DomainEvent(EventKind.EXITED, "crashed"))
        (last,) = await bench.events()
        assert isinstance(last.why, NetworkFailed) and last.status == 0


async def test_a_carrier_that_cannot_be_started_leaves_no_domain(tmp_path: Path) -> None:
    def carry(on_end: Any) -> Carrier:
        raise NoGuard("not here")

    with pytest.raises(NoGuard, match="not here"):
        Bench(tmp_path, carry)
    assert list((tmp_path / "l").iterdir()) == []
