"""The front end over what is really written down, with SQLite. What pilots would report is written down when a test says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from belljar.lease import (
    LARGEST_CONSOLE,
    AccessKey,
    Console,
    Do,
    Instance,
    KeyPair,
    Order,
    Settings,
    Size,
    Tag,
    Wanted,
)
from belljar.lease import desk as leases
from belljar.lease.decisions.policy import Policy
from belljar.lease.desk import Owner
from belljar.lease.ec2 import keyring
from belljar.lease.ec2.front import Front
from belljar.lease.ec2.office import Office, image_id
from belljar.lease.states import InstanceState
from belljar.lease.store import Store, open_store
from belljar.model import GIB
from belljar.records import replace

KEY, OTHER_KEY = "BJAAAAAAAAAAAAAAAAAA", "BJBBBBBBBBBBBBBBBBBB"
SITE_KEY = b"s" * 32
IMAGE = image_id("debian-12")
SETTINGS = Settings(images=("debian-12", "worker*"), zone="lab", preemptible_queue="spare")
TYPES = {
    "m1.small": Size(1, 2 * GIB, 10 * GIB), "m1.large": Size(2, 8 * GIB, 0), "t3.micro": Size(1, GIB, 0), "m1.huge": Size(64, GIB, 0),
}  # fmt: skip


class House:
    """alice has KEY, bob OTHER_KEY."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.most, self.later = folder, time.time(), 20, 0.0
        self.woken, self.orders = list[bool](), list[tuple[str, Order]]()
        self.store: Store = open_store("", folder)
        self.open()
        for id, owner in ((KEY, "alice"), (OTHER_KEY, "bob")):
            key = AccessKey(id, owner, "physics")
            self.store.write(lambda book, key=key: book.put(key))  # type: ignore[misc]

    def open(self) -> None:
        """As after a start of the service."""
        self.told: list[dict[str, Any]] = []
        desk = leases.Desk(self.store, SETTINGS, self._policies, now=lambda: self.now)
        self.office = Office(
            desk, SETTINGS, TYPES, lambda: self.woken.append(True),
            lambda *order: self.orders.append(order), lambda: {"worker": 1.7e9, "secret": 1.7e9},
        )  # fmt: skip
        self.front = Front(
            self.office,
            SITE_KEY,
            clock=lambda: time.time() + self.later,
            tell=lambda event, **facts: self.told.append(facts),
        )

    def reopen(self) -> None:
        self.store.close()
        self.store = open_store("", self.folder)
        self.open()

    def _policies(self) -> tuple[Policy, ...]:
        return (Policy("all", users=("alice", "bob"), machines=self.most, cores=4),)

    def answer(self, *given: Any) -> Any:
        return self.front.answer(*given)

    # -- what is written down ------------------------------------------------------------------------------------------

    @property
    def machines(self) -> list[Instance]:
        return self.store.read(lambda book: book.find(Instance))

    @property
    def wanted(self) -> list[Wanted]:
        return [one.wanted for one in self.store.read(lambda book: book.find(leases.Lease))]

    def belongings(self, owner: str) -> tuple[list[KeyPair], list[Tag]]:
        return self.store.read(lambda book: (book.find(KeyPair, owner=owner), book.find(Tag, owner=owner)))

    @property
    def rebooted(self) -> list[str]:
        return [order.instance for _, order in self.orders if order.do is Do.REBOOT]

    def change(self, *ids: str, **facts: Any) -> None:
        self.store.write(
            lambda book: book.put(*(replace(one, **facts) for one in book.find(Instance) if one.id in ids))
        )

    def wrote(self, id: str, text: bytes) -> None:
        """The last that this machine wrote to its console."""
        self.store.write(lambda book: book.put(Console(id, text[-LARGEST_CONSOLE:], self.now)))

    def revoke(self, key: str) -> None:
        """This access key."""
        keyring.answer(self.store, SITE_KEY, Owner("root"), {"act": "revoke", "id": key})

    def boot(self) -> None:
        """All that waits."""
        waiting = [one.id for one in self.machines if one.state is InstanceState.QUEUED]
        self.change(
            *waiting,
            state=InstanceState.RUNNING,
            address="8.0.0.7",
            deadline=self.now + 7200,
            launched=self.now,
            slot="r-1.1.0",
        )

    def end(self) -> None:
        """All that stops."""
        stopping = [one.id for one in self.machines if one.state is InstanceState.STOPPING]
        self.change(*stopping, state=InstanceState.TERMINATED, ended=self.now)


ALICE, BOB = Owner("alice", "physics"), Owner("bob", "physics")
