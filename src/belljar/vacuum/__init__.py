"""The words of the vacuum: what a site offers to whom (`Space`, `MachineType`), and what factories tell each other.

A factory is a host that decides alone which machine to start next. All factories of a space share its target shares and ask
each other over UDP what runs. Frozen values, no input or output. Sizes are in bytes, times in seconds, moments in seconds since the epoch,
unless a name says otherwise.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Final

from belljar.records import dataclass

ABORTED: Final = 300  # a machine whose shutdown message has this code or a greater one counts against its type


class Mode(str, Enum):
    """How a factory decides."""

    COMPATIBLE = "compatible"  # as the original, for spaces shared with it
    IMPROVED = "improved"  # fair groups, several machines per cycle, one tester, memory and disk count, bounded idle time


@dataclass(frozen=True)
class MachineType:
    """One kind of machine: an image, how it is told its work, and its limits. About one per experiment."""

    name: str  # [a-z0-9-]+
    share: float = 0.0  # of the space, relative to the other types; 0: none is started
    group: str = ""  # types of one group share what the group gets; "": the accounting group, else its own name
    image: str = ""  # as `belljar run --image` takes it
    min_processors: int = 1
    max_processors: int = 1
    min_wallclock: float | None = None  # a machine with less time than this is of no use; None: max_wallclock
    max_wallclock: float = 86400.0
    memory: int | None = None  # per processor; None: the factory's
    disk: int | None = None  # per processor; None: the factory's, where that is given
    backoff: float = 600.0  # no machine for so long after an aborted one
    fizzle: float = 600.0  # a machine that ends sooner without a word was aborted, too
    fqan: str = ""  # accounting group: /atlas/Role=pilot
    network: str = "user"  # as `belljar run --network` takes it
    context: str = "auto"  # as `belljar run --context` takes it
    user_data: str = ""  # URL, or path of the template
    options: tuple[tuple[str, str], ...] = ()  # what `##user_data_option_NAME##` of the template becomes
    option_files: tuple[tuple[str, Path], ...] = ()  # the same, from files of this host
    heartbeat_file: str = ""  # which its machines have to PUT to their job outputs
    heartbeat: float = 0.0  # and to renew as often as this; 0: being there is enough
    proxy: tuple[Path, Path] | None = None  # certificate and key of which each machine gets a limited proxy
    legacy_proxy: bool = False
    token_file: Path | None = None  # a token each machine gets, anew when the file changes
    pipe: str = ""  # the vacuum pipe it came by

    @property
    def belongs_to(self) -> str:
        """The group its share counts in."""
        return self.group or self.fqan or self.name

    @property
    def least_wallclock(self) -> float:
        """Seconds below which a machine of this type is of no use."""
        return self.max_wallclock if self.min_wallclock is None else self.min_wallclock


@dataclass(frozen=True)
class TypeStatus:
    """What one factory says of one type."""

    factory: str
    machinetype: str
    running_hs06: float = 0.0  # starting machines count as well
    running_machines: int = 0
    running_processors: float = 0.0
    young: int = 0  # starting, or running for less than its fizzle time
    message: str | None = None  # of the machine that finished last; one line
    message_time: int | None = None
    message_machine: str | None = None
    last_abort: int | None = None  # moment of the latest aborted one, from factories that tell it
    memory: int | None = None  # per processor
    max_wallclock: int | None = None
    max_processors: int | None = None
    of: int = 1  # how many types this factory has
    time_sent: int = 0
    fqan: str = ""


@dataclass(frozen=True)
class MachineStatus:
    """What one factory says of one of its slots."""

    factory: str
    machine: str  # name of the slot
    state: str = "Shut down"  # "Starting", "Running", "Shut down", "Unknown"
    machinetype: str | None = None
    uuid: str | None = None
    model: str | None = None
    created: int | None = None
    started: int | None = None
    seen: int | None = None  # when it was last seen running
    processors: int = 0
    cpu_seconds: int = 0
    cpu_percentage: float = 0.0
    hs06: float = 0.0
    message: str | None = None
    message_time: int | None = None
    of: int = 1  # how many slots this factory has
    time_sent: int = 0
    fqan: str = ""


@dataclass(frozen=True)
class FactoryStatus:
    """What one factory says of itself."""

    factory: str
    site: str = ""
    version: str = ""
    running_machines: int = 0
    running_processors: float = 0.0
    running_hs06: float = 0.0
    max_machines: int = 0
    max_processors: int = 0
    max_hs06: float = 0.0
    load_average: float = 0.0
    root_free_kb: int = 0
    root_free_inodes: int = 0
    daemon_free_kb: int = 0
    daemon_free_inodes: int = 0
    memory_used_kb: int = 0
    memory_total_kb: int = 0
    swap_used_kb: int = 0
    swap_free_kb: int = 0
    kernel: str = ""
    system: str = ""
    boot_time: int = 0
    factory_heartbeat: int = 0
    responder_heartbeat: int = 0
    metadata_heartbeat: int = 0
    time_sent: int = 0


@dataclass(frozen=True)
class Space:
    """One set of factories with one set of shares, and what this factory offers it."""

    name: str  # like a DNS name: vac01.example.org
    factory: str  # this host's own name in it
    factories: tuple[str, ...] = ()  # all, this one among them
    types: tuple[MachineType, ...] = ()
    site: str = ""  # as accounting knows it; "": none is told
    processors: int = 1  # at most so many are given to machines
    processors_per_superslot: int = 1
    memory: int = 2 << 30  # per processor
    disk: int | None = None  # per processor
    hs06: float | None = None  # of one processor
    hepscore: float | None = None  # of one processor
    overload: float = 1.25  # load average per processor above which nothing is started
    shutdown_time: float | None = None
    draining: bool = False
    mode: Mode = Mode.IMPROVED
    port: int = 995
    poll_silence: float = 2.0  # a round of questions ends when nothing came for so long
    poll_limit: float = 12.0  # and all of it after so long
    cycle: float = 60.0  # between two decisions, where nothing happens before
    listen: tuple[str, ...] = ()  # addresses where questions are answered; none: those of this factory's name
    allow: tuple[str, ...] = ()  # networks whose questions are answered; none: everybody's
    key_file: Path | None = None  # shared secret that signs questions and answers
    signed_only: bool = False  # what is not signed by that key is refused; factories of the original cannot sign
    vacmon: tuple[str, ...] = ()  # HOST:PORT that are told of each cycle

    @property
    def hs06_per_processor(self) -> float:
        """As shares count it: 1.0 where nobody measured."""
        return self.hs06 or self.hepscore or 1.0


def code_of(message: str | None) -> int | None:
    """The three digits a shutdown message begins with, 100 to 999; None where there are none."""
    digits = (message or "")[:3]
    return int(digits) if len(digits) == 3 and digits.isascii() and digits.isdigit() and digits[0] != "0" else None


def is_abort(message: str | None) -> bool:
    """Does a machine that left this message count against its type?"""
    code = code_of(message)
    return code is not None and code >= ABORTED
