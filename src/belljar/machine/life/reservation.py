"""What living machines have reserved of this host: one file in each machine's folder, which counts while its lock is held.

Those who start a machine take turns, for as long as it takes to add up the others' and to write their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError
from belljar.host.files import free_bytes, read_json, write_whole
from belljar.host.locks import is_locked
from belljar.host.room import Need, Room, Settings, Taken, host_memory, own_groups, room, touched
from belljar.journal import read
from belljar.machine import LOCK, RESERVED, Folders
from belljar.machine.life.waiting import lock_of
from belljar.model import MachineId, Request, dumps

TURN = "room"  # the lock of those who reserve, in `run`
PATIENCE = 30.0


async def reserve(request: Request, folders: Folders, settings: Settings) -> None:
    """Reserve what the machine may use. Raises NoMemory, NoProcessors, NoSpace with the numbers where others have reserved
    too much of it; never for what a batch system has set aside, nor for more than this host ever has: that is for
    others to refuse."""
    spec = request.machine
    need = Need(spec.memory, spec.cpus, spec.scratch or 0, own_groups())
    turn = await lock_of(folders.run / TURN, timeout=PATIENCE, what="reserve memory for a machine")
    try:
        if not request.is_allotted and spec.memory <= host_memory()[0] and spec.cpus <= (os.cpu_count() or 1):
            room(taken(folders, besides=request.id), settings, free_bytes(folders.scratch)).refuse(need)
        write_whole(folders.machine(request.id) / RESERVED, dumps(need))
    finally:
        turn.release()


def room_now(folders: Folders, settings: Settings) -> Room:
    """What is left for one more machine."""
    return room(taken(folders), settings, free_bytes(folders.scratch))


def taken(folders: Folders, besides: MachineId = "") -> Iterator[Taken]:
    """The reservations of all living machines but one."""
    try:
        ids = os.listdir(folders.machines)
    except FileNotFoundError:
        return
    for id in ids:
        folder = folders.machine(id)
        with suppress(OSError, ValueError, TypeError, KeyError, BelljarError):
            if id != besides and is_locked(folder / LOCK):
                yield _of(folder, folders.attachment(id, "scratch"))


def _of(folder: Path, scratch: Path) -> Taken:
    said = read_json(folder / RESERVED)
    groups = tuple((str(controller), str(path)) for controller, path in said["groups"])
    need = Need(int(said["memory"]), int(said["cpus"]), int(said["scratch"]), groups)
    pids = [event.get("pid") for event in read(folder) if event["event"] == "spawned"]
    used = touched(pids[-1]) if pids and isinstance(pids[-1], int) else 0
    written = 0
    if need.scratch:
        with suppress(FileNotFoundError):
            written = os.stat(scratch).st_blocks * 512
    return Taken(need, used, written)
