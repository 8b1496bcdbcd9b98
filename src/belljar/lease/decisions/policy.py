"""How much each user may have. Pure: a decision comes with each step that led to it, in numbers.

A policy is a template of limits, with the users and groups it is for. The first that fits counts, by priority and then by name; whom
none fits is denied. All sums are of whole core-seconds, rounded up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from math import ceil, inf

from belljar.errors import LeaseDenied
from belljar.lease import Wanted
from belljar.model import setting
from belljar.records import dataclass

DAY = 86400.0
MACHINES, CORES, FORBIDDEN = "InstanceLimitExceeded", "VcpuLimitExceeded", "UnauthorizedOperation"
ANY = ("*",)


@dataclass(frozen=True)
class Policy:
    """`[policy.NAME]` in lease.toml. A limit of 0 means no limit. In lists of names `*` and `?` are wildcards."""

    name: str
    users: tuple[str, ...] = setting((), "users it is for")
    groups: tuple[str, ...] = setting((), "groups it is for")
    priority: int = setting(100, "of several that fit the least counts", minimum=0)
    machines: int = setting(0, "that a user may have at a time", minimum=0)
    request: int = setting(0, "machines of one lease", minimum=0)
    cores: int = setting(0, "processors of one machine", minimum=0)
    memory: int = setting(0, "of one machine", unit="bytes", minimum=0)
    disk: int = setting(0, "of one machine", unit="bytes", minimum=0)
    time: float = setting(0.0, "of one lease", unit="seconds", minimum=0)
    reserved: float = setting(0.0, "core-hours that a user's live machines may take until their ends", minimum=0)
    total: float = setting(0.0, "core-hours that a user may have used and reserved, within `window`", minimum=0)
    window: float = setting(0.0, "days that `total` looks back; 0: all there ever were", minimum=0)
    images: tuple[str, ...] = setting(ANY, "that they may lease")
    queues: tuple[str, ...] = setting(ANY, 'that they may use; "" is the default one')
    networks: tuple[str, ...] = setting(ANY, "network classes that they may use")

    def since(self, now: float) -> float:
        """From when on use counts."""
        return now - self.window * DAY if self.window else 0.0

    def fits(self, user: str, group: str) -> bool:
        return _is_one_of(user, self.users) or (bool(group) and _is_one_of(group, self.groups))


@dataclass(frozen=True)
class Sums:
    """What a user has, and had: whole core-seconds."""

    machines: int = 0  # that live
    reserved: int = 0  # until their ends
    used: int = 0  # by those that ended, within the policy's window


@dataclass(frozen=True)
class Check:
    """One step of a decision."""

    what: str
    is_met: bool
    code: str = MACHINES  # EC2's, where it is not met


def policy_of(policies: Iterable[Policy], user: str, group: str) -> Policy:
    """Raises LeaseDenied."""
    fitting = [policy for policy in policies if policy.fits(user, group)]
    if not fitting:
        whom = f"{user} (group {group})" if group else user
        raise LeaseDenied(f"no policy is for {whom}", code=FORBIDDEN, hint="Ask your site for one.")
    return min(fitting, key=lambda policy: (policy.priority, policy.name))


def decide(terms: Wanted, policy: Policy, sums: Sums) -> None:
    """Raises LeaseDenied for the first limit that is not met. Asked with the sums of the moment at which the lease is written down."""
    if wrong := next((check for check in checks(terms, policy, sums) if not check.is_met), None):
        raise LeaseDenied(f"policy {policy.name}: {wrong.what}", code=wrong.code)


def checks(terms: Wanted, policy: Policy, sums: Sums) -> Iterator[Check]:
    """Every step of the decision, those that are met, too."""
    size, count = terms.size, terms.count
    asked = sum(terms.size_of(number).cpus for number in range(count)) * ceil(terms.seconds)
    yield _most("machines of one lease", count, policy.request)
    yield _most(f"machines: {sums.machines} there + {count} asked for", sums.machines + count, policy.machines)
    yield _most("processors of one machine", size.cpus, policy.cores, code=CORES)
    yield _most("MiB of memory of one machine", size.memory >> 20, policy.memory >> 20)
    yield _most("MiB of disk of one machine", size.disk >> 20, policy.disk >> 20)
    yield _most("seconds of one lease", ceil(terms.seconds), int(policy.time))
    there = f"{_hours(sums.reserved)} reserved + {_hours(asked)} asked for"
    yield _most(f"core-hours: {there}", sums.reserved + asked, int(policy.reserved * 3600), _hours)
    within = f" in {policy.window:g} days" if policy.window else ""
    had = f"{_hours(sums.used)} used{within} + {there}"
    yield _most(f"core-hours: {had}", sums.used + sums.reserved + asked, int(policy.total * 3600), _hours)
    yield from (_allowed("image", image, policy.images) for image in sorted({terms.image, *terms.images}))
    yield _allowed("queue", terms.queue, policy.queues)
    yield _allowed("network", terms.network, policy.networks)


def longest(terms: Wanted, policy: Policy, sums: Sums) -> float:
    """Seconds for which its limits of time allow such a lease."""
    cores = sum(terms.size_of(number).cpus for number in range(terms.count))
    limits = ((policy.reserved, sums.reserved), (policy.total, sums.reserved + sums.used))
    return min(policy.time or inf, *((hours * 3600 - there) // cores if hours else inf for hours, there in limits))


def _most(what: str, asked: int, limit: int, show: Callable[[int], str] = str, *, code: str = MACHINES) -> Check:
    """A sum tells what it is made of before a colon."""
    if not limit:
        return Check(f"{what}: {show(asked)}, no limit", True)
    joint = " = " if ":" in what else ": "
    return Check(f"{what}{joint}{show(asked)} of at most {show(limit)}", asked <= limit, code)


def _allowed(what: str, name: str, patterns: tuple[str, ...]) -> Check:
    named = f"{what} {name!r}" if name else f"the default {what}"
    listed = ", ".join(pattern or "the default" for pattern in patterns) or "none"
    return Check(f"{named}, of {listed}", _is_one_of(name, patterns), FORBIDDEN)


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _hours(seconds: int) -> str:
    return f"{seconds / 3600:.2f}".rstrip("0").rstrip(".")
