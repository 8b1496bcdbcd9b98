"""What the front end asks of the service, and the words for it: EC2's, free of how leases are kept.

An owner sees what is theirs and nothing else: whatever belongs to another is not there. A desk answers at once, from what is
written down; machines are started and stopped by the service, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from belljar.lease.desk import Owner
from belljar.records import dataclass

STATES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48, "stopping": 64, "stopped": 80}
Tags = Mapping[str, str]


@dataclass(frozen=True)
class Size:
    """An instance type. Memory and disk in MiB."""

    name: str
    cpus: int
    memory: int
    disk: int = 0  # 0: as the image's


@dataclass(frozen=True)
class Image:
    """What can be booted."""

    id: str
    name: str
    created: float = 0.0
    architecture: str = "x86_64"
    note: str = ""


@dataclass(frozen=True)
class Wanted:
    """What RunInstances asks for."""

    image: Image
    size: Size
    least: int
    most: int
    seconds: float
    zone: str = ""
    key_name: str = ""
    user_data: bytes = b""
    token: str = ""
    bid: float | None = None  # None: not on the spot
    deadline: float = 0.0  # by which it must have started; 0: as usual
    tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Instance:
    """One machine of a lease, as EC2 sees it. Moments in seconds since the epoch; "" and None: not known, or there is none."""

    id: str
    lease: str
    index: int
    state: str  # one of STATES
    image: str
    size: str
    launched: float
    cpus: int = 1
    zone: str = ""
    key_name: str = ""
    token: str = ""
    address: str = ""
    name: str = ""  # by DNS
    cause: str = ""  # EC2's code for why it is not running
    why: str = ""
    ends: float | None = None
    is_spot: bool = False
    tags: tuple[tuple[str, str], ...] = ()  # the owner's, and `lease:...` of the service


@dataclass(frozen=True)
class KeyPair:
    """A public key under a name of its owner's."""

    id: str
    name: str
    public: str  # one line, as OpenSSH writes it
    fingerprint: str
    created: float
    tags: tuple[tuple[str, str], ...] = ()


class Desk(Protocol):
    """All that the front end needs. Every function may raise Refused."""

    region: str
    usual_seconds: float  # of a lease whose owner says nothing

    def owner_of(self, key: str) -> Owner | None:
        """Whose access key this is; None where there is none, or it was revoked."""

    def images(self, owner: Owner) -> Sequence[Image]: ...

    def sizes(self, owner: Owner) -> Sequence[Size]: ...

    def zones(self) -> Sequence[str]:
        """Names; the first is that of who names none."""

    def most_instances(self, owner: Owner) -> int:
        """How many may run at once; 0: no limit."""

    def may_run(self, owner: Owner, wanted: Wanted) -> None:
        """Raises Refused, with the numbers, where `run` would."""

    def run(self, owner: Owner, wanted: Wanted) -> Sequence[Instance]:
        """Write down a lease, once for an owner's token: asked again, it is the one that is there; asked for something else
        with that token, IdempotentParameterMismatch."""

    def instances(self, owner: Owner) -> Sequence[Instance]:
        """Those that live, and those that ended within the last hour, by launch, lease and index."""

    def terminate(self, owner: Owner, ids: Iterable[str]) -> None:
        """Ended ones too. One that waits in the queue is terminated with this."""

    def reboot(self, owner: Owner, ids: Iterable[str]) -> None: ...

    def console(self, owner: Owner, id: str) -> tuple[float, bytes]:
        """The moment of the last change, and the last that the machine wrote, 64 KiB at most."""

    def user_data(self, owner: Owner, id: str) -> bytes: ...

    def key_pairs(self, owner: Owner) -> Sequence[KeyPair]: ...

    def add_key_pair(self, owner: Owner, pair: KeyPair) -> None:
        """Raises Refused, InvalidKeyPair.Duplicate, where the name is taken."""

    def remove_key_pair(self, owner: Owner, name: str) -> None: ...

    def tag(self, owner: Owner, ids: Iterable[str], tags: Tags) -> None: ...

    def untag(self, owner: Owner, ids: Iterable[str], tags: Mapping[str, str | None]) -> None:
        """Take off these keys; with a value, only where it is that."""
