"""A keeper that only says that it has machines, with clocks of its own; and the space of its factory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError
from belljar.model import Request
from belljar.vacuum import MachineType, Space, TypeStatus
from belljar.vacuum.factory.factory import Factory
from belljar.vacuum.factory.keeper import Living

SPACE = Space(
    "vac.example.org", "vf1.example.org", ("vf1.example.org",), processors=4, memory=1 << 20, hs06=10.0,
    types=(MachineType("atlas", share=1.0, image="a", fizzle=600, backoff=600), MachineType("lhcb", share=1.0, image="l")),
)  # fmt: skip
NOW = 1_800_000_000.0


class Site:
    """A keeper with a clock of its own. What it was asked for lives in `machines`, and outlives a factory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.jumped = folder, NOW, 0.0
        self.machines: dict[str, Living] = {}
        self.asked: list[Request] = []
        self.stopped: list[str] = []
        self.moved: dict[str, float] = {}
        self.errors: dict[str, BelljarError] = {}
        self.rows: list[dict[str, Any]] = []
        self.news = asyncio.Event()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.shows = True

    @property
    def steady(self) -> float:
        """A clock that nobody sets."""
        return self.now - self.jumped

    def living(self) -> list[Living]:
        return list(self.machines.values())

    async def ended(self, id: str) -> None:
        await asyncio.Event().wait()

    def free_memory(self) -> int:
        return 1 << 40

    async def start(self, request: Request) -> None:
        self.asked.append(request)
        labels = dict(request.labels)
        if error := self.errors.get(labels["machinetype"]):
            raise error
        if self.shows:
            self.show(request)

    def show(self, request: Request) -> None:
        labels = dict(request.labels)
        self.machines[request.id] = Living(
            labels["machinetype"], request.machine.cpus, float(labels["ends"]), request.machine.memory, 0, request.id,
            int(labels["slot"]), self.now, self.now, float(labels["fizzle"]), 10.0 * request.machine.cpus,
            folder=str(self.folder / request.id),
        )  # fmt: skip

    def stop(self, id: str) -> None:
        self.stopped.append(id)

    def move(self, id: str, moment: float) -> None:
        self.moved[id] = moment

    def end(self, id: str, message: str = "") -> dict[str, Any]:
        """The event of a machine's end."""
        one = self.machines.pop(id)
        code, _, text = message.partition(" ")
        labels = {
            "space": SPACE.name,
            "factory": SPACE.factory,
            "machinetype": one.machinetype,
            "slot": str(one.slot),
            "fizzle": "600",
        }
        row = {
            "event": "ended", "machine": id, "time": self.now, "started": one.created, "position": f"2027-01:{len(self.rows) + 1}",
            "labels": [list(pair) for pair in labels.items()], "cause": "finished",
        }  # fmt: skip
        self.rows.append(row | ({"shutdown_code": int(code), "shutdown_message": text} if code else {}))
        return self.rows[-1]

    async def events(self, since: str) -> AsyncIterator[dict[str, Any]]:
        at = int(since.rpartition(":")[2] or 0)
        while True:
            for row in self.rows[at:]:
                yield row
            at = len(self.rows)
            await self.news.wait()
            self.news.clear()

    def tell(self, event: str, **facts: Any) -> None:
        self.told.append((event, facts))

    def factory(
        self, space: Space = SPACE, others: tuple[TypeStatus, ...] = (), data: bytes = b"#!/bin/sh\n"
    ) -> Factory:
        draws = iter(range(10**6))

        async def ask() -> tuple[tuple[TypeStatus, ...], tuple[str, ...]]:
            return others, ()

        return Factory(
            space, self.folder, self, ask, lambda kind, order, now: data, self.tell, clock=lambda: self.now,
            luck=lambda: (next(draws) * 0.37) % 1, load=lambda: (0.0, 0.0, 0.0), steady=lambda: self.steady,
        )  # fmt: skip


async def until(is_so: Any) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0)
