"""What is written down of a request, with SQLite and a queue with a limit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BadRequest, LeaseDenied, OverLimit
from belljar.lease import Settings, Size, Wanted
from belljar.lease.clerk import explain
from belljar.lease.decisions.margins import Queue, fitting
from belljar.lease.decisions.policy import Policy
from belljar.lease.desk import Desk, Owner
from belljar.lease.store import open_store
from belljar.model import GIB
from belljar.records import replace

ADA = Owner("ada")
SETTINGS = Settings()
UNTIMED = Wanted("alma", size=Size(2), seconds=0.0)
Make = Callable[..., Desk]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Make]:
    store = open_store("", tmp_path)

    def make(limit: float | None = None, settings: Settings = SETTINGS, **policy: float) -> Desk:
        return Desk(store, settings, lambda: [Policy("all", users=("*",), **policy)], lambda name: Queue(limit, 60))  # type: ignore[arg-type]

    yield make
    store.close()


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({}, 86400),
        ({"settings": Settings(longest_time=7200)}, 7200),
        ({"limit": 3600}, 3600 - 2 - 300 - 32 - 30),
        ({"limit": 3600, "time": 1800}, 1800),
        ({"reserved": 10}, 5 * 3600),
        ({"reserved": 10, "total": 4}, 2 * 3600),
    ],
)
def test_without_a_time_a_lease_has_the_longest_that_queue_and_policy_give(
    desk: Make, facts: dict[str, float], seconds: float
) -> None:
    found = desk(**facts)
    lease, (machine,) = found.run(ADA, UNTIMED)
    assert lease.wanted.seconds == machine.seconds == seconds
    assert fitting(lease.wanted, found.settings, found.queue(""))


def test_it_is_explained_with_the_time_that_it_gets(desk: Make) -> None:
    steps = explain(desk(3600, time=1800), ADA, UNTIMED)
    assert all(is_met for _, is_met in steps) and "seconds of one lease: 1800 of at most 1800" in dict(steps)


@pytest.mark.parametrize(
    "size", [{"size": Size(disk=8 * GIB - 1)}, {"count": 2, "sizes": (Size(disk=0), Size(disk=GIB))}]
)
def test_a_disk_that_is_smaller_than_its_image_is_refused(desk: Make, size: dict[str, Any]) -> None:
    found = desk()
    found.least_disk = {"alma": 8 * GIB}.get
    with pytest.raises(BadRequest, match=r"MiB: that of alma has 8192 MiB"):
        found.run(ADA, replace(UNTIMED, **size))
    assert found.run(ADA, replace(UNTIMED, size=Size(disk=8 * GIB))) and found.run(
        ADA, replace(UNTIMED, size=Size(disk=0))
    )
    assert found.run(ADA, replace(UNTIMED, image="elsewhere", size=Size(disk=1)))  # this host does not know it


def test_what_gives_less_than_a_minute_is_still_a_refusal(desk: Make) -> None:
    with pytest.raises(LeaseDenied, match="core-hours"):
        desk(total=0.01).run(ADA, UNTIMED)
    with pytest.raises(OverLimit, match="its queue gives 300 s"):
        desk(300).run(ADA, UNTIMED)
