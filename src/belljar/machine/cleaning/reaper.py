"""Undo what a dead supervisor left, from its journal alone. Doing it twice, or by two at once, is fine.

The journal is a user's file and the reaper may be root, so only what lies where belljar puts things is removed.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar import network
from belljar.errors import BelljarError, LockTimeout, MachineBusy
from belljar.hints import Any
from belljar.host.files import check_ours, read_json, remove_tree
from belljar.host.locks import is_locked, locked
from belljar.host.processes import boot_id, kill_and_wait, owner, start_time
from belljar.hypervisor import Hypervisor, Traces
from belljar.journal import JOB_KILLED, Event, Ledger, read
from belljar.machine import KEPT_DISK, LOCK, OUTCOME, REQUEST, Folders, MachineView, Settings
from belljar.machine.cleaning.put_away import RETIRED, keep_outcome, retire, shutdown_of
from belljar.machine.life import control
from belljar.machine.life.claim import CLAIMING, claimed_by
from belljar.machine.states import CLASSES
from belljar.model import Cause, MachineId, Outcome, OutcomeClass, Request, State, to_json
from belljar.records import dataclass, replace

OF_A_MACHINE = (
    r"[0-9a-f]{12}\.(qcow2|scratch|foreign|empty|packed[0-9]|exchange|further|layer[0-9]+)"  # a file of `scratch`
)
LOCK_PATIENCE = 10.0  # seconds for other reapers to be done
KILL_PATIENCE, LEAST_PATIENCE = 5.0, 0.1  # seconds for the end of a process that was killed
ASK_PATIENCE, FORCE_PATIENCE = 3.0, 3.0  # seconds for a supervisor that was asked; for the kernel, after SIGKILL
MAKERS = re.compile(CLAIMING.format(r"(\d{1,10})", r"(\d{1,20})") + ".*")
LAST_PATIENCE = 1.0  # seconds for the lock of a dead supervisor to be free
NOT_FINISHED, DRAFT = "not finished", "template that was never finished"
ORPHAN = "domain without a machine"


@dataclass(frozen=True)
class Undone:
    """One thing the reaper did, or could not do, and why: then it is left for the next one, and keeps nobody from the rest."""

    machine: MachineId
    what: str
    path: str = ""
    error: str = ""


class Reaper:
    """Finds machines without a supervisor and finishes them."""

    def __init__(self, folders: Folders, hypervisor: Hypervisor) -> None:
        self._folders, self._hypervisor = folders, hypervisor

    def quick(self, patience: float = LOCK_PATIENCE) -> list[Undone]:
        """Finish dead machines, at every start: it is cheap, and waits at most *patience* seconds for others."""
        return self._finish((*_lost(self._folders), *_dead(self._folders)), patience)

    def lost(self) -> list[Undone]:
        """Finish machines of which the restart of the host left nothing but what it keeps of their beginning."""
        return self._finish(_lost(self._folders), LOCK_PATIENCE)

    def finish(self, id: MachineId) -> list[Undone]:
        """This machine alone, where its keeper is dead."""
        return self._finish(_dead(self._folders, [id]), LOCK_PATIENCE)

    def end(self, view: MachineView) -> bool:
        """End a machine whose job is over: ask its supervisor, then use force. False if the kernel keeps something of
        it."""
        lock = view.folder / LOCK
        if is_locked(lock):
            _ask(view.folder)
        if is_locked(lock):
            pid = supervisor(view.folder)
            with suppress(BelljarError):
                self._hypervisor.discard(view.id, traces_of(read(view.folder)))
            if pid is not None and is_locked(lock):
                kill_and_wait([pid], timeout=FORCE_PATIENCE)
            # A child of the dead, between fork and exec, has its lock for a moment more.
            _await_free(lock, FORCE_PATIENCE)
        self.quick()
        return not view.folder.exists()

    def full(self) -> list[Undone]:
        """`quick`, then what no folder tells about: domains without a machine, stray overlays and identities."""
        undone, folders = self.quick(), self._folders
        undone += self._finish(_bereaved(folders), LAST_PATIENCE)
        for stray in self._strays():
            undone += _tried(stray.machine, self._remove(stray))
        network.sweep(folders.run)
        return undone + _tried("", self._expire_templates())

    def _expire_templates(self) -> Iterator[Undone]:
        drafts = self._hypervisor.abandoned_templates()
        yield from (Undone("", "template expired", key) for key in self._hypervisor.expire_templates(time.time()))
        yield from (Undone("", DRAFT, str(path)) for path in drafts if not path.exists())

    def leftovers(self) -> list[Undone]:
        """What `full` would undo, without touching it."""
        dead = (*_dead(self._folders), *_lost(self._folders))
        left = [Undone(folder.name, "machine without a supervisor", str(folder)) for folder in dead]
        left += [Undone("", DRAFT, str(path)) for path in self._hypervisor.abandoned_templates()]
        return left + self._strays()

    def _finish(self, folders: Iterable[Path], patience: float) -> list[Undone]:
        deadline = time.monotonic() + patience
        return [undone for folder in folders for undone in _tried(folder.name, self._undo(folder, deadline))]

    def _undo(self, folder: Path, deadline: float) -> Iterator[Undone]:
        """Undo one machine, unless its lock stays taken: then its supervisor lives after all."""
        id = folder.name
        pid = claimed_by(folder) if folder.parent == self._folders.begun else None
        if pid and start_time(pid) == next(iter(read(folder)), {}).get("started"):
            return  # it is just ending, or has ended since
        try:
            lock = locked(folder / LOCK, timeout=_left(deadline), what="finish a dead machine")
        except (FileNotFoundError, NotADirectoryError, LockTimeout):
            return
        with lock:
            events = read(folder)
            self._hypervisor.discard(id, traces_of(events), patience=min(KILL_PATIENCE, _left(deadline)))
            yield Undone(id, "domain")
            self._conclude(folder, id, events)
            for event in reversed(events):
                yield from _tried(id, self._unmake(id, event))
            for path in self._disks(id):
                yield from _tried(id, self._remove(Undone(id, "disk", str(path))))
            if folder != (begun := self._folders.begun / id):
                remove_tree(begun)  # before its folder goes: another reaper would take it for a machine that was lost
            retire(folder, self._folders.ended(id))
            yield Undone(id, "machine", str(folder))

    def _unmake(self, id: MachineId, event: Event) -> Iterator[Undone]:
        """Only where belljar puts such things. Disks are found without the journal."""
        if event["event"] != "make" or not isinstance(event.get("path"), str):
            return
        path, what = Path(event["path"]), event.get("what")
        if what == "template":
            self._hypervisor.expire_templates(time.time())  # removes drafts that nobody works on
        elif what == "checkpoint":
            from belljar.machine.checkpoints import take

            if path.exists():
                with suppress(MachineBusy):  # another machine has the folder by now, and has removed it
                    take(path.parent).release()
                    yield Undone(id, what, str(path))
        elif what in network.MADE:
            network.discard(self._folders.run, id, str(what), path)
            yield Undone(id, str(what), str(path))
        elif path == self._folders.identities / path.name and path.exists():
            yield from self._remove(Undone(id, str(what), str(path)))

    def _conclude(self, folder: Path, id: MachineId, events: list[Event]) -> None:
        """Write the outcome and its row in the ledger, each once, if the supervisor did not."""
        ledger, ended = Ledger(self._folders.logs), self._folders.ended(id)
        row = ledger.row(id, since=float(events[0]["time"]) if events else 0.0)
        outcome = _written(folder / OUTCOME, id) or _written(ended / OUTCOME, id)
        if outcome is None:
            outcome = row or to_json(_post_mortem(folder, id, events, self._disks(id)))
            keep_outcome(outcome, folder, ended)
        if row is None:
            ledger.append(outcome, time.time())

    def _strays(self) -> list[Undone]:
        """What belongs to no machine: this user's domains, overlays, and identities when nothing lives. All are listed
        before the machines, whose folders are there before and after them."""
        uid, folders, strays = os.geteuid(), self._folders, list[Undone]()
        for id, pid in self._hypervisor.alive():
            with suppress(FileNotFoundError, ProcessLookupError):
                if owner(pid) == uid and not self._hypervisor.is_kept(id, pid):
                    strays.append(Undone(id, ORPHAN, f"pid {pid}"))
        disks, halves = self._disks(), [folders.run / name for name in _names(folders.run)]
        identities = [folders.identities / name for name in _names(folders.identities)]
        live = set(_names(folders.machines))
        paths = [path for path in halves if path.name.startswith(RETIRED) or _is_abandoned(path)]
        paths += [path for path in disks if path.stem not in live] + ([] if live else identities)
        strays = [stray for stray in strays if stray.machine not in live]
        return strays + [Undone(path.stem, "stray file", str(path)) for path in paths]

    def _remove(self, stray: Undone) -> Iterator[Undone]:
        path = Path(stray.path)
        if stray.what == ORPHAN:
            self._hypervisor.discard(stray.machine)
        elif path.is_dir():
            remove_tree(path)
        else:
            path.unlink(missing_ok=True)
        yield stray

    def _disks(self, id: MachineId = "") -> list[Path]:
        """The files in `scratch` of this machine; of all where none is named."""
        names = [name for name in _names(self._folders.scratch) if re.fullmatch(OF_A_MACHINE, name)]
        return [self._folders.scratch / name for name in names if name.startswith(id)]


def supervisor(folder: Path) -> int | None:
    """The process that claimed the machine, if it is one that has its lock open: a pid alone is nobody's name."""
    pid = claimed_by(folder)
    with suppress(OSError):
        lock = os.stat(folder / LOCK)
        for name in os.listdir(f"/proc/{pid}/fd") if pid and pid != os.getpid() else ():
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), lock):
                    return pid
    return None


