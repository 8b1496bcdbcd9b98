"""One machine's connection to libvirt's daemon, held by a process of its own (holder.py) that dies with this one.

A call that is not answered in time is given up by killing that process: the daemon then undoes what was started.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from belljar.errors import BadSetting, CommandMissing, LibvirtLost, LibvirtRefused
from belljar.host.commands import path_of
from belljar.host.processes import all_pids, command_line, owner
from belljar.hypervisor import DomainEvent, EventKind, LibvirtSettings
from belljar.hypervisor.qemu.domain import Lines
from belljar.hypervisor.qemu.process.launch import Child, spawn
from belljar.hypervisor.qemu.process.qmp import settle
from belljar.model import MachineId

PROGRAM = Path(__file__).with_name("holder.py")
MARK = "libvirt:belljar-"
KEEPALIVES = 3  # unanswered ones before the connection is given up
TOO_SLOW = (
    "Raise `libvirt.start_timeout` where the host is slow. After QEMU or libvirt was changed, have the daemon ask QEMU before any"
    " job does: `belljar doctor --only libvirt`."
)
NO_BINDING = "Install python3-libvirt (`apt`, `dnf`) for the system's Python, or belljar's extra `libvirt` beside it."
DRIVER = re.compile(r"libvirt:(qemu(?:\+unix)?:///(?:system|session)(?:\?[!-~]*)?)")


def read_driver(text: str) -> str:
    """The URI in a value of `machine.hypervisor`. Raises BadSetting."""
    if match := DRIVER.fullmatch(text):
        return match[1]
    raise BadSetting(
        f"machine.hypervisor = {text!r}: no such driver (libvirt's guests under Xen are not supported)",
        hint="It is `qemu`, `libvirt:qemu:///system` or `libvirt:qemu:///session`: a libvirt of this host.",
    )


class Connection:
    """`lost` says why it is of no use any more; "" while it is. `on_event` and `on_loss` are called in the event loop."""

    def __init__(self, id: MachineId, settings: LibvirtSettings, log: Path) -> None:
        self.lost = ""
        self.on_event: Callable[[DomainEvent], None] = lambda event: None
        self.on_loss: Callable[[str], None] = lambda why: None
        self.ended = asyncio.Event()  # the process is gone
        self._settings = settings
        self._asked: deque[tuple[str, asyncio.Future[Any]]] = deque()
        self._rest = b""
        start = partial(spawn, environment=dict(os.environ))  # libvirt finds a user's own daemon by his variables
        with Lines("control", "channel", "console") as lines:
            self._control, self.channel, self.console = lines.ours.values()
            fds = [str(end.fileno()) for end in lines.theirs.values()]
            program = [sys.executable, "-I", str(PROGRAM), f"{MARK}{id}", *fds]
            argv = [path_of("setpriv", "Install util-linux."), "--pdeathsig=KILL", "--", *program]
            self._child = Child(argv, map(int, fds), log, self._process_ended, start)
        self.pid = self._child.pid
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    async def open(self, uri: str) -> int:
        """The daemon's version. Raises LibvirtLost, LibvirtRefused, CommandMissing."""
        interval = max(int(self._settings.timeout / KEEPALIVES), 1)
        version = await self.call("open", uri, interval, KEEPALIVES, what=f"a connection to {uri}")
        return int(version)

    async def learn(self, emulator: str) -> None:
        """A daemon that does not know this QEMU runs it a few times first, which may take longer than a start itself."""
        await self.call("capabilities", emulator, what=f"what QEMU can do ({emulator})", is_start=True)

    async def call(self, verb: str, *words: Any, what: str, is_start: bool = False) -> Any:
        """The holder's answer; a start has a deadline of its own. Raises LibvirtLost when the daemon is gone or not in time,
        LibvirtRefused when it answers that it will not."""
        if self.lost:
            raise LibvirtLost(f"libvirt's daemon cannot be asked for {what}: {self.lost}")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append((what, answer))
        with suppress(OSError):  # it is ending, which answers all that was asked
            self._control.send(json.dumps([verb, *words]).encode() + b"\n")
        setting, hint = ("start_timeout", TOO_SLOW) if is_start else ("timeout", None)
        limit = getattr(self._settings, setting)
        done, _ = await asyncio.wait({answer}, timeout=limit)
        if not done:
            self._lose(f"it did not answer within {limit:g} s (`libvirt.{setting}`) when asked for {what}")
            raise LibvirtLost(f"libvirt's daemon: {self.lost}", hint=hint)
        return answer.result()

    def end(self, why: str = "the connection is closed") -> None:
        """Never use it again. The daemon destroys what was started on it; nothing here waits for that."""
        self.lost = self.lost or why
        self._child.send(signal.SIGKILL)

    async def close(self, why: str = "the connection is closed") -> None:
        """End it with its lines; returns when its process is gone."""
        self.end(why)
        self.channel.close()
        self.console.close()
        await self.ended.wait()

    def _hear(self) -> None:
        data = b""
        with suppress(OSError):
            data = self._control.recv(1 << 18)
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(*json.loads(line))

    def _take(self, kind: str, value: Any, detail: str = "") -> None:
        if kind == "event":
            self.on_event(DomainEvent(EventKind(value), detail))
        elif kind == "closed":
            self._lose(value)
        elif self._asked:
            what, answer = self._asked.popleft()
            if kind == "done":
                settle(answer, value)
            elif kind == "refused":
                settle(answer, LibvirtRefused(f"libvirt refused {what}: {value}"))
            elif kind == "missing":
                why = f"libvirt's Python binding is neither beside belljar nor a module of {value}"
                settle(answer, CommandMissing(why, hint=NO_BINDING))
            else:
                settle(answer, LibvirtLost(f"libvirt's daemon cannot be reached for {what}: {value}"))
                self._lose(value)

    def _lose(self, why: str) -> None:
        if not self.lost:
            self.end(why)
            self.on_loss(why)

    def _process_ended(self, status: int) -> None:
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._lose("the process that held the connection ended")
        while self._asked:
            what, answer = self._asked.popleft()
            settle(answer, LibvirtLost(f"libvirt's daemon was lost when asked for {what}: {self.lost}"))
        self.ended.set()


def is_held(id: MachineId) -> bool:
    """Does a process of root's or of ours hold this machine's connection? It lives as long as the machine's supervisor."""
    mark = f"{MARK}{id}".encode()
    return any(mark in command_line(pid) and owner(pid) in (0, os.geteuid()) for pid in all_pids())
