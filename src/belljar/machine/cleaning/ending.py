"""End a machine whose job is over, whatever its supervisor is doing: asked first, then by force."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError
from belljar.host.locks import is_locked, locked
from belljar.host.processes import kill_and_wait
from belljar.hypervisor import Hypervisor
from belljar.journal import read
from belljar.machine import LOCK, MachineView
from belljar.machine.cleaning.reaper import Reaper, traces_of
from belljar.machine.life import control

ASK_PATIENCE = 3.0  # seconds for a supervisor that was asked
FORCE_PATIENCE = 3.0  # seconds for the kernel, after SIGKILL


def end(view: MachineView, hypervisor: Hypervisor, reaper: Reaper) -> bool:
    """The machine is gone, with everything of it, when this returns; False when the kernel holds something of it.
    Ending what ended is success."""
    lock = view.folder / LOCK
    if is_locked(lock):
        _ask(view, lock)
    if is_locked(lock):
        pid = supervisor(view.folder)
        with suppress(BelljarError):
            hypervisor.discard(view.id, traces_of(read(view.folder)))
        if pid is not None and is_locked(lock):
            kill_and_wait([pid], timeout=FORCE_PATIENCE)
        with suppress(BelljarError, OSError):
            # A child of the dead, between fork and exec, has its lock for a moment more.
            with locked(lock, timeout=FORCE_PATIENCE, what="see a dead supervisor's machine free", shared=True):
                pass
    reaper.quick()
    return not view.folder.exists()


def supervisor(folder: Path) -> int | None:
    """The process that claimed the machine, if it is one that has its lock open: a pid alone is nobody's name."""
    for event in read(folder)[:1]:
        pid = event.get("pid")
        if event["event"] != "claim" or not isinstance(pid, int) or pid <= 1 or pid == os.getpid():
            continue
        if _has_open(pid, folder / LOCK):
            return pid
    return None


def _has_open(pid: int, path: Path) -> bool:
    with suppress(OSError):
        wanted = os.stat(path)
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), wanted):
                    return True
    return False


def _ask(view: MachineView, lock: Path) -> None:
    """Tell the supervisor to end the machine and wait a little for its lock to be free."""
    pid = supervisor(view.folder)
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)  # it may have been suspended with its job
    with suppress(BelljarError, OSError, ValueError):
        with control.connect(view.folder) as connection:
            connection.settimeout(ASK_PATIENCE)
            control.ask(connection, "kill")
        with locked(lock, timeout=ASK_PATIENCE, what="see a machine's end", shared=True):
            pass
