"""The process that holds a connection to libvirt, and what becomes of calls when it, or the daemon, does not do its part."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.errors import BelljarError, CommandMissing, LibvirtLost, LibvirtRefused
from belljar.hypervisor import DomainEvent, EventKind, LibvirtSettings
from belljar.hypervisor.libvirt import connection, holder
from belljar.hypervisor.libvirt.connection import Connection, is_held

ID = "0123456789ab"
# A holder that says what a test has it say, for each call it takes.
PLAYED = """import json, os, socket, sys
control = socket.socket(fileno=int(sys.argv[2]))
for line in control.makefile():
    for answer in {answers!r}:
        control.sendall(json.dumps(answer).encode() + b"\\n")
"""


@asynccontextmanager
async def played(folder: Path, *answers: Any, start_timeout: float = 60.0) -> AsyncIterator[Connection]:
    (folder / "holder.py").write_text(PLAYED.format(answers=answers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "PROGRAM", folder / "holder.py")
        link = Connection(ID, LibvirtSettings(start_timeout=start_timeout), folder / "log")
    try:
        yield link
    finally:
        await link.close()


async def refused(call: Awaitable[Any], kind: type[BelljarError]) -> BelljarError:
    with pytest.raises(kind) as caught:
        async with asyncio.timeout(20):
            await call
    return caught.value


async def test_a_call_gets_its_answer_and_events_are_passed_on(tmp_path: Path) -> None:
    async with played(tmp_path, ["event", "panicked", "it crashed"], ["done", 7]) as link:
        happened = list[DomainEvent]()
        link.on_event = happened.append
        assert await link.call("state", what="its state") == 7
        assert happened == [DomainEvent(EventKind.PANICKED, "it crashed")]


async def test_a_refusal_is_libvirts_and_the_connection_stays(tmp_path: Path) -> None:
    async with played(tmp_path, ["refused", "no such thing"]) as link:
        error = await refused(link.call("suspend", what="a pause"), LibvirtRefused)
        assert error.message == "libvirt refused a pause: no such thing" and not link.lost


async def test_a_call_that_hangs_costs_its_deadline_and_ends_the_connection(tmp_path: Path) -> None:
    async with played(tmp_path, start_timeout=0.05) as link:
        losses = list[str]()
        link.on_loss = losses.append
        error = await refused(link.learn("/usr/bin/qemu"), LibvirtLost)
        assert "within 0.05 s (`libvirt.start_timeout`)" in error.message and "libvirt.start_timeout" in str(error.hint)
        assert losses == [link.lost]
        await asyncio.wait_for(link.ended.wait(), 20)
        await refused(link.call("state", what="its state"), LibvirtLost)


@pytest.mark.parametrize("answer", [["lost", "cut off"], ["closed", "it does not answer keepalives"]])
async def test_a_daemon_that_is_lost_is_reported_once(tmp_path: Path, answer: list[str]) -> None:
    async with played(tmp_path, answer) as link:
        losses = list[str]()
        link.on_loss = losses.append
        await refused(link.call("state", what="its state"), LibvirtLost)
        await asyncio.wait_for(link.ended.wait(), 20)
        assert losses == [answer[1]]


async def test_a_holder_that_is_killed_is_a_connection_that_is_lost(tmp_path: Path) -> None:
    async with played(tmp_path) as link:
        losses = list[str]()
        link.on_loss = losses.append
        waiting = asyncio.ensure_future(link.call("state", what="its state"))
        await asyncio.sleep(0)
        os.kill(link.pid, signal.SIGKILL)
        await refused(waiting, LibvirtLost)
        assert losses == ["the process that held the connection ended"]


async def test_a_binding_that_is_missing_is_named(tmp_path: Path) -> None:
    async with played(tmp_path, ["missing", "/usr/bin/python3"]) as link:
        error = await refused(link.open("qemu:///system"), CommandMissing)
        assert "/usr/bin/python3" in error.message and "python3-libvirt" in str(error.hint)


async def test_a_machine_is_held_as_long_as_its_holder_lives(tmp_path: Path) -> None:
    async with played(tmp_path, ["done", None]) as link:
        await link.call("state", what="its state")  # it runs
        assert is_held(ID) and not is_held("0123456789ac")
        await link.close()
        assert not is_held(ID)


# -- the holder itself, with libvirt's own driver for tests: no daemon, nothing that runs ---------------------------------


async def test_the_holder_opens_a_connection_and_ends_with_its_supervisor(tmp_path: Path) -> None:
    link = Connection(ID, LibvirtSettings(), tmp_path / "log")
    try:
        error = await refused(link.open("test:///default"), LibvirtRefused)
        assert "virConnectSetKeepAlive" in error.message  # which a connection within the process has no use for
        error = await refused(link.call("create", "<domain/>", what="a domain", is_start=True), LibvirtRefused)
        assert error.message.startswith("libvirt refused a domain: ")
        link._control.shutdown(socket.SHUT_WR)
        await asyncio.wait_for(link.ended.wait(), 20)
    finally:
        await link.close()
    assert (tmp_path / "log").read_bytes() == b""  # libvirt itself says nothing on stderr


class Stream:
    """libvirt's side of a pump. It takes so many bytes."""

    def __init__(self, takes: int = 1 << 20) -> None:
        self.takes, self.sent, self.incoming = takes, b"", list[Any]()
        self.events, self.removed = 0, False

    def eventAddCallback(self, events: int, call: Any, _: Any) -> None:
        self.events = events

    def eventUpdateCallback(self, events: int) -> None:
        self.events = events

    def eventRemoveCallback(self) -> None:
        self.removed = True

    def send(self, data: bytes) -> int:
        count = min(len(data), self.takes - len(self.sent))
        self.sent += data[:count]
        return count or -2

    def recv(self, size: int) -> Any:
        return self.incoming.pop(0)


