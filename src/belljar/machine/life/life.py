"""One machine's life as its supervisor sees it: folder, lock, journal, state, phases, deadline, and the outcome in the making."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, HostError, IdentityRefused, about, in_words
from belljar.guest import ExitStatus, Identity
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.files import PRIVATE_FILE
from belljar.host.locks import Lock
from belljar.host.room import Placement
from belljar.journal import Record
from belljar.machine import Folders
from belljar.machine.orders import Ended
from belljar.machine.states import CLASSES, check_move, class_of_error
from belljar.model import Cause, Outcome, OutcomeClass, Request, State
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.machine.checkpoints import Checkpoint

HINTS = {  # for a payload that could not be started; the reason says what was wrong
    "not-found": "Name a program the guest has; a script of yours is copied in when it stands without `--` before it.",
    "not-executable": "Check its mode and its first line: the interpreter named there must be in the guest.",
    "no-cwd": "Name a folder the payload's user may enter with `--cwd`.",
    "failed": "See `belljar logs ID --console`.",
}


Point = Callable[[str], None]  # is called at each named point of a machine's life


class Lifecycle:
    """Made by `claim`; ends with `release`. Others read it, and change it by its methods alone."""

    def __init__(self, request: Request, folders: Folders, lock: Lock, record: Record, point: Point) -> None:
        self.request, self.record, self.point = request, record, point
        self.folders, self.folder = folders, folders.machine(request.id)
        self.state = State.REQUESTED
        self.phases: dict[str, float] = {}
        self.deadline = Deadline()
        self.placement = Placement()
        self.time_began = 0.0  # when its work's time began to count, seconds since the epoch
        self.is_begun = self.is_settled = False
        self.identity: Identity | None = None  # its guest's, once that has proved it
        self.checkpoint: Checkpoint | None = None  # what it goes on from
        self.files: list[Path] = []  # of this machine alone, outside its folder
        started, reason = time.time(), "it has not ended"
        self.outcome = Outcome.of(request, Cause.NODE_FAULT, OutcomeClass.NODE, reason=reason, started=started)
        self._lock = lock

    def enter(self, state: State, **details: Any) -> None:
        """Journal the state, then be in it."""
        check_move(self.state, state)
        self.record.state(state, **details)
        self.state = state

    def leave_towards(self, state: State) -> None:
        """Enter a state on the way out: a full disk must not keep us from cleaning up."""
        check_move(self.state, state)
        with suppress(HostError, OSError):
            self.record.state(state)
        self.state = state

    @contextmanager
    def trying(self, otherwise: str) -> Iterator[None]:
        """A step of the way out. An error in it is told in the outcome (*otherwise*, and why), and does not stop it."""
        try:
            yield
        except Exception as error:  # a defect of one step must not keep the next one from cleaning up
            kind = "" if isinstance(error, (BelljarError, OSError)) else f"{type(error).__name__}: "
            self.tell_trouble(f"{otherwise}: {kind}{in_words(error) if isinstance(error, OSError) else error}")

    def tell_trouble(self, what: str) -> None:
        """Something of the way out did not go as it should: the outcome tells of it."""
        self.note(troubles=(*self.outcome.troubles, what))

    def place(self, placement: Placement) -> None:
        """Where its virtual processors are to run."""
        self.placement = placement
        nodes = sorted({cpu.node for cpu in placement.cpus})
        self.record.tell("placement", cpus=placement.numbers, nodes=nodes, reason=placement.reason)

    def attach(self, what: str, name: str) -> Path:
        """Where the file of a further disk is to be made, journaled; it goes with the machine."""
        path = self.folders.attachment(self.request.id, name)
        self.record.intend(what, path)
        self.files.append(path)
        return path

    def prove(self, identity: Identity, sample: str, **details: Any) -> None:
        """Its guest has shown that it has this identity. Two guests of a host that drew the same random bytes are twins: raises
        IdentityRefused."""
        path = self.folders.identities / sample
        self.record.intend("identity", path)
        try:
            path.touch(PRIVATE_FILE, exist_ok=False)
        except FileExistsError:
            reason = "another guest on this host drew the same random numbers: the clone is a twin"
            raise IdentityRefused(reason) from None
        self.files.append(path)
        self.identity = identity
        self.record.write("identity", **details)

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
        reason = self.outcome.reason if cause is not Cause.FINISHED else f"the payload {status.words}"
        if status.oom_killed and status.signal == 9:
            cause, reason = Cause.GUEST_OOM, "the guest ran out of memory and its kernel killed the payload"
        self.note(
            cause=cause, klass=CLASSES[cause], reason=reason, exit_code=status.exit_code, signal=status.signal,
            core_dumped=status.core_dumped, guest=status.usage, error=status.error, hint=about(HINTS.get(status.error, ""), self.request.id),
        )  # fmt: skip

    def expect(self, cause: Cause, reason: str) -> None:
        """The payload was asked to end for this reason; its status still counts if it obeys."""
        if not self.is_settled:
            self.note(cause=cause, klass=CLASSES[cause], reason=reason)

    def fail(self, error: BelljarError) -> None:
        """belljar, the host or the guest failed. A payload's status that is already known stays known."""
        if self.is_settled:
            return
        self.note(
            cause=error.cause, klass=class_of_error(error), reason=about(error.message, self.request.id),
            hint=about(error.hint, self.request.id), error=type(error).__name__,
        )  # fmt: skip

    def end(self, ended: Ended) -> None:
        """The machine was ended from outside. How a payload ended is only told, for its files were not delivered."""
        if self.is_settled:
            return
        reason, known = ended.reason, self.outcome
        if known.payload_ran:
            how = f"signal {known.signal}" if known.signal is not None else f"exit code {known.exit_code}"
            reason = f"{reason}, before its files were copied out; the payload had ended with {how}"
        self.note(cause=ended.cause, klass=CLASSES[ended.cause], reason=reason, exit_code=None, signal=ended.number)

    def explain(self, error: BaseException) -> None:
        """What ended it is its outcome, unless all that the job is about was done by then."""
        match error:
            case Ended():
                self.end(error)
            case BelljarError():
                self.fail(error)
            case OSError():
                self.fail(HostError(in_words(error)))
            case Exception():
                defect = HostError(f"a defect of belljar: {type(error).__name__}: {error}")
                self.fail(defect)
                if self.is_settled:  # else it is told by who gets it
                    self.tell_trouble(defect.message)
            case _:
                self.end(Ended(Cause.CANCELLED, signal.SIGKILL, "cancelled by the program that keeps it"))

    def begin_time(self) -> None:
        """From now on its work's time counts."""
        self.time_began = time.time()
        self.deadline.begin(self.request.timeout)

    def begin_work(self) -> None:
        """From now on it can be asked to end, and its guest is lost where before a boot failed."""
        self.is_begun = True

    def begin_again(self) -> None:
        """Its guest rebooted: its work has not begun, and it has proved nothing yet. Its time goes on."""
        self.is_begun, self.identity = False, None
        self.record.tell("rebooted")

    def settle(self) -> None:
        """All that the job is about is done: whatever happens to the machine now, the outcome stays what it is."""
        self.is_settled = True

    def release(self) -> None:
        """Give up journal and lock. Whoever finds the lock free afterwards may clean up what is left."""
        for what in (self.record.close, self._lock.release):
            with self.trying("a file of it was not closed"):
                what()


class Deadline:
    """When its work is to end. By the event loop's clock, which leaves out the time in which a job was suspended."""

    def __init__(self) -> None:
        self.why = ""  # in words, once it has passed
        self.moved_to: float | None = None  # by an order, in seconds since the epoch
        self.passed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def at(self) -> float | None:
        """Seconds since the epoch, as it looks now."""
        return None if self._timer is None else time.time() + self._timer.when() - asyncio.get_running_loop().time()

    def begin(self, limit: float | None) -> None:
        """The work's time counts from now on. An order of before stands."""
        if limit is not None and self.moved_to is None:
            self.why = f"the time limit of {limit:g} s was reached"
            self._set(limit)

    def move(self, at: float) -> None:
        """It is this moment now, which may have been."""
        self.moved_to, self.why = at, f"the deadline was reached, which was moved to {stamp(at)}"
        self._set(at - time.time())

    def _set(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.passed.set)


def stamp(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
