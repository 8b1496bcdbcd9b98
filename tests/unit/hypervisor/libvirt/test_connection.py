"""The process that holds a connection to libvirt, and what becomes of calls when it, or the daemon, does not do its part."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import Event
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


def test_bytes_go_both_ways_and_what_does_not_fit_waits() -> None:
    """As libvirt's stream has them: its guest takes a byte at a time, then breaks off."""
    ours, theirs = socket.socketpair()
    taken, has_more = list[bytes](), Event()
    incoming = iter([b"output", b"more"])

    def send(data: bytes) -> int:
        taken.append(data[:1])
        if len(taken) == 5:
            has_more.set()
        return 1

    def receive(size: int) -> bytes:
        if (data := next(incoming)) == b"more":
            has_more.wait(10)
        return data

    with ours, theirs:
        ours.settimeout(10)
        holder.carry(theirs, receive, send)
        assert ours.recv(100) == b"output"
        ours.sendall(b"input")
        assert ours.recv(100) == b"more" and taken == [b"i", b"n", b"p", b"u", b"t"]
        assert ours.recv(100) == b""  # StopIteration, in the place of libvirt's error


def test_a_console_is_a_terminal_that_carries_bytes_as_they_are() -> None:
    master, slave = os.openpty()
    path = os.ttyname(slave)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(master, "r+b", buffering=0) as far:
        ours.settimeout(10)
        fd = holder.terminal_of(f"<domain><devices><serial><source path='{path}'/></serial></devices></domain>")
        os.close(slave)
        holder.carry(theirs, partial(os.read, fd), partial(os.write, fd))
        far.write(b"login:\r\n\x03")
        assert ours.recv(100) == b"login:\r\n\x03"
        ours.sendall(b"a\n")
        assert far.read(100) == b"a\n"
        far.close()
        assert ours.recv(100) == b""


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
