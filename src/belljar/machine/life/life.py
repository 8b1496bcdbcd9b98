"""One machine's life as its supervisor sees it: folder, lock, journal, state, phases, and the outcome in the making."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import BelljarError, HostError, LockTimeout, about
from belljar.guest import ExitStatus
from belljar.host.files import no_space_as_error, private_folder, write_whole
from belljar.host.locks import Lock, locked, try_lock
from belljar.host.processes import boot_id
from belljar.hypervisor import ExtraDisk
from belljar.journal import Record
from belljar.machine import LOCK, REQUEST, Folders
from belljar.machine.life.deadline import Deadline
from belljar.machine.orders import Ended
from belljar.machine.states import CLASSES, check_move, class_of_error
from belljar.model import Cause, Outcome, OutcomeClass, Request, State, Usage, dumps, to_json
from belljar.network import Joined

if TYPE_CHECKING:
    from belljar.host.guard.egress import Place
    from belljar.host.traffic import Call

GATE_TIMEOUT = 30.0
UNNAMED_LOCK = f".{LOCK}"
HINTS = {  # for a payload that could not be started; the reason says what was wrong
    "not-found": "Name a program the guest has; a script of yours is copied in when it stands without `--` before it.",
    "not-executable": "Check its mode and its first line: the interpreter named there must be in the guest.",
    "no-cwd": "Name a folder the payload's user may enter with `--cwd`.",
    "failed": "See `belljar logs ID --console`.",
}


class Life:
    """Made by `claim`; ends with `release`."""

    def __init__(
        self, request: Request, folders: Folders, lock: Lock, record: Record, point: Callable[[str], None]
    ) -> None:
        self.request = request
        self.folders = folders
        self.folder = folders.machine(request.id)
        self.record = record
        self.point = point
        self.state = State.REQUESTED
        self.phases: dict[str, float] = {}
        self.is_begun = False  # its work has
        self.is_proved = False  # its guest has an identity of its own
        self.deadline = Deadline()
        self.begun = 0.0  # when the work's time began, seconds since the epoch
        self.is_settled = False
        self.identities: list[Path] = []
        self.joined: Joined | None = None  # its network, once it is there
        self.answers: tuple[Place, ...] = ()  # places of a user network that this supervisor answers, and how
        self.answer: Callable[[Call], Awaitable[None]] | None = None
        self.disks: tuple[ExtraDisk, ...] = ()  # beside its own
        self.held: list[Lock] = []  # what else is this machine's alone until its end
        self.left_in_order: list[Path] = []  # marks of disks, made when its guest powers itself off
        self.attachments: list[Path] = []  # their files, from before they are made
        self.disks_are_wanted = False  # they outlive the machine, so QEMU is given time to write all of them
        self.quit_status: int | None = None  # of QEMU, as waitpid tells it
        self.troubles: list[str] = []  # of the way out
        self.outcome = Outcome.of(
            request, Cause.NODE_FAULT, OutcomeClass.NODE, reason="it has not ended", started=time.time()
        )
        if self.outcome.uid is None:
            self.note(uid=os.geteuid())
        self._lock = lock

    def enter(self, state: State, **facts: Any) -> None:
        """Journal the state, then be in it."""
        check_move(self.state, state)
        self.record.state(state, **facts)
        self.state = state

    def leave_towards(self, state: State) -> None:
        """Enter a state on the way out: a full disk must not keep us from cleaning up."""
        check_move(self.state, state)
        with suppress(HostError, OSError):
            self.record.state(state)
        self.state = state

    @contextmanager
    def trying(self, otherwise: str) -> Iterator[None]:
        """A step of the way out. Whatever goes wrong in it, the next one is taken; the outcome tells what became of this
        one: *otherwise*, and why."""
        try:
            yield
        except Exception as error:
            self.troubles.append(f"{otherwise}: {_why(error)}")

    def attach(self, what: str, name: str) -> Path:
        """Where the file of a further disk is to be made, journaled."""
        path = self.folders.attachment(self.request.id, name)
        self.record.intend(what, path)
        self.attachments.append(path)
        return path

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to this phase."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - begin

    def note(self, **changes: Any) -> None:
        """Fill in what is known of the outcome by now."""
        self.outcome = replace(self.outcome, **changes)

    def conclude(self, status: ExitStatus) -> None:
        """The payload ended: its status is the outcome, whatever was asked of it before."""
        cause: Cause = self.outcome.cause if self.outcome.cause in (Cause.CANCELLED, Cause.WALLTIME) else Cause.FINISHED
        reason = self.outcome.reason if cause is not Cause.FINISHED else _describe(status)
        if status.oom_killed and status.signal == 9:
            cause, reason = Cause.GUEST_OOM, "the guest ran out of memory and its kernel killed the payload"
        self.note(
            cause=cause, klass=CLASSES[cause], reason=reason, exit_code=status.exit_code, signal=status.signal,
            core_dumped=status.core_dumped, guest=status.usage, error=status.error, hint=about(HINTS.get(status.error, ""), self.request.id),
        )  # fmt: skip

    def expect(self, cause: Cause, reason: str) -> None:
        """The payload was asked to end for this reason; its status still counts if it obeys."""
        if self.is_settled:
            return
        self.note(cause=cause, klass=CLASSES[cause], reason=reason)

    def fail(self, error: BelljarError) -> None:
        """belljar, the host or the guest failed. A payload's status that is already known stays known."""
        if self.is_settled:
            return
        self.note(
            cause=error.cause,
            klass=class_of_error(error),
            reason=error.message,
            hint=about(error.hint, self.request.id),
            error=type(error).__name__,
        )

    def end(self, ended: Ended) -> None:
        """The machine was ended from outside before all was done. A payload that had ended by then is told about in the
        reason only: its result was not delivered whole, so it is not the job's."""
        if self.is_settled:
            return
        reason = ended.reason
        if self.outcome.payload_ran:
            status = self.outcome
            how = f"signal {status.signal}" if status.signal is not None else f"exit code {status.exit_code}"
            reason = f"{reason}, before its files were copied out; the payload had ended with {how}"
        self.note(cause=ended.cause, klass=CLASSES[ended.cause], reason=reason, exit_code=None, signal=ended.number)

    def begin_work(self) -> None:
        """From now on its time counts."""
        self.begun = time.time()
        self.deadline.begin(self.request.timeout)

    @property
    def moved_deadline(self) -> float | None:
        """Where an order moved it to, in seconds since the epoch."""
        return self.deadline.at if self.deadline.is_moved else None

    @property
    def outputs_url(self) -> str:
        """Where the guest may put files that are kept; "": nowhere."""
        return f"http://{self.answers[-1][0]}/joboutputs" if self.answers else ""

    def settle(self) -> None:
        """All that the job is about is done: whatever happens to the machine now, the outcome stays what it is."""
        self.is_settled = True

    def sum_up(self, usage: tuple[float, float, int]) -> Outcome:
        """The outcome with all that is known at the end."""
        phases = {name: round(seconds, 6) for name, seconds in self.phases.items()}
        self.note(phases=phases, host=Usage(*usage), ended=time.time(), troubles=tuple(self.troubles))
        return self.outcome

    def release(self) -> None:
        """Give up journal and lock. Whoever finds the lock free afterwards may clean up what is left."""
        for what in (self.record.close, *(lock.release for lock in self.held), self._lock.release):
            with self.trying("a file of it was not closed"):
                what()
        self.note(troubles=tuple(self.troubles))


