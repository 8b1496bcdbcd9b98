"""VacQuery's fields: what each is called on the wire, now and in older versions, and which values are taken.

A value of a wrong type or size makes the whole message refused, with a reason of fixed words.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final

from belljar.records import dataclass
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


# -- values ------------------------------------------------------------------------------------------------------------


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
    return "".join(char if char.isprintable() else "?" for char in first[:LONGEST])


def state(value: Any) -> str:
    return found if (found := text(value)) in STATES else "Unknown"


# -- fields ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One fact of a status: its attribute, how it is read, and what it is called, newest name first."""

    attribute: str
    read: Callable[[Any], Any]
    names: tuple[str, ...]  # all are sent and read
    older: tuple[str, ...] = ()  # these are read only
    is_needed: bool = False
    is_told: bool = True  # where it has no value: as null, for the original wants to see the name

    def write(self, value: Any) -> Any:
        """The value as peers take it. The original prints texts as they come: they are ASCII, and one line."""
        if isinstance(value, str):
            return text(value).encode("ascii", "replace").decode() or None
        return int(value) if self.read is whole and value is not None else value


def _part(attribute: str, read: Callable[[Any], Any], names: str, older: str = "", **facts: bool) -> Part:
    return Part(attribute, read, tuple(names.split()), tuple(older.split()), **facts)


TIME: Final = _part("time_sent", whole, "", "time_sent")  # every message has this and, of a factory, the two at the end
MACHINE: Final = (
    TIME,
    _part("of", how_many, "num_machines", is_needed=True),
    _part("machine", name, "machine", is_needed=True),
    _part("state", state, "state", is_needed=True),
    _part("model", text, "machine_model"),
    _part("uuid", text, "uuid"),
    _part("created", whole, "created_time"),
    _part("started", whole, "started_time"),
    _part("seen", whole, "heartbeat_time"),
    _part("processors", whole, "num_processors num_cpus"),
    _part("cpu_seconds", whole, "cpu_seconds"),
    _part("cpu_percentage", percentage, "cpu_percentage"),
    _part("hs06", number, "hs06"),
    _part("machinetype", name, "machinetype", "vmtype"),
    _part("message", text, "shutdown_message"),
    _part("message_time", whole, "shutdown_time"),
    _part("fqan", text, "fqan", is_told=False),
)
MACHINETYPE: Final = (
    TIME,
    _part("of", how_many, "num_machinetypes", "num_vmtypes", is_needed=True),
    _part("machinetype", name, "machinetype", "vmtype", is_needed=True),
    _part("running_hs06", number, "running_hs06 total_hs06"),
    _part("running_machines", whole, "running_machines total_machines"),
    _part("running_processors", number, "running_processors running_cpus"),
    _part("young", whole, "num_before_fizzle"),
    _part("message", text, "shutdown_message"),
    _part("message_time", whole, "shutdown_time"),
    _part("message_machine", text, "shutdown_machine"),
    _part("last_abort", whole, "last_abort_time", is_told=False),  # these three are belljar's own
    _part("proved", whole, "proved_time", is_told=False),
    _part("room", number, "room_processors", is_told=False),
    _part("memory", whole, "bytes_per_processor", is_told=False),
    _part("max_wallclock", whole, "max_wallclock_seconds", is_told=False),
    _part("max_processors", whole, "max_processors", is_told=False),
    _part("fqan", text, "fqan", is_told=False),
)
FACTORY: Final = (
    TIME,
    _part("running_machines", whole, "running_machines"),
    _part("running_processors", number, "running_processors running_cpus"),
    _part("running_hs06", number, "running_hs06"),
    _part("max_machines", whole, "max_machines total_machines"),
    _part("max_processors", whole, "max_processors max_cpus total_cpus"),
    _part("max_hs06", number, "max_hs06 total_hs06"),
    _part("load_average", number, "load_average"),
    _part("root_free_kb", whole, "root_disk_avail_kb"),
    _part("root_free_inodes", whole, "root_disk_avail_inodes"),
    _part("daemon_free_kb", whole, "daemon_disk_avail_kb vac_disk_avail_kb"),
    _part("daemon_free_inodes", whole, "daemon_disk_avail_inodes vac_disk_avail_inodes"),
    _part("memory_used_kb", whole, "mem_used_kb"),
    _part("memory_total_kb", whole, "mem_total_kb"),
    _part("swap_used_kb", whole, "swap_used_kb"),
    _part("swap_free_kb", whole, "swap_free_kb"),
    _part("kernel", text, "kernel_version"),
    _part("system", text, "os_issue"),
    _part("boot_time", whole, "boot_time"),
    _part("factory_heartbeat", whole, "factory_heartbeat_time"),
    _part("responder_heartbeat", whole, "responder_heartbeat_time"),
    _part("metadata_heartbeat", whole, "metadata_heartbeat_time mjf_heartbeat_time"),
    _part("site", text, "", "site"),
    _part("version", text, "", "daemon_version vac_version"),
)
