"""What an operator says to a bait, and what it shows: two small files in its folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from belljar.bait import Order
from belljar.bait.decisions.step import BaitState
from belljar.errors import BelljarError
from belljar.host.files import private_folder
from belljar.records import dataclass, field
from belljar.service import kept

ORDER, STATUS = "order.json", "status.json"


@dataclass(frozen=True)
class Status:
    """A bait at its last look. Moments are seconds since the epoch."""

    name: str
    system: str
    pid: int
    started: float
    looked: float = 0.0
    state: str = BaitState.OPEN.value
    why: str = ""
    waits: str = ""  # what the next job waits for
    error: str = ""  # why the batch system, or the journal, could not be asked
    faults: int = 0  # failed starts in a row
    failed: float = 0.0  # when the last one was
    jobs: dict[str, int] = field(default_factory=dict)  # how many in each state
    nodes: dict[str, str] = field(default_factory=dict)  # of machines, with their states
    names: dict[str, str] = field(default_factory=dict)  # machine -> node


def read_status(folder: Path) -> Status | None:
    status: Status | None = kept.read(folder / STATUS, Status)
    return status


def order(folder: Path) -> Order:
    return kept.read(folder / ORDER, Order) or Order()


def give_order(folder: Path, order: Order) -> None:
    """The bait that works in this folder obeys it at its next look, and after a restart too."""
    kept.keep(private_folder(folder) / ORDER, order, durable=True)


def show_status(folder: Path, status: Status) -> None:
    with suppress(OSError, BelljarError):
        kept.keep(folder / STATUS, status)