def claim(request: Request, folders: Folders, point: Callable[[str], None], *, patience: float = GATE_TIMEOUT) -> Life:
    """Make the machine's folder, locked from its first moment that a reaper can see. *patience*: seconds for a reaper
    that is at the gate. Raises LockTimeout."""
    for folder in (folders.machines, folders.identities, folders.scratch, folders.logs):
        private_folder(folder, mode=0o711 if folder is folders.scratch else 0o700)
    folder = folders.machine(request.id)
    # The lock gets its name when it is held already, and a reaper that meets a folder without one waits at the gate,
    # which those who claim share and a reaper takes alone: nobody ever sees a free lock of a living machine.
    with locked(gate(folders), timeout=patience, what="begin a machine", shared=True), no_space_as_error(folder):
        os.mkdir(folder, 0o700)
        lock = try_lock(folder / UNNAMED_LOCK)
        if lock is None:
            raise LockTimeout(f"{folder}: locked by another process from its first moment on")
        os.rename(folder / UNNAMED_LOCK, folder / LOCK)
    try:
        record = Record(folder)
        record.write("claim", id=request.id, pid=os.getpid(), boot=boot_id(), requester=request.requester)
        write_whole(folder / REQUEST, dumps(_without_secrets(request)))
        record.state(State.REQUESTED)
    except BaseException:
        lock.release()
        raise
    point("after-claim")
    return Life(request, folders, lock, record, point)


def gate(folders: Folders) -> Path:
    """The lock that keeps claims and reapers apart."""
    path = folders.run / "gate"
    if not path.exists():
        private_folder(folders.run)
        with no_space_as_error(path):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    return path


def _without_secrets(request: Request) -> dict[str, Any]:
    """The request as it is kept: without the script's text, the environment's values and the user data."""
    record: dict[str, Any] = to_json(request)
    work = record["work"]
    work["user_data"] = _size(work["user_data"])
    if "payload" in work:
        payload = work["payload"]
        payload["env"] = [name for name, _ in payload["env"]]
        payload["script"] = _size(payload["script"])
        for file in payload["files"]:
            file["data"] = _size(file["data"])
    return record


def _size(data: str | None) -> int | None:
    return None if data is None else len(data)


def _why(error: Exception) -> str:
    """The reason in one line, with the file it is about."""
    if isinstance(error, OSError) and error.args and isinstance(error.args[0], list):
        source, _, reason = error.args[0][0]  # shutil's, of many files
        return f"{source}: {reason}"
    if isinstance(error, OSError):
        return f"{os.fsdecode(error.filename)}: {error.strerror}" if error.filename else str(error)
    return str(error) if isinstance(error, BelljarError) else f"{type(error).__name__}: {error}"


def _describe(status: ExitStatus) -> str:
    if status.error:
        return f"the payload could not be started: {status.message or status.error}"
    if status.signal is not None:
        return f"the payload was ended by signal {status.signal}"
    return f"the payload ended with exit code {status.exit_code}"
