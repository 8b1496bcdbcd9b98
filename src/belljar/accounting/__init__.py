"""The door of accounting: usage records of ended machines, for grid accounting (APEL) and for whoever reads batch logs.

It reads the ledger, and what it is handed of leases. A machine is accounted by what was written down when it was made (labels of its row), never by today's
settings. Each machine is accounted once, whatever is killed (publish.py)."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from belljar.model import setting
from belljar.records import dataclass

LONGEST = 250  # characters of a word in a record


class Version(str, Enum):
    """Of APEL's message of individual jobs."""

    V03 = "0.3"
    V04 = "0.4"


@dataclass(frozen=True)
class Settings:
    """`[accounting]` in the settings files."""

    folder: Path = setting(
        Path("/var/lib/belljar/accounting"),
        "usage records",
    )
    version: Version = setting(Version.V03, "of APEL's individual job messages")
    site: str = setting(
        "", "GOCDB's name of the site, in cloud records of leases; empty: they are archived, and not sent"
    )
    logs: bool = setting(False, "write each machine into a PBS and a BLAH log, too, for APEL's log parsers")


@dataclass(frozen=True)
class UsageRecord:
    """What one machine used. Moments are whole seconds since the epoch, durations seconds, sizes bytes."""

    id: str  # of the machine, and of the job that its guest was told
    machinetype: str
    space: str
    factory: str
    start: int
    end: int
    cpu: int  # seconds on all processors together
    processors: int
    memory: int  # given to it
    memory_used: int  # at most, as the host saw it
    site: str = ""  # "": the space's name without its first label
    fqan: str = ""
    benchmark: str = ""  # "HEPSPEC", "HEPscore23", or "": nobody measured
    power: float = 1.0  # of one processor, by that benchmark
    wall_limit: int = 0  # seconds it was promised; 0: none

    @property
    def wall(self) -> int:
        return self.end - self.start

    @property
    def site_name(self) -> str:
        return self.site or self.space.partition(".")[2] or self.space

    @property
    def user(self) -> str:
        """The space, as a certificate's subject would have it."""
        return "".join(f"/DC={label}" for label in reversed(self.space.split(".")))

    @property
    def submit_host(self) -> str:
        """Unique for each factory, so that it can count by itself what it sent."""
        return f"{self.space}/belljar-{self.factory}"

    @property
    def is_reportable(self) -> bool:
        """Is it complete enough to be sent? Its site has a name, and its processors were measured."""
        return bool(self.site and self.benchmark)


@dataclass(frozen=True)
class CloudRecord:
    """What one leased machine used. Moments are whole seconds since the epoch, sizes bytes."""

    id: str
    service: str  # that leased it
    user: str
    group: str
    image: str
    start: int
    end: int
    wall: int  # seconds that it ran
    processors: int
    memory: int
    disk: int


def word(text: str) -> str:
    """As it may stand in a line of a record, which `%%` would end: labels may come from a pipe."""
    return "".join(char if " " <= char <= "~" and char != "%" else "?" for char in text)[:LONGEST].strip()
