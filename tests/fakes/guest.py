"""A guest without a machine, for tests: it follows a script in the loop's own time, which a test may let leap."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

from belljar.errors import AgentLost, BelljarError, InputMissing, OutputMissing
from belljar.guest import ExchangeDisk, ExitStatus, Identity, IdentityProof, Process, Sink, Standstill, Streams
from belljar.model import Account, FileSystem, Payload, PlainFile, Share, Transfer, Usage
from belljar.records import dataclass, field, replace


@dataclass
class Script:
    """What a fake guest does. Times are in seconds; None is never."""

    boots_in: float | None = 1.0
    dies_after: float | None = None  # counted from the greeting
    runs_for: float | None = 0.0  # the payload
    exit_code: int | None = 0
    signal: int | None = None
    oom_killed: bool = False
    error: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    obeys: frozenset[int] = frozenset({SIGTERM, SIGINT, SIGHUP, SIGKILL})
    proof: dict[str, object] = field(default_factory=dict)  # what of the identity it gets wrong
    skew: float = 0.0
    refuses: Mapping[str, BelljarError] = field(default_factory=dict)  # by the name of a call
    outputs: frozenset[str] | None = None  # what `get` finds; None: everything
    gets_for: float = 0.0
    collected: bytes = b""  # what `collect` gives
    collects_for: float | None = 0.0
    grows: frozenset[str] = frozenset(("cpus", "memory", "less-memory", "disk", "card"))
    devices: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # port -> (address, driver)
    seen: tuple[int, int] | None = None  # processors and bytes of memory it has after `grow`; None: all there should be


class FakeGuest:
    """Implements `Guest`; `done` lists what was asked of it."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.done: list[str] = []
        self.accounts: list[Account] = []
        self.payloads: list[Payload] = []
        self.mounted: list[str] = []
        self.grown: list[tuple[int, int, int, int]] = []
        self._processes: list[FakeProcess] = []
        self._death: asyncio.TimerHandle | None = None
        self._error: AgentLost | None = None
        self._waiting: set[asyncio.Future[None]] = set()

    async def greet(self, *, as_heir: bool = False) -> None:
        self._error = None
        await self._pass(self.script.boots_in)
        if self.script.dies_after is not None:
            self._death = asyncio.get_running_loop().call_later(
                self.script.dies_after, self._lose, "the fake guest died"
            )
        self.done.append("greet as heir" if as_heir else "greet")

    async def identify(self, identity: Identity) -> IdentityProof:
        self._do("identify")
        true = IdentityProof(
            identity.hostname, identity.machine_id, identity.nonce, identity.mac, os.urandom(32).hex(), self.script.skew
        )
        return replace(true, **self.script.proof)  # type: ignore[arg-type]

    async def settle(self) -> frozenset[str]:
        self._do("settle")
        return self.script.grows

    async def grow(self, cpus: int, *, plugged: int, surplus: int, disk: int) -> tuple[int, int]:
        self._do("grow")
        self.grown.append((cpus, plugged, surplus, disk))
        return self.script.seen or (cpus, 1 << 50)

    async def set_clock(self) -> float:
        self._do("set_clock")
        return 0.0

    async def mount(self, share: Share, tag: str, filesystem: FileSystem) -> None:
        self._do("mount")
        self.mounted.append(share.target)

    async def renew_keys(self) -> None:
        self._do("renew_keys")

    async def find_disks(self, names: Sequence[str]) -> list[str]:
        self._do("find_disks")
        return [f"/dev/vd{letter}" for letter, _ in zip("bcdefghijk", names, strict=False)]

    async def mount_scratch(self, device: str, target: str, account: Account) -> None:
        self._do("mount_scratch")

    async def mount_packed(self, name: str, device: str, inside: str, account: Account, cwd: bytes | None) -> None:
        self._do("mount_packed")

    async def await_devices(self, ports: Sequence[str], timeout: float) -> list[tuple[str, str]]:
        self._do(f"await_devices {' '.join(ports)}")
        return [self.script.devices.get(port, ("0000:01:00.0", "e1000e")) for port in ports]

    async def prepare_for(self, filesystem: FileSystem) -> None:
        self._do(f"prepare_for {filesystem.type}")

    async def add_account(self, account: Account) -> None:
        self._do("add_account")
        self.accounts.append(account)

    async def place(self, files: Sequence[PlainFile], account: Account) -> None:
        self._do("place")

    async def start(self, payload: Payload, streams: Streams) -> FakeProcess:
        self._do("start")
        self.payloads.append(payload)
        process = FakeProcess(self.script, streams)
        self._processes.append(process)
        return process

    async def hold_still(self, process: Process) -> Standstill:
        self._do("hold_still")
        assert isinstance(process, FakeProcess)
        return Standstill(1, 0, len(self.script.stdout), len(self.script.stderr))

    async def go_on(self, process: Process) -> None:
        self._do("go_on")

    async def take_up(self, standstill: Standstill, streams: Streams) -> FakeProcess:
        self._do(f"take_up {standstill.number} {standstill.stdout}")
        return FakeProcess(self.script, streams)

    async def connect(self, port: int, streams: Streams) -> FakeProcess:
        self._do(f"connect {port}")
        return FakeProcess(self.script, streams)

    def exchange_by(self, disk: ExchangeDisk) -> None:
        self._do("exchange_by")

    async def put(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        self._do("put")
        if not os.access(item.outside, os.R_OK):
            raise InputMissing(f"{item.outside}: No such file or directory")

    async def get(self, item: Transfer, account: Account, cwd: bytes | None) -> None:
        self._do("get")
        await self._pass(self.script.gets_for)
        if self.script.outputs is not None and item.inside not in self.script.outputs:
            raise OutputMissing(f"{item.inside}: No such file or directory")

    async def collect(self, paths: Sequence[str], sink: Sink) -> None:
        self._do("collect")
        await self._pass(self.script.collects_for)
        with suppress(BrokenPipeError):
            await sink.write(self.script.collected)

    async def end_payload(self) -> None:
        self._do("end_payload")

    def close(self) -> None:
        self._lose("the conversation with the guest was closed")

    async def _pass(self, seconds: float | None) -> None:
        """Let time pass, for ever where it is None, unless the guest dies first."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.add(future)
        if seconds is not None:
            loop.call_later(seconds, _resolve, future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def _do(self, name: str) -> None:
        if self._error is not None:
            raise self._error
        if name in self.script.refuses:
            raise self.script.refuses[name]
        self.done.append(name)

    def _lose(self, why: str) -> None:
        self._error = AgentLost(why)
        if self._death is not None:
            self._death.cancel()
        for future in self._waiting:
            if not future.done():
                future.set_exception(self._error)
        for process in self._processes:
            process.lose(self._error)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FakeProcess:
    """Implements `Process`: says its piece, runs its time, ends by itself or by a signal it obeys."""

    def __init__(self, script: Script, streams: Streams) -> None:
        self._script, self._streams = script, streams
        loop = asyncio.get_running_loop()
        self._end: asyncio.Future[ExitStatus] = loop.create_future()
        self._talk = loop.create_task(self._say())
        self.signals: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        if script.runs_for is not None:
            loop.call_later(script.runs_for, self._finish, script.exit_code, script.signal)

    async def _say(self) -> None:
        for sink, data in ((self._streams.stdout, self._script.stdout), (self._streams.stderr, self._script.stderr)):
            if sink is not None and data:
                await sink.write(data)

    def _finish(self, exit_code: int | None, number: int | None) -> None:
        if not self._end.done():
            code = None if number is not None else exit_code
            usage = Usage(0.01, 0.01, 1 << 20)
            self._end.set_result(ExitStatus(code, number, False, usage, self._script.oom_killed, self._script.error))

    async def wait(self) -> ExitStatus:
        status = await asyncio.shield(self._end)
        await self._talk
        for sink in (self._streams.stdout, self._streams.stderr):
            if sink is not None:
                await sink.close()
        return status

    async def signal(self, number: int, *, alone: bool = False) -> None:
        self.signals.append(number)
        if number in self._script.obeys:
            self._finish(None, number)

    async def resize(self, rows: int, columns: int) -> None:
        self.sizes.append((rows, columns))

    def lose(self, error: AgentLost) -> None:
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()
