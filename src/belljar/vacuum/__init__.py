"""The words of the vacuum: what a site offers to whom (`Space`, `MachineType`), and what factories tell each other.

A factory is a host that decides alone which machine to start next. All factories of a space share its target shares and ask
each other over UDP what runs. Frozen values, no input or output. Sizes are in bytes, times in seconds, moments in seconds since the epoch,
unless a name says otherwise."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from belljar.host.values import ADDRESS, HOSTS_NAME, HTTP, PLACE, PLAIN_FILE, Form
from belljar.model import GIB, Context, setting
from belljar.records import dataclass, field
from belljar.service.credentials.proxies import ProxyKey

T = TypeVar("T")
LIKE_A_SPACE: Final = "as in vac01.example.org; all factories of a space have the same"
LIKE_AN_IMAGE: Final = "an image's name, an address or a path"
SPACES_NAME: Final = Form(HOSTS_NAME, "cannot be a name", LIKE_A_SPACE)
HOST: Final = Form(rf"\.|{HOSTS_NAME}", "cannot be a host's name", "as in wn01.example.org")
IMAGE: Final = Form(r"\S+", "has blanks", LIKE_AN_IMAGE)
FQAN: Final = Form("/.*", "does not begin with /", "as in /atlas/Role=pilot")
NETWORK: Final = Form(
    r"none|user|bridge|bridge:[^:\s]+|isolated:[A-Za-z0-9._-]{1,32}", "is not a network", "user, bridge, bridge:NAME, isolated:GROUP or none"
)  # fmt: skip
TEMPLATE: Final = Form(rf"/.*|{HTTP}", "is neither an http(s) address nor a path", "write it from the root")
ABORTED: Final = 300  # a machine whose shutdown message has this code or a greater one counts against its type


def of_space(default: T, help: str, /, **metadata: object) -> T:
    """A key of `[space]`."""
    return setting(default, help, table="space", **metadata)


def of_factory(default: T, help: str, /, **metadata: object) -> T:
    """A key of `[factory]`."""
    return setting(default, help, table="factory", **metadata)


def told(default: T, names: str, older: str = "", *, is_needed: bool = False, if_known: bool = False) -> T:
    """A fact that factories tell each other, and its names in VacQuery: *names* are all sent and read, *older* ones are read only.
    *if_known*: it is left out where it has no value; others are sent as null, for Vac wants to see the name."""
    metadata = {"names": names.split(), "older": older.split(), "is_needed": is_needed, "if_known": if_known}
    return field(default=default, metadata=metadata)


class Mode(str, Enum):
    """How a factory decides."""

    COMPATIBLE = "compatible"  # as the original, for spaces shared with it
    IMPROVED = "improved"  # fair groups, several machines a cycle, one tester, memory and disk count, bounded idle time


Pairs = tuple[tuple[str, str], ...]
Paths = tuple[tuple[str, Path], ...]


@dataclass(frozen=True)
class MachineType:
    """One kind of machine: an image, how it is told its work, and its limits. About one per experiment. A field with a help
    text is a key of `[machinetype.NAME]`."""

    name: str  # [a-z0-9-]+
    share: float = setting(0.0, "of the space, relative to the other machinetypes; 0: none is started")
    group: str = setting("", "machinetypes of a group share what it gets; empty: the accounting group, else its name")
    image: str = setting("", "required: a name as in `belljar image list`, an http(s) address, or a path", form=IMAGE)
    min_processors: int = setting(1, "a machine has no fewer", minimum=1)
    max_processors: int = setting(1, "a machine has no more", minimum=1)
    min_wallclock: float | None = setting(None, "less time is of no use; empty: max_wallclock", unit="seconds")
    max_wallclock: float = setting(86400.0, "a machine is ended after this time", unit="seconds", minimum=1)
    memory: int | None = setting(None, "per processor; empty: as the factory's", unit="bytes", minimum=1)
    disk: int | None = setting(None, "per processor; empty: as the factory's", unit="bytes", minimum=1)
    backoff: float = setting(600.0, "no machine is started for so long after an aborted one", unit="seconds")
    fizzle: float = setting(600.0, "a machine that ends sooner without a message was aborted, too", unit="seconds")
    fqan: str = setting("", "accounting group, as in /atlas/Role=pilot", form=FQAN)
    network: str = setting("user", "as `belljar run --network` takes it", form=NETWORK)
    context: Context = setting(Context.AUTO, "how the image is told who it is, as `belljar run --context` takes it")
    user_data: str = setting("", "http(s) address or path of the template; empty: the machine gets none", form=TEMPLATE)
    options: Pairs = setting((), "table: what `##user_data_option_NAME##` in the template becomes")
    option_files: Paths = setting((), "table: the same, from files of this host, read anew for each machine")
    heartbeat_file: str = setting("", "a file that a machine PUTs to its job outputs, or it is ended", form=PLAIN_FILE)
    heartbeat: float = setting(0.0, "it has to do so again within this time; 0: once is enough", unit="seconds")
    proxy: tuple[Path, ...] = setting(
        (),
        "paths of a certificate and its key (or one file with both); each machine gets a limited proxy made with them",
    )
    proxy_key: ProxyKey = setting(ProxyKey.RSA, "kind of the proxies' own keys: RSA of 2048 bits, or curve P-256")
    token_file: Path | None = setting(None, "a file with a token that each machine gets, renewed when the file changes")
    pipe: str = ""  # the vacuum pipe it came by

    @property
    def belongs_to(self) -> str:
        """The group its share counts in."""
        return self.group or self.fqan or self.name

    @property
    def least_wallclock(self) -> float:
        """Seconds below which a machine of this type is of no use."""
        return self.max_wallclock if self.min_wallclock is None else self.min_wallclock


Given = tuple[tuple[str, Any], ...]  # fields of a MachineType that somebody set, with their values


@dataclass(frozen=True)
class Pipe:
    """Machinetypes that an experiment describes at an address, and what this site says of them. A field with a help text is a
    key of `[pipe.NAME]`."""

    name: str  # its machinetypes are NAME-SUFFIX
    url: str = setting("", "required: http(s) address of the JSON document", form=ADDRESS)
    share: float = setting(0.0, "of the space, for all its machinetypes together")
    inside: bool = setting(False, "its server may be in a private network")
    files: Path | None = setting(None, "folder with the files that the document names; empty: it cannot name any")
    given: Given = ()  # what `[pipe.NAME]` says of all its machinetypes
    own: tuple[tuple[str, Given], ...] = ()  # what `[machinetype.NAME-SUFFIX]` says of one


@dataclass(frozen=True)
class TypeStatus:
    """What one factory says of one type."""

    factory: str
    machinetype: str = told("", "machinetype", "vmtype", is_needed=True)
    running_hs06: float = told(0.0, "running_hs06 total_hs06")  # starting machines count as well
    running_machines: int = told(0, "running_machines total_machines")
    running_processors: float = told(0.0, "running_processors running_cpus")
    young: int = told(0, "num_before_fizzle")  # starting, or running for less than its fizzle time
    message: str | None = told(None, "shutdown_message")  # of the machine that finished last; one line
    message_time: int | None = told(None, "shutdown_time")
    message_machine: str | None = told(None, "shutdown_machine")
    # The next three are belljar's own: the latest abort's moment; when the latest machine began that found work (it outlived
    # fizzle, or left 200 to 299); processors that came free since this factory decided last, which it will give away next.
    last_abort: int | None = told(None, "last_abort_time", if_known=True)
    proved: int | None = told(None, "proved_time", if_known=True)
    room: float | None = told(None, "room_processors", if_known=True)
    memory: int | None = told(None, "bytes_per_processor", if_known=True)
    max_wallclock: int | None = told(None, "max_wallclock_seconds", if_known=True)
    max_processors: int | None = told(None, "max_processors", if_known=True)
    of: int = told(1, "num_machinetypes", "num_vmtypes", is_needed=True)  # how many types this factory has
    time_sent: int = told(0, "", "time_sent")
    fqan: str = told("", "fqan", if_known=True)


@dataclass(frozen=True)
class MachineStatus:
    """What one factory says of one of its slots."""

    factory: str
    machine: str = told("", "machine", is_needed=True)  # name of the slot
    state: str = told("Shut down", "state", is_needed=True)  # or "Starting", "Running", "Unknown"
    machinetype: str | None = told(None, "machinetype", "vmtype")
    uuid: str | None = told(None, "uuid")
    model: str | None = told(None, "machine_model")
    created: int | None = told(None, "created_time")
    started: int | None = told(None, "started_time")
    seen: int | None = told(None, "heartbeat_time")  # when it was last seen running
    processors: int = told(0, "num_processors num_cpus")
    cpu_seconds: int = told(0, "cpu_seconds")
    cpu_percentage: float = told(0.0, "cpu_percentage")
    hs06: float = told(0.0, "hs06")
    message: str | None = told(None, "shutdown_message")
    message_time: int | None = told(None, "shutdown_time")
    of: int = told(1, "num_machines", is_needed=True)  # how many slots this factory has
    time_sent: int = told(0, "", "time_sent")
    fqan: str = told("", "fqan", if_known=True)


@dataclass(frozen=True)
class FactoryStatus:
    """What one factory says of itself."""

    factory: str
    site: str = told("", "", "site")  # this and the version are sent with every status
    version: str = told("", "", "daemon_version vac_version")
    running_machines: int = told(0, "running_machines")
    running_processors: float = told(0.0, "running_processors running_cpus")
    running_hs06: float = told(0.0, "running_hs06")
    max_machines: int = told(0, "max_machines total_machines")
    max_processors: int = told(0, "max_processors max_cpus total_cpus")
    max_hs06: float = told(0.0, "max_hs06 total_hs06")
    load_average: float = told(0.0, "load_average")
    root_free_kb: int = told(0, "root_disk_avail_kb")
    root_free_inodes: int = told(0, "root_disk_avail_inodes")
    daemon_free_kb: int = told(0, "daemon_disk_avail_kb vac_disk_avail_kb")
    daemon_free_inodes: int = told(0, "daemon_disk_avail_inodes vac_disk_avail_inodes")
    memory_used_kb: int = told(0, "mem_used_kb")
    memory_total_kb: int = told(0, "mem_total_kb")
    swap_used_kb: int = told(0, "swap_used_kb")
    swap_free_kb: int = told(0, "swap_free_kb")
    kernel: str = told("", "kernel_version")
    system: str = told("", "os_issue")
    boot_time: int = told(0, "boot_time")
    factory_heartbeat: int = told(0, "factory_heartbeat_time")
    responder_heartbeat: int = told(0, "responder_heartbeat_time")
    metadata_heartbeat: int = told(0, "metadata_heartbeat_time mjf_heartbeat_time")
    time_sent: int = told(0, "", "time_sent")


@dataclass(frozen=True)
class Space:
    """One set of factories with one set of shares, and what this factory offers it. A field with a help text is a key of
    `[space]` or `[factory]`."""

    name: str = of_space("", "required: like a DNS name; all factories that have it are one space", form=SPACES_NAME)
    factory: str = of_factory("", "this host's name in the space", default="the host's own", key="name", form=HOST)
    factories: tuple[str, ...] = of_space((), "names of all factories, this one among them (or `.`)", form=HOST)
    types: tuple[MachineType, ...] = ()
    pipes: tuple[Pipe, ...] = ()
    site: str = of_space("", "the site's name, as accounting knows it; empty: the space's without its first part")
    mode: Mode = of_space(Mode.IMPROVED, "compatible: as Vac, for a space with factories of Vac")
    history: float = of_space(
        0.0, "half-life of past use, which counts beside what runs; 0: it does not", unit="seconds"
    )
    reserve: float = of_space(0.25, "part of a large machine's processor time that may be idle for it", maximum=1)
    port: int = of_space(995, "UDP port of all factories", minimum=1, maximum=65535)
    poll_silence: float = of_space(2.0, "a round of questions ends after such a silence", unit="seconds", minimum=0.001)
    poll_limit: float = of_space(12.0, "and all rounds together after so long", unit="seconds", minimum=0.001)
    listen: tuple[str, ...] = of_factory((), "addresses where questions are answered; empty: those of its name")
    allow: tuple[str, ...] = of_space((), "networks whose questions are answered; empty: everybody's")
    key_file: Path | None = of_space(None, "file with a secret of the space that signs questions and answers")
    signed_only: bool = of_space(False, "what is not signed by that secret is refused; factories of Vac cannot sign")
    vacmon: tuple[str, ...] = of_space((), "HOST:PORT that get a message in each cycle", form=PLACE)
    processors: int = of_factory(1, "at most so many are given to machines", minimum=1, default="the host's")
    processors_per_superslot: int = of_factory(
        1, "of machines that end together, to make room for a large one", minimum=1
    )
    memory: int = of_factory(2 * GIB, "of a machine, per processor", unit="bytes", minimum=1)
    disk: int | None = of_factory(None, "of a machine, per processor; empty: as its image", unit="bytes", minimum=1)
    hs06: float | None = of_factory(None, "HS06 of one processor", minimum=0.001)
    hepscore: float | None = of_factory(None, "HEPscore23 of one processor", minimum=0.001)
    overload: float = of_factory(1.25, "load average per processor above which nothing is started", minimum=0.001)
    starting: int = of_factory(
        1 << 30, "so many machines may be starting at a time", minimum=1,
        default="two for each of the host's processors",
    )  # fmt: skip
    shutdown_time: float | None = of_factory(None, "all machines are gone by then", unit="moment")
    draining: bool = of_factory(False, "start nothing; what runs, runs to its end")
    cycle: float = of_factory(60.0, "between two decisions, where nothing happens before", unit="seconds", minimum=1)
    options: Pairs = of_factory((), "`options` of every machinetype")
    option_files: Paths = of_factory((), "`option_files` of every machinetype")

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
