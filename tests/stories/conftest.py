"""Whole flows with the shipped fakes, in leaping time: an hour of waiting passes in no time at all."""

from __future__ import annotations

import asyncio
import json
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.fakes.guest import FakeGuest, Script
from tests.fakes.hypervisor import FakeDomain, FakeHypervisor
from tests.fakes.image import FakeOverlays, FakeStore

from belljar.guest import Streams
from belljar.host.devices.pci import Site
from belljar.host.room import Settings as HostSettings
from belljar.hypervisor import Settings as QemuSettings
from belljar.journal import Event, read
from belljar.machine import Folders, Settings
from belljar.machine.cleaning.reaper import Reaper
from belljar.machine.orders import Order, Orders
from belljar.machine.outside.registry import Machines
from belljar.machine.services import Rules, Services, Showing
from belljar.machine.supervisor import Supervisor
from belljar.model import MIB, Account, MachineSpec, Outcome, Payload, Request, RunPayload, State
from belljar.network import Networks

T = TypeVar("T")
BOOT_TIMEOUT = 180.0
OF_IN_THREAD = "(work)"  # how Python names the threads of `host.threads`


class Leaping(selectors.DefaultSelector):
    """A selector that never waits for a timer: when nothing is ready, the clock moves to where the timer is."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        # A thread that is about to answer gets some real time before the clock leaps: on a busy host it has to wait for a
        # processor, or for the disk. One that waits for a lock never answers.
        moment = 0.15 if any(one.name.endswith(OF_IN_THREAD) for one in threading.enumerate()) else 0.002
        ready = super().select(timeout if timeout is None else min(timeout, moment))
        if not ready and timeout:
            self.now += timeout
        return ready


class LeapingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


class Runtime:
    """A supervisor among fakes."""

    def __init__(self, folder: Path) -> None:
        self.folders = Folders(folder / "run", folder / "scratch", folder / "store", folder / "logs")
        self.hypervisor = FakeHypervisor(folder / "templates")
        self.images, self.overlays = FakeStore(), FakeOverlays()
        self.guests: list[FakeGuest] = []
        self.scripts: list[Script] = []  # of the guests to come; the last one serves all that follow
        self.passed: list[str] = []
        self.at: dict[str, Callable[[], None]] = {}  # what happens at a point of the machine's life
        self.settings = Settings()
        self.host = HostSettings(kept_memory=0, cpus_per_cpu=0.0)
        self.networks: Networks | None = None
        self.site: Site = ()
        self.root = Path("/")
        self.showing: Showing = nullcontext
        self.reaper = Reaper(self.folders, self.hypervisor)
        self.machines = Machines(self.folders, self.reaper)
        self.orders: Orders

    def plan(self, *scripts: Script) -> None:
        """The guests to come, in order."""
        self.scripts = list(scripts)

    def request(self, **changes: Any) -> Request:
        payload = Payload((b"true",), Account("alice", 1000, 1000, "alice"))
        payload = replace(payload, **changes.pop("payload", {}))
        machine = replace(MachineSpec("debian12", 1, 64 * MIB), **changes.pop("machine", {}))
        work = RunPayload(payload, changes.pop("user_data", None))
        return replace(Request("0123456789ab", machine, work), **changes)

    def run(self, request: Request | None = None, *orders: tuple[float, Order]) -> Outcome:
        """Keep one machine to its end; each order is given so many seconds after the beginning."""
        return self.leap(self._keep(request or self.request(), orders))

    def leap(self, work: Coroutine[Any, Any, T]) -> T:
        with asyncio.Runner(loop_factory=LeapingLoop) as runner:
            return runner.run(asyncio.wait_for(work, 1e7))

    async def _keep(self, request: Request, orders: tuple[tuple[float, Order], ...]) -> Outcome:
        self.orders = Orders()
        for seconds, order in orders:
            asyncio.get_running_loop().call_later(seconds, self.orders.give, order)
        return await self.supervisor().keep(request, Streams(None, None, None), self.orders)

    def supervisor(self) -> Supervisor:
        return Supervisor(self.services())

    def services(self) -> Services:
        qemu = QemuSettings(boot_timeout=BOOT_TIMEOUT)
        rules = Rules(self.settings, self.host, qemu=qemu, devices=lambda: self.site, root=self.root)
        return Services(
            self.hypervisor, self.images, self.overlays, self._guest, self.folders, rules, self._point,
            networks=self.networks, showing=self.showing,
        )  # fmt: skip

    def _guest(self, channel: object) -> FakeGuest:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else (self.scripts or [Script()])[0]
        self.guests.append(FakeGuest(script))
        return self.guests[-1]

    def _point(self, name: str) -> None:
        self.passed.append(name)
        if name in self.at:
            self.at[name]()

    def domain(self) -> FakeDomain:
        """The latest domain."""
        return self.hypervisor.domains[-1]

    def journal(self) -> list[Event]:
        return read(self.folders.ended("0123456789ab"))

    def journal_of_the_living(self) -> list[Event]:
        return read(self.folders.machine("0123456789ab"))

    def states(self) -> list[str]:
        return [event["state"] for event in self.journal() if event["event"] == "state"]

    def leftovers(self) -> list[str]:
        """What a machine that is done may not leave."""
        folders = (self.folders.machines, self.folders.identities, self.folders.scratch)
        files = [str(path) for folder in folders if folder.exists() for path in folder.iterdir()]
        return files + [f"domain of {id}" for id in self.hypervisor.running]

    def saved_outcome(self) -> dict[str, Any]:
        return dict(json.loads((self.folders.ended("0123456789ab") / "outcome.json").read_text()))


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    made = Runtime(tmp_path)
    yield made
    for domain in made.hypervisor.domains:
        for end in (domain.channel, domain.guest, domain.console, domain.serial):
            end.close()


ALL_STATES = [state.value for state in State]
