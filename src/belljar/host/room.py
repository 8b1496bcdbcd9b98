"""How much of this host there is for machines: memory and processors by the host and the control groups, and what others have
reserved of them. Nothing here waits or changes anything.

A reservation counts in full from the moment it is made: what a guest has not touched yet it may touch in a second. What it has
touched is gone from the free memory by itself, so of a living machine only the rest counts.
https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from belljar.errors import NoMemory, NoProcessors, NoSpace
from belljar.model import MIB, setting
from belljar.records import dataclass

PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
UNLIMITED = 1 << 60  # and above: how version 1 writes that there is no limit


@dataclass(frozen=True)
class Settings:
    """`[host]` in the settings files."""

    kept_memory: int = setting(256 * MIB, "memory that machines leave to the host", unit="bytes", minimum=0)
    kept_scratch: int = setting(0, "room below `paths.scratch` that scratch disks leave free", unit="bytes", minimum=0)
    cpus_per_cpu: float = setting(8.0, "virtual cpus of all machines, for each of the host's; 0: no limit", minimum=0)


@dataclass(frozen=True)
class Need:
    """What one machine may use. `groups`: its control group, by the controller ("" in version 2)."""

    memory: int
    cpus: int
    scratch: int = 0
    groups: tuple[tuple[str, str], ...] = ()
    pinned: tuple[int, ...] = ()  # cpus of this host that are its virtual cpus' alone


@dataclass(frozen=True)
class Cpu:
    """One of this host's, and where it is."""

    number: int
    core: int
    socket: int
    node: int


@dataclass(frozen=True)
class Placement:
    """Which cpus of this host a machine's virtual ones are pinned to, in their order; or why they are not."""

    cpus: tuple[Cpu, ...] = ()
    reason: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(cpu.number for cpu in self.cpus)


@dataclass(frozen=True)
class Taken:
    """What a living machine has reserved, and what of it is in use already."""

    need: Need
    memory: int = 0
    scratch: int = 0


@dataclass(frozen=True)
class Bound:
    """Free memory by one who counts it: the host ("" as path), or a control group, for those who are in it."""

    free: int
    controller: str = ""
    path: str = ""

    def left(self, taken: Iterable[Taken]) -> int:
        """Without what those may still take who are counted here, too."""
        untouched = (max(0, machine.need.memory - machine.memory) for machine in taken if self._holds(machine.need))
        return max(0, self.free - sum(untouched))

    def _holds(self, need: Need) -> bool:
        if not self.path:
            return True
        own = dict(need.groups).get(self.controller, "")
        return own == self.path or own.startswith(f"{self.path.rstrip('/')}/")

    def __str__(self) -> str:
        return f"the control group {self.path}" if self.path else "this host"


@dataclass(frozen=True)
class Room:
    """What is left for one more machine, started from here."""

    memory: int
    bound: Bound  # whose memory is least
    cpus: float
    cpus_taken: int
    scratch: int
    machines: int
    memory_reserved: int

    def refuse(self, need: Need) -> None:
        """Raises NoMemory, NoProcessors, NoSpace with the numbers, where the need is more than what is left."""
        if need.memory > self.memory:
            raise NoMemory(
                f"{need.memory // MIB} MiB of memory: {self.memory // MIB} MiB are left on {self.bound}"
                f" ({self.machines} other machines of this user have reserved {self.memory_reserved // MIB} MiB)"
            )
        if need.cpus > self.cpus - self.cpus_taken:
            raise NoProcessors(
                f"{need.cpus} cpus: {max(0, int(self.cpus) - self.cpus_taken)} of {self.cpus:g} are left for machines"
                f" (`host.cpus_per_cpu`; {self.machines} other machines of this user have reserved {self.cpus_taken})"
            )
        if need.scratch > self.scratch:
            raise NoSpace(f"a scratch disk of {need.scratch // MIB} MiB: {self.scratch // MIB} MiB are left for it")


