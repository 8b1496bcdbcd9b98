"""What a factory tells of itself: its slots, its types and its host, as VacQuery has them. Made from what is known; nothing is kept."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from belljar import __version__
from belljar.host.processes import cpu_times
from belljar.host.room import free, meminfo, system_name
from belljar.records import replace
from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus
from belljar.vacuum.factory.keeper import Living
from belljar.vacuum.factory.state import Finished
from belljar.vacuum.protocol.query import Snapshot

MODEL = "vm-raw"  # the word of Vac for machines with a disk image


def slot_name(space: Space, slot: int) -> str:
    """vf1-03.example.org: the slots of vf1.example.org."""
    host, dot, domain = space.factory.partition(".")
    return f"{host}-{slot:02}{dot}{domain}"


def snapshot(
    space: Space, living: Sequence[Living], finished: Mapping[str, Finished], slots: Mapping[int, tuple[str, Finished]],
    now: float, own: FactoryStatus, room: float = 0.0,
) -> Snapshot:  # fmt: skip
    """All of it, also of types that are not configured any more and live on. *finished*: of each type the machine that ended last; *slots*: the same of each slot, with its type. *room*: processors
    that this factory gives away next."""
    names = dict.fromkeys([*(kind.name for kind in space.types), *(machine.machinetype for machine in living)])
    types = tuple(_type(space, name, living, finished.get(name, Finished()), now, room) for name in names)
    taken = {machine.slot: machine for machine in living}
    machines = tuple(
        _running(space, taken[slot], now) if slot in taken else _empty(space, slot, slots.get(slot))
        for slot in range(max(space.processors, max(taken, default=-1) + 1))
    )
    return Snapshot(space.name, space.factory, space.site, machines, types, own)


def is_young(machine: Living, now: float) -> bool:
    return machine.began is None or now - machine.began < machine.fizzle


def _type(space: Space, name: str, living: Sequence[Living], last: Finished, now: float, room: float) -> TypeStatus:
    ours = [machine for machine in living if machine.machinetype == name]
    kind = next((kind for kind in space.types if kind.name == name), None)
    worked = [int(machine.began) for machine in ours if machine.began is not None and not is_young(machine, now)]
    proved = max([last.proved, *worked])
    status = TypeStatus(
        space.factory, name, sum(machine.hs06 for machine in ours), len(ours), sum(machine.processors for machine in ours),
        sum(is_young(machine, now) for machine in ours), last.message or None, last.at or None, last.machine or None,
        last_abort=last.aborted or None, proved=proved or None, room=room or None, time_sent=int(now),
    )  # fmt: skip
    if kind is None:
        return status
    return replace(
        status, memory=kind.memory or space.memory, max_wallclock=int(kind.max_wallclock), max_processors=kind.max_processors,
        fqan=kind.fqan,
    )  # fmt: skip


def _running(space: Space, machine: Living, now: float) -> MachineStatus:
    used = sum(cpu_times(machine.pid)) if machine.pid else 0.0
    alive = now - machine.began if machine.began else 0.0
    began = None if machine.began is None else int(machine.began)
    return MachineStatus(
        space.factory, slot_name(space, machine.slot), "Starting" if began is None else "Running", machine.machinetype,
        machine.id, MODEL, int(machine.created), began, int(now), machine.processors, int(used),
        round(100 * used / alive, 1) if alive > 1 else 0.0, machine.hs06, time_sent=int(now), fqan=machine.fqan,
    )  # fmt: skip


def _empty(space: Space, slot: int, last: tuple[str, Finished] | None) -> MachineStatus:
    machinetype, ended = last or (None, Finished())
    return MachineStatus(
        space.factory, slot_name(space, slot), machinetype=machinetype, message=ended.message or None,
        message_time=ended.at if last else None,
    )  # fmt: skip


def ended_status(
    space: Space, id: str, ended: Finished, event: Mapping[str, Any], labels: Mapping[str, str]
) -> MachineStatus:
    """A machine that has just ended. (The original says `Running` then, and forgets the message.)"""
    started = int(float(event.get("started") or 0))
    return MachineStatus(
        space.factory, ended.machine, "Shut down", labels.get("machinetype"), id, MODEL, started, started, ended.at,
        message=ended.message or None, message_time=ended.at, time_sent=ended.at, fqan=labels.get("fqan", ""),
    )  # fmt: skip


def own_status(space: Space, living: Sequence[Living], now: float, cycled: float, folder: Path) -> FactoryStatus:
    """The factory, and its host."""
    total, available, swap, swap_free = (
        kept // 1024 for kept in meminfo("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    )
    root, ours = free(Path("/")), free(folder)
    began = [machine for machine in living if machine.began is not None]
    return FactoryStatus(
        space.factory, space.site, f"belljar {__version__}", len(began), sum(machine.processors for machine in began),
        sum(machine.hs06 for machine in began), space.processors, space.processors, space.processors * space.hs06_per_processor,
        os.getloadavg()[2], *root, *ours, total - available, total, swap - swap_free, swap_free, os.uname().release,
        system_name(), int(now - time.clock_gettime(time.CLOCK_BOOTTIME)),
        int(cycled), int(now), int(now), int(now),
    )  # fmt: skip
