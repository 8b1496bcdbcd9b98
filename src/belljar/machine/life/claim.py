"""What a machine has of this host while it lives: its folder and lock, its image, and room in memory and processors.

Starters take turns: each adds up what the others have reserved (a file in each machine's folder, which counts while its
lock is held) and writes its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from belljar.errors import BelljarError, LockTimeout
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.files import free_bytes, no_space_as_error, private_folder, read_json, sync, write_whole
from belljar.host.locks import Lock, is_locked, locked, try_lock
from belljar.host.processes import boot_id, start_time
from belljar.host.room import Need, Placement, Room, Settings, Taken, host_memory, own_groups, room, touched
from belljar.host.threads import in_thread
from belljar.image import Image
from belljar.journal import JOURNAL, Record, read
from belljar.machine import LOCK, REQUEST, RESERVED, Folders
from belljar.machine.life.life import Lifecycle, Point
from belljar.model import MachineId, MachineSpec, Request, State, dumps, to_json
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.image.images import Images

CLAIMING = ".claiming-{}-{}-"  # the folder of a machine before it has its name: its maker's pid and start time
TURN = "room"  # the lock of those who reserve, in `run`
PATIENCE = 30.0
Choose = Callable[[MachineSpec, Iterator[Taken]], Placement]  # of cpus that others do not have


def claim(request: Request, folders: Folders, point: Point) -> Lifecycle:
    """Make the machine's folder. It gets its name with its lock held, so nobody ever sees a free lock of a living machine."""
    for folder in (folders.machines, folders.identities, folders.scratch, folders.logs):
        private_folder(folder, mode=0o711 if folder is folders.scratch else 0o700)
    pid = os.getpid()
    folder, draft = folders.machine(request.id), folders.run / (CLAIMING.format(pid, start_time(pid)) + request.id)
    with no_space_as_error(folder):
        os.mkdir(draft, 0o700)
        lock = try_lock(draft / LOCK)
        assert lock is not None  # nobody else knows of it
        os.rename(draft, folder)
    try:
        asked, begun = _without_secrets(request), folders.begun / request.id
        with suppress(OSError, BelljarError):  # records that cannot be written stop no machine
            private_folder(folders.begun)
            write_whole(private_folder(begun) / REQUEST, asked)
        record = Record(folder, copy=begun)
        whose = {"started": start_time(pid), "boot": boot_id(), "requester": request.requester}
        record.write("claim", id=request.id, pid=pid, **whose)
        write_whole(folder / REQUEST, asked)
        record.state(State.REQUESTED)
    except BaseException:  # re-raised: a lock that stays would make a dead machine look alive
        lock.release()
        raise
    point("after-claim")
    return Lifecycle(request, folders, lock, record, point)


def force_begin(life: Lifecycle) -> None:
    """Have on disk that this machine has begun, where that can be written."""
    for name in (REQUEST, JOURNAL):
        with suppress(OSError):
            sync(life.folders.begun / life.request.id / name)


def claimed_by(folder: Path) -> int | None:
    """The process that claimed this machine, if it was since the host was started."""
    with suppress(OSError):
        for event in read(folder)[:1]:
            pid = event.get("pid")
            if event["event"] == "claim" and event.get("boot") == boot_id() and isinstance(pid, int) and pid > 1:
                return pid
    return None


def _without_secrets(request: Request) -> bytes:
    """The request as it is kept: without the script's text, the environment's values and the user data."""
    record: dict[str, Any] = to_json(request)
    work = record["work"]
    payload = work.get("payload", {})
    if payload:
        payload["env"] = [name for name, _ in payload["env"]]
    secrets = [(work, "user_data"), (payload, "script"), *((file, "data") for file in payload.get("files", ()))]
    for part, name in secrets:
        if part.get(name) is not None:
            part[name] = len(part[name])
    return dumps(record)


@asynccontextmanager
async def holding(images: Images, image: Image, id: MachineId) -> AsyncIterator[None]:
    """`images.hold`, without blocking the loop while somebody else has the image for himself."""
    with ExitStack() as held:
        await in_thread(lambda: held.enter_context(images.hold(image, id)), undo=lambda _: held.close())
        yield


@asynccontextmanager
async def locking(path: Path, *, timeout: float, what: str) -> AsyncIterator[None]:
    """`locked`, without blocking the loop. Whoever gives up waiting does not get it later either."""
    if (lock := try_lock(path)) is None:
        try:
            async with asyncio.timeout(timeout):
                lock = await in_thread(lambda: locked(path, timeout=timeout, what=what), undo=Lock.release)
        except TimeoutError as exc:
            raise LockTimeout(f"{path}: waited {timeout:g} s for another process, to {what}") from exc
    with lock:
        yield


async def reserve(request: Request, folders: Folders, settings: Settings, choose: Choose | None = None) -> Placement:
    """Reserve what it may use, and the cpus of its own that *choose* says. Raises NoMemory, NoSpace, HostError, but not for what a
    batch system has set aside; and what *choose* does."""
    spec = request.machine
    memory = 0 if spec.pages.size else spec.memory  # reserved pages are not the memory that others may take
    need = Need(memory, spec.cpus, spec.scratch or 0, own_groups())
    async with locking(folders.run / TURN, timeout=PATIENCE, what="reserve memory for a machine"):
        others = partial(taken, folders, besides=request.id)
        if not request.is_allotted and spec.memory <= host_memory()[0] and spec.cpus <= (os.cpu_count() or 1):
            room(others(), settings, free_bytes(folders.scratch)).refuse(need)
        placement = choose(spec, others()) if choose else Placement()
        write_whole(folders.machine(request.id) / RESERVED, dumps(replace(need, pinned=placement.numbers)))
    return placement


def room_now(folders: Folders, settings: Settings) -> Room:
    """What is left for one more machine."""
    return room(taken(folders), settings, free_bytes(folders.scratch))


def taken(folders: Folders, besides: MachineId = "") -> Iterator[Taken]:
    """The reservations of all living machines but one."""
    for id in os.listdir(folders.machines) if folders.machines.exists() else ():
        with suppress(OSError, ValueError, TypeError, KeyError, BelljarError):
            if id != besides and is_locked(folders.machine(id) / LOCK):
                yield _of(folders.machine(id), folders.attachment(id, "scratch"))


def _of(folder: Path, scratch: Path) -> Taken:
    reserved = read_json(folder / RESERVED)
    need = Need(**{**reserved, "groups": tuple(map(tuple, reserved["groups"]))})
    pids = [event.get("pid") for event in read(folder) if event["event"] == "spawned"]
    used = touched(pids[-1]) if pids and isinstance(pids[-1], int) else 0
    return Taken(need, used, os.stat(scratch).st_blocks * 512 if need.scratch and scratch.exists() else 0)