def room(
    taken: Iterable[Taken], settings: Settings, scratch_free: int, *, proc: Path = PROC, groups: Path = GROUPS
) -> Room:
    """What is left beside those who have reserved already."""
    taken = tuple(taken)
    bounds = [(bound.left(taken), bound) for bound in memory_bounds(proc, groups)]
    free, least = min(bounds, key=lambda pair: pair[0])
    cpus = usable_cpus(groups, own_groups(proc)) * settings.cpus_per_cpu or float("inf")
    promised = sum(max(0, machine.need.scratch - machine.scratch) for machine in taken)
    return Room(
        memory=max(0, free - settings.kept_memory), bound=least, cpus=cpus, cpus_taken=sum(machine.need.cpus for machine in taken),
        scratch=max(0, scratch_free - promised - settings.kept_scratch), machines=len(taken),
        memory_reserved=sum(machine.need.memory for machine in taken),
    )  # fmt: skip


def memory_bounds(proc: Path = PROC, groups: Path = GROUPS) -> Iterator[Bound]:
    """Free memory by the host, and by each control group above us with a limit. What can be dropped at once is free."""
    yield Bound(host_memory(proc)[1])
    for controller, own in own_groups(proc):
        names = ("memory.max", "memory.current", "inactive_file")
        if controller:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for path, folder in _upwards(groups / controller, own):
            with suppress(OSError, ValueError):
                limit = int((folder / names[0]).read_text())
                if limit < UNLIMITED:
                    used = int((folder / names[1]).read_text())
                    yield Bound(max(0, limit - used + _counted(folder / "memory.stat", names[2])), controller, path)


def usable_cpus(groups: Path, own: Iterable[tuple[str, str]]) -> float:
    """Processors this process may use, by its affinity and the quotas of its control groups."""
    cpus = float(len(os.sched_getaffinity(0)))
    for controller, path in own:
        for _, folder in _upwards(groups / ("cpu" if controller else ""), path):
            with suppress(OSError, ValueError):
                if controller:
                    quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                else:
                    quota, _, period = (folder / "cpu.max").read_text().partition(" ")
                if int(quota) > 0:
                    cpus = min(cpus, int(quota) / int(period))
    return cpus


def own_groups(proc: Path = PROC) -> tuple[tuple[str, str], ...]:
    """(controller, path) of the control groups that count our memory; "" is version 2's."""
    own = []
    with suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                own.append(("memory" if controllers else "", path))
    return tuple(own)


def host_memory(proc: Path = PROC) -> tuple[int, int]:
    """(total, available) bytes of this host."""
    total, available = meminfo("MemTotal", "MemAvailable", proc=proc)
    return total, available


def meminfo(*names: str, proc: Path = PROC) -> list[int]:
    """What the kernel tells of its memory by these names, in bytes."""
    sizes = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    return [int(sizes[name].split()[0]) * 1024 for name in names]


def free(path: Path) -> tuple[int, int]:
    """KiB and inodes that a user may take of the file system there; nothing where it is not."""
    try:
        status = os.statvfs(path)
    except OSError:
        return 0, 0
    return status.f_bavail * status.f_frsize // 1024, status.f_favail


@cache
def system_name() -> str:
    """As /etc/os-release has it."""
    import platform

    with suppress(OSError, KeyError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return os.uname().sysname


def touched(pid: int, proc: Path = PROC) -> int:
    """Bytes of a process's own memory; pages of files it has mapped, such as a template's, are nobody's. 0: it is gone."""
    kinds = ("RssAnon:", "RssShmem:")
    with suppress(OSError, ValueError):
        lines = (proc / str(pid) / "status").read_text(errors="replace").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))
    return 0


def _upwards(root: Path, path: str) -> Iterator[tuple[str, Path]]:
    """The group of this path and all above it, each with its folder."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for count in range(len(parts), -1, -1):
        yield "/" + "/".join(parts[:count]), root.joinpath(*parts[:count])


def _counted(path: Path, name: str) -> int:
    return int(dict(line.split() for line in path.read_text().splitlines()).get(name, 0))