def _ask(folder: Path) -> None:
    """Tell the supervisor to end the machine and wait a little for its lock to be free."""
    pid = supervisor(folder)
    if pid is not None:
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)  # it may have been suspended with its job
    with suppress(BelljarError, OSError, ValueError):
        with control.connect(folder, patience=ASK_PATIENCE) as connection:
            control.ask(connection, "kill")
        _await_free(folder / LOCK, ASK_PATIENCE)


def _await_free(lock: Path, patience: float) -> None:
    with suppress(BelljarError, OSError), locked(lock, timeout=patience, what="see a machine's end", shared=True):
        pass


def _is_abandoned(path: Path) -> bool:
    """Is it the folder of a machine in the making, whose maker is dead?"""
    maker = MAKERS.fullmatch(path.name)
    return maker is not None and start_time(int(maker[1])) != int(maker[2])


def _tried(id: MachineId, work: Iterator[Undone]) -> list[Undone]:
    """What was done, and why not all of it where something was in the way: that keeps nothing else from being done."""
    undone = list[Undone]()
    try:
        undone.extend(work)
    except BelljarError as exc:
        undone.append(Undone(id, NOT_FINISHED, error=exc.message))
    except OSError as exc:
        undone.append(Undone(id, NOT_FINISHED, exc.filename or "", exc.strerror or str(exc)))
    return undone