class Loop(SimpleNamespace):
    """libvirt's event loop, as far as a pump uses it."""

    VIR_EVENT_HANDLE_READABLE, VIR_STREAM_EVENT_READABLE, VIR_STREAM_EVENT_WRITABLE = 1, 1, 2
    libvirtError = RuntimeError

    def virEventAddHandle(self, fd: int, events: int, call: Any, _: Any) -> int:
        self.events = events
        return 1

    def virEventUpdateHandle(self, watch: int, events: int) -> None:
        self.events = events

    def virEventRemoveHandle(self, watch: int) -> None:
        self.events = -1


def test_bytes_go_both_ways_and_what_does_not_fit_waits() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream, loop = Stream(takes=3), Loop()
        pump = holder.Pump(loop, stream, theirs)
        ours.sendall(b"input")
        pump._outward()
        assert stream.sent == b"inp" and (loop.events, stream.events) == (0, 3)
        stream.takes, stream.incoming = 10, [-2, b"output", b""]
        pump._inward(stream, 3, None)
        assert stream.sent == b"input" and (loop.events, stream.events) == (1, 1)
        pump._inward(stream, 1, None)
        assert ours.recv(100) == b"output"
        pump._inward(stream, 1, None)
        assert ours.recv(100) == b"" and stream.removed and loop.events == -1


def test_a_console_is_a_terminal_that_carries_bytes_as_they_are() -> None:
    master, slave = os.openpty()
    ours, theirs = socket.socketpair()
    with ours, theirs, open(master, "r+b", buffering=0) as far:
        loop = Loop()
        terminal = holder.Terminal(loop, os.ttyname(slave))
        os.close(slave)
        pump = holder.Pump(loop, terminal, theirs)
        far.write(b"login:\r\n\x03")
        pump._inward(terminal, 1, None)
        assert ours.recv(100) == b"login:\r\n\x03"
        ours.sendall(b"a\n")
        pump._outward()
        assert far.read(100) == b"a\n"
        pump._inward(terminal, 1, None)  # there is nothing
        far.close()
        pump._inward(terminal, 1, None)
        assert ours.recv(100) == b""
    assert (
        holder.console_of("<domain><devices><serial><source path='/dev/pts/7'/></serial></devices></domain>")
        == "/dev/pts/7"
    )


def test_libvirts_events_are_translated() -> None:
    libvirt = pytest.importorskip("libvirt")
    stopped = libvirt.VIR_DOMAIN_EVENT_STOPPED
    assert holder.translate(libvirt, stopped, libvirt.VIR_DOMAIN_EVENT_STOPPED_CRASHED) == ("exited", "crashed")
    assert holder.translate(libvirt, libvirt.VIR_DOMAIN_EVENT_SHUTDOWN, 0) == ("shutdown", "guest-shutdown")
    host = libvirt.VIR_DOMAIN_EVENT_SHUTDOWN_HOST
    assert holder.translate(libvirt, libvirt.VIR_DOMAIN_EVENT_SHUTDOWN, host) is None
    assert holder.translate(libvirt, libvirt.VIR_DOMAIN_EVENT_CRASHED, 0) == ("panicked", "the guest's kernel panicked")
    assert holder.translate(libvirt, libvirt.VIR_DOMAIN_EVENT_STARTED, 0) is None


def test_the_holder_imports_nothing_of_belljar() -> None:
    """It starts with each machine, and may run where belljar itself is not on the module path."""
    assert "belljar" not in {line.split()[1].split(".")[0] for line in imports(Path(holder.__file__))}
    assert sys.version_info >= (3, 11)


def imports(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith(("import ", "from "))]
