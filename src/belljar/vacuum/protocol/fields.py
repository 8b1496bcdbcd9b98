"""VacQuery's fields: which values are taken, and how each is read and written. Their names stand at the statuses.

A value of a wrong type or size makes the whole message refused, with a reason of fixed words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, get_args, get_type_hints

from belljar.errors import printable
from belljar.records import dataclass, fields
from belljar.vacuum import FactoryStatus, MachineStatus, TypeStatus

LONGEST: Final = 200  # characters of a text, such as a shutdown message
LONGEST_NAME: Final = 255
MOST: Final = 10_000  # machines or types of one factory
STATES: Final = ("Unknown", "Shut down", "Starting", "Running", "Paused", "Zombie", "Deleting", "Failed")

Status = MachineStatus | TypeStatus | FactoryStatus


class Why(str, Enum):
    """Why a packet is not taken: what is counted and logged, nothing of the packet itself."""

    TOO_LONG = "too long"
    NOT_JSON = "not a JSON object that has each key once"
    NO_COOKIE = "without a cookie"
    OTHER_SPACE = "of another space"
    UNKNOWN = "of an unknown kind"
    BAD_FIELD = "a field is missing, or of a wrong type or size"
    UNSIGNED = "not signed"
    FORGED = "signed with another key"
    STALE = "signed at another time: a clock is wrong, or somebody repeats it"
    STRANGE_COOKIE = "an answer to no question of this poll"
    OTHER_FACTORY = "an answer in another factory's name"
    NOT_ALLOWED = "from an address that may not ask"
    TOO_MANY = "from an address that asks too much"
    FAILED = "could not be answered"


class Refused(ValueError):
    """A packet that is not taken."""

    def __init__(self, why: Why) -> None:
        super().__init__(why.value)
        self.why = why


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e15:
        raise Refused(Why.BAD_FIELD)
    return value


def whole(value: Any) -> int:
    return int(number(value))


def how_many(value: Any) -> int:
    return min(whole(value), MOST)


def percentage(value: Any) -> float:
    """Less than nothing, where a peer's clock jumped, is nothing."""
    return 0.0 if isinstance(value, int | float) and value < 0 else number(value)


def name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or not value.isprintable():
        raise Refused(Why.BAD_FIELD)
    return value


def text(value: Any) -> str:
    """The first line, cut, without what could steer a terminal."""
    if not isinstance(value, str):
        raise Refused(Why.BAD_FIELD)
    first = next(iter(value[: 2 * LONGEST].strip().splitlines()), "")
    return printable(first[:LONGEST])


def state(value: Any) -> str:
    return word if (word := text(value)) in STATES else "Unknown"


# -- fields ------------------------------------------------------------------------------------------------------------

READERS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    "of": how_many, "machine": name, "machinetype": name, "state": state, "cpu_percentage": percentage,
    int: whole, float: number, str: text,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One fact of a status: its attribute, how it is read, and what `vacuum.told` says of its names."""

    attribute: str
    read: Callable[[Any], Any]
    names: Sequence[str]
    older: Sequence[str]
    is_needed: bool
    if_known: bool

    def write(self, value: Any) -> Any:
        """The value as peers take it. The original prints texts as they come: they are ASCII, and one line."""
        if isinstance(value, str):
            return text(value).encode("ascii", "replace").decode() or None
        return int(value) if self.read is whole and value is not None else value


def parts_of(kind: type[Any]) -> tuple[Part, ...]:
    """The fields of this status; one without a reader of its own is read by its type."""
    hints = get_type_hints(kind)
    plain = {name: next(iter(get_args(hint)), hint) for name, hint in hints.items()}
    shared = [field for field in fields(kind) if field.metadata]
    return tuple(
        Part(field.name, READERS.get(field.name) or READERS[plain[field.name]], **field.metadata) for field in shared
    )