def traces_of(events: list[Event]) -> Traces:
    """The processes a machine's journal tells of, since the host was started."""
    if not any(event["event"] == "claim" and event.get("boot") == boot_id() for event in events[:1]):
        return Traces()
    owners = {uid for event in events if isinstance(uid := event.get("owner"), int)}
    pairs = [(event.get("pid"), event.get("started")) for event in events if event["event"] == "spawned"]
    named = {(pid, began) for pid, began in pairs if isinstance(pid, int) and isinstance(began, int) and pid > 1}
    return Traces(frozenset(owners), frozenset(named))


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), LEAST_PATIENCE)


def prune(folders: Folders, settings: Settings, now: float) -> int:
    """Drop the oldest ended machines beyond `keep_count`, and those older than `keep_days`. Cheap when there is nothing to do."""
    count, oldest = settings.keep_count, now - settings.keep_days * 86400
    names = [name for name in _names(folders.logs) if not name.startswith(("ledger-", "."))]
    if len(names) <= count:
        start = int.from_bytes(os.urandom(2)) % (len(names) or 1)  # a look at some is enough: so will others
        names = (names[start:] + names[:start])[:256]
        doomed = [name for name in names if ended_at(folders.logs / name) < oldest]
    else:
        doomed = sorted(names, key=lambda name: ended_at(folders.logs / name))[: len(names) - count + count // 10]
    doomed = [name for name in doomed if not (folders.logs / name / KEPT_DISK).exists()]  # kept on purpose
    for name in doomed:
        with suppress(OSError):
            remove_tree(folders.logs / name)
    return len(doomed)


def _dead(folders: Folders, ids: list[MachineId] | None = None) -> list[Path]:
    """Machines whose lock nobody holds, of these, or of all."""
    with suppress(FileNotFoundError):
        check_ours(folders.machines)  # a journal that somebody else wrote is not to be followed
    dead = []
    for id in _names(folders.machines) if ids is None else ids:
        with suppress(NotADirectoryError):
            if not is_locked(folders.machine(id) / LOCK):
                dead.append(folders.machine(id))  # or it cannot be entered: then to finish it says so
    return dead


def _lost(folders: Folders) -> list[Path]:
    """Machines that have begun and have no folder. Beginnings are listed first: a folder is there before, and goes after."""
    with suppress(OSError, BelljarError):
        if begun := _names(folders.begun):
            check_ours(folders.begun)
            live = set(_names(folders.machines))
            return [folders.begun / id for id in begun if id not in live]
    return []


def _bereaved(folders: Folders) -> list[Path]:
    """Machines whose lock is held by a child of the killed supervisor, until that runs a program of its own."""
    claimed = {folder: claimed_by(folder) for folder in map(folders.machine, _names(folders.machines))}
    return [folder for folder, pid in claimed.items() if pid is not None and not os.path.exists(f"/proc/{pid}")]


def _written(path: Path, id: MachineId) -> dict[str, Any] | None:
    """An outcome that its supervisor could still write."""
    with suppress(OSError, ValueError, BelljarError):
        outcome = read_json(path)
        return outcome if outcome.get("id") == id else None
    return None


def _post_mortem(folder: Path, id: MachineId, events: list[Event], disks: list[Path]) -> Outcome:
    rebooted = any(event["event"] == "claim" and event.get("boot") != boot_id() for event in events)
    job_killed = not rebooted and any(event["event"] == JOB_KILLED for event in events)
    states = [event.get("state", "") for event in events if event["event"] == "state"]
    cause = Cause.CANCELLED if job_killed else Cause.NODE_FAULT
    what = "the host was restarted" if rebooted else "its job was killed" if job_killed else "belljar was killed"
    reason = f"{what} while the machine was {states[-1] if states else State.REQUESTED.value}"
    for event in events:
        if event["event"] == "payload-ended":
            code, number = event.get("exit_code"), event.get("signal")
            how = f"exit code {code}" if number is None else f"signal {number}"
            reason = f"{reason}; the payload had ended with {how}"
    ended = _last_sign(folder, disks) if rebooted else time.time()
    worked = [max(ended - float(event["time"]), 0.0) for event in events if event.get("state") == State.RUNNING.value]
    return replace(
        _of_request(folder, id), cause=cause, klass=OutcomeClass.TRANSIENT if rebooted else CLASSES[cause], reason=reason,
        started=float(events[0]["time"]) if events else 0.0, ended=ended, phases={"run": worked[0]} if worked else {}, **shutdown_of(folder),
    )  # fmt: skip


def _last_sign(folder: Path, disks: list[Path]) -> float:
    """When something of a machine was written last: the host may have been off for days since."""
    times = list[float]()
    for path in (*disks, *(path for path in folder.iterdir() if path.name != LOCK)):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times, default=time.time())


def _of_request(folder: Path, id: MachineId) -> Outcome:
    """With all that its record tells of the request: secrets are left out there, so it is not a whole one."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, BelljarError):
        request = read_json(folder / REQUEST, 1 << 24)
        bare = {name: request.get(name) for name in ("machine", "name", "requester", "labels")}
        outcome = Outcome.of(Request.from_json({**bare, "id": id, "work": {}}), Cause.NODE_FAULT, OutcomeClass.NODE)
        account = request["work"].get("payload", {}).get("account") or {"uid": os.stat(folder).st_uid, "name": ""}
        return replace(outcome, uid=account["uid"], account=account["name"])
    return Outcome(id, Cause.NODE_FAULT, OutcomeClass.NODE)


def ended_at(folder: Path) -> float:
    try:
        return os.stat(folder).st_mtime
    except OSError:
        return 0.0


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
