"""A pilot and a service that talk over a real connection on loopback; machines that need no guest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from belljar.guest import Sink, Source
from belljar.lease import Cause, Do, Facts, InstanceState, MachineOrder, Order, Report, Tell
from belljar.lease.jobfile import JobFile
from belljar.lease.pilot.machines import Changed, Machines
from belljar.lease.pilot.pilot import Pilot
from belljar.lease.protocol import lease_key
from belljar.lease.service.channel import Channel
from belljar.records import replace
from belljar.service.credentials.certificates import own_certificate

LEASE = "r-0123456789abcdef0"
SITE_KEY = b"k" * 32


class NoGuests:
    """Machines that run at once and end when they are told, or when a test says so."""

    def __init__(self, changed: Changed, shutdown: float = 0.0) -> None:
        self._changed, self._shutdown = changed, shutdown
        self._living = set[str]()
        self.started: dict[str, MachineOrder] = {}
        self.killed: list[str] = []
        self.told: list[tuple[str, str, bytes]] = []
        self.graces: list[float] = []
        self.expects, self.hangs = 0, False
        self.shell: Callable[[str, bytes], Awaitable[bytes]]

    @property
    def living(self) -> frozenset[str]:
        return frozenset(self._living)

    def expect(self) -> None:
        self.expects += 1

    def expect_none(self) -> None:
        self.expects = 0

    def start(self, instance: str, order: MachineOrder) -> None:
        self.started[instance] = order
        self._living.add(instance)
        for state in (InstanceState.STAGING, InstanceState.BOOTING):
            self._changed(instance, state)
        self._changed(instance, InstanceState.RUNNING, host_keys=("ssh-ed25519 AAAA",))

    def stop(self, instance: str, cause: Cause, why: str, grace: float) -> None:
        if instance in self._living:
            self.graces.append(grace)
            self._changed(instance, InstanceState.STOPPING, cause=cause, why=why)
            asyncio.get_running_loop().call_later(self._shutdown, self.end, instance, cause, why)

    def kill(self, instance: str) -> None:
        self.killed.append(instance)
        self.end(instance, Cause.PREEMPTED, "killed")

    def end(self, instance: str, cause: Cause = Cause.GUEST, why: str = "powered off") -> None:
        if instance in self._living:
            self._living.remove(instance)
            self._changed(instance, InstanceState.TERMINATED, cause=cause, why=why)

    def rebooted(self, instance: str) -> None:
        self._changed(instance, InstanceState.RUNNING, rebooted=True)

    def console(self, instance: str) -> bytes:
        return b"login:"

    async def tell_guest(self, instance: str, word: str, stdin: bytes = b"") -> None:
        self.told.append((instance, word, stdin))
        await asyncio.sleep(60 if self.hangs else 0)

    async def carry(self, instance: str, source: Source, sink: Sink, command: str) -> None:
        """What comes goes back, in capitals; its shell is what a test made it."""
        if command:
            program = b""
            while not program.endswith(b"\nmain\n") and (data := await source.read(4096)):
                program += data
            await sink.write(await self.shell(instance, program))
            return await sink.close()
        while data := await source.read(4096):
            await sink.write(data.upper())
        await sink.close()


class Service:
    """A channel server that answers a hello as a test says, and keeps what it hears."""

    def __init__(self, folder: Path, answers: Iterable[Order] = (Order(Do.GO),)) -> None:
        self.certificate = folder / "service.pem"
        self.pin = own_certificate(self.certificate, ("127.0.0.1",))
        self.answers = tuple(answers)
        self.heard: list[Report] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.port = 0
        self._changed = asyncio.Condition()
        self.channel = self._new()

    def _new(self) -> Channel:
        return Channel(
            SITE_KEY, self.applied, self.hear, lambda: None, lambda *a, **k: self.told.append((a[0], k)), 5.0
        )

    async def applied(self, slot: str, pilot: str) -> int:
        return max((one.seq for one in self.heard if one.slot == slot and one.pilot == pilot), default=0)

    async def hear(self, report: Report) -> Iterable[Order]:
        async with self._changed:
            if report.tell is not Tell.HEARTBEAT or report.console:
                self.heard.append(report)
            self._changed.notify_all()
        pilots = [one.pilot for one in self.heard if one.slot == report.slot]
        if report.pilot != pilots[0]:
            return (Order(Do.VOID, why="another pilot has this node"),)
        return self.answers if report.tell is Tell.HELLO else ()

    async def until(self, what: Callable[[], object], limit: float = 10.0) -> None:
        async with asyncio.timeout(limit), self._changed:
            await self._changed.wait_for(lambda: bool(what()))

    def states(self, instance: str) -> list[str]:
        return [one.state.value for one in self.heard if one.instance == instance and one.state is not None]

    @asynccontextmanager
    async def up(self) -> AsyncIterator[Channel]:
        self.channel = self._new()
        server = await self.channel.serve("127.0.0.1", self.port, self.certificate)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self.channel
        finally:
            server.close()
            for task in asyncio.all_tasks():  # as a process that is killed: its connections are gone
                if "_take" in str(task.get_coro()):
                    task.cancel()
            await asyncio.sleep(0)


def job_for(service: Service, **facts: Any) -> JobFile:
    known = JobFile(
        LEASE, 1, 1, (f"127.0.0.1:{service.port}",), service.pin, lease_key(SITE_KEY, LEASE).hex(),
        deadline=60.0, claim=5.0, barrier=5.0, grace=5.0, notice=10.0, report=1.0, heartbeat=1.0,
    )  # fmt: skip
    return replace(known, **facts)


class Running:
    """A pilot that runs."""

    def __init__(
        self, job: JobFile, folder: Path, rank: int = 0, shutdown: float = 0.0,
        make: Callable[[Changed], Machines] | None = None,
    ) -> None:  # fmt: skip
        self.machines: NoGuests

        def no_guests(changed: Changed) -> NoGuests:
            self.machines = NoGuests(changed, shutdown)
            return self.machines

        self.folder = folder / os.urandom(4).hex()
        self.pilot = Pilot(
            job, rank, Facts("node1", cpus=2, memory=4 << 30), self.folder, make or no_guests, lambda *a, **k: None
        )
        self.task = asyncio.ensure_future(self.pilot.run())

    async def ended(self, limit: float = 10.0) -> None:
        async with asyncio.timeout(limit):
            await self.task
