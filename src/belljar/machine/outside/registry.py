"""The machines of a set of folders, live and ended, seen from outside: what `ps`, `show` and their like read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import BelljarError, HostError, NoSuchMachine, NotPermitted, UsageError
from belljar.host.files import check_ours, read_json
from belljar.host.locks import is_locked
from belljar.host.threads import in_thread
from belljar.journal import Event, Ledger, read
from belljar.machine import LOCK, OUTCOME, REQUEST, Folders, MachineView
from belljar.machine.cleaning.reaper import Reaper, ended_at
from belljar.model import MachineId, Outcome, State

if TYPE_CHECKING:
    from belljar.machine.outside.watching import Ends, Stream

LARGEST_REQUEST = 16 << 20
NEWEST = 200  # records of ended machines that a hook looks through


class Machines:
    """Reads; what dead supervisors left is finished on the way, but for `living`."""

    def __init__(self, folders: Folders, reaper: Reaper) -> None:
        self.folders, self._reaper = folders, reaper
        self._ends: Ends | None = None

    def living(self) -> Sequence[MachineView]:
        """The machines that have not been put away, as they are on disk: nothing is finished, and a keeper may be dead."""
        return [view for folder in _folders(self.folders.machines) if (view := _view(folder)) is not None]

    def list(self, *, ended: bool = False) -> list[MachineView]:
        """The live machines, oldest first; with *ended* those too whose records are still kept."""
        self._reaper.lost()
        views = [*self.living()]
        if ended:
            live = {view.id for view in views}  # a record that could not be moved whole is in both places
            kept = [folder for folder in _folders(self.folders.logs) if folder.name not in live]
            views += [view for folder in kept if (view := _view(folder)) is not None]
        return sorted(views, key=lambda view: view.created)

    def find(self, reference: str) -> MachineView:
        """The machine of this id, unique prefix, name or batch id (`slurm:4711`). Raises NoSuchMachine; UsageError
        where several fit."""
        if not reference:
            raise NoSuchMachine("an empty id")
        for ended in (False, True):
            views = self.list(ended=ended)
            exact = [view for view in views if reference == view.id or reference in known_as(view)]
            if exact:
                return exact[-1]
            fits = [view for view in views if view.id.startswith(reference)]
            if len(fits) > 1:
                hint = "Give more characters of the id; `belljar ps -a` lists them."
                raise UsageError(f"{reference}: fits {', '.join(view.id for view in fits[:5])}", hint=hint)
            if fits:
                return fits[0]
        raise NoSuchMachine(f"{reference}: no machine of this id or name")

    def newest(self, job: str) -> MachineView | None:
        """The latest machine of this batch job, live or ended. Looks at the newest records only: cheap."""
        live = [view for view in self.list() if job in jobs_of(view)]
        if live:
            return live[-1]
        folders = sorted(_folders(self.folders.logs), key=ended_at, reverse=True)[:NEWEST]
        views = (view for folder in folders if (view := _view(folder)) is not None)
        return next((view for view in views if job in jobs_of(view)), None)

    async def ended(self, id: MachineId) -> Outcome:
        """The outcome of this machine, once it has ended; many may be awaited at once. Raises NoSuchMachine,
        HostError."""
        if self._ends is None:
            from belljar.machine.outside.watching import Ends

            self._ends = Ends()
        folder = self.folders.machine(id)
        while folder.exists():
            await self._ends.wait(folder / LOCK)
            if folder.exists():
                await in_thread(lambda: self._finish(id))
        with suppress(OSError, ValueError, BelljarError):
            return Outcome.from_json(read_json(self.folders.ended(id) / OUTCOME))
        with suppress(ValueError):  # its records may have been dropped
            if (row := Ledger(self.folders.logs).row(id, since=0.0)) is not None:
                return Outcome.from_json(row)
        raise NoSuchMachine(f"{id}: no machine of this id, or nothing is known of its end")

    def events(self, since: str | None = None, of: MachineId | None = None) -> Stream:
        """The events of all machines, or *of* one, for `async for`. *since*: also the ledger's rows after it ("": all)."""
        from belljar.machine.outside.watching import Stream

        return Stream(self.folders, since, of)

    def _finish(self, id: MachineId) -> None:
        for undone in self._reaper.finish(id):
            if undone.error:
                raise HostError(f"{id}: {undone.what}: {undone.error}", hint="See `belljar reap`.")
        folder = self.folders.machine(id)
        if folder.exists() and not is_locked(folder / LOCK):
            raise HostError(f"{id}: its keeper is dead, and it cannot be finished", hint="See `belljar reap`.")


def jobs_of(view: MachineView) -> frozenset[str]:
    """The batch job this machine was made for, under each of its ids (`slurm:4711`); empty where there is none."""
    system, _, id = view.requester.partition(":")
    return frozenset(f"{system}:{name}" for name in (id, *_aliases(view))) if system and id else frozenset()


def known_as(view: MachineView) -> frozenset[str]:
    """Every name of this machine but its id."""
    return (jobs_of(view) | {view.name, *_aliases(view)}) - {""}


def _aliases(view: MachineView) -> list[str]:
    return [text for kind, text in view.pairs if kind == "alias"]


def _folders(parent: Path) -> list[Path]:
    try:
        return [parent / name for name in os.listdir(parent) if not name.startswith(("ledger-", "."))]
    except FileNotFoundError:
        return []
    except PermissionError as exc:
        check_ours(parent)  # says whose it is, or what is closed on the way
        raise NotPermitted(f"{parent}: {exc.strerror}", hint="Correct its mode (0700).") from exc


def _view(folder: Path) -> MachineView | None:
    """None when the folder vanished meanwhile. A broken record gives a view with what is left of it."""
    try:
        owner = os.stat(folder).st_uid
    except FileNotFoundError:
        return None
    request, outcome, events = _json(folder / REQUEST), _json(folder / OUTCOME), list[Event]()
    with suppress(PermissionError):
        events = read(folder)
    machine = spec if isinstance(spec := request.get("machine"), dict) else {}
    pids = [event.get("pid") for event in events if event["event"] == "spawned"]
    starts = [event.get("start") for event in events if event.get("start")]
    began = [float(event["time"]) for event in events if event.get("state") == State.RUNNING.value]
    return MachineView(
        id=folder.name, name=_text(request.get("name")), state=_state(events, outcome), cause=_text(outcome.get("cause")),
        image=_text(machine.get("image")), cpus=_number(machine.get("cpus")), memory=_number(machine.get("memory")),
        start=_text(starts[-1] if starts else ""), requester=_text(request.get("requester")), owner=owner,
        created=float(events[0]["time"]) if events else 0.0, ended=outcome.get("ended") if outcome else None,
        pid=pids[-1] if pids and isinstance(pids[-1], int) and not outcome else None, alive=is_locked(folder / LOCK),
        folder=folder, request=request, outcome=outcome or None, began=began[0] if began else None,
    )  # fmt: skip


def _state(events: list[Event], outcome: dict[str, Any]) -> str:
    if outcome:
        return State.DONE.value
    for event in reversed(events):
        if event["event"] in ("paused", "resumed"):
            return "paused" if event["event"] == "paused" else State.RUNNING.value
        if event["event"] == "state":
            return _text(event.get("state"))
    return State.REQUESTED.value


def _json(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, BelljarError):
        return read_json(path, LARGEST_REQUEST)
    return {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
