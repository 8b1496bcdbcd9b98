"""The public API for Python programs: run something in a fresh machine, start machines that live on, see and end them.

    import belljar.api as belljar
    belljar.run(["echo", "hello"]).stdout        # b"hello\\n"

Each call that waits comes twice: `run` for plain programs, `arun` for those with an event loop. All of it works with the settings
of this host and user, as the `belljar` command does. A machine that is started is kept by a process of its own, never by the
caller's, so it makes no difference which thread asks. Errors are those of `belljar.errors`. docs/jobs/api.md has examples.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, Unpack
from weakref import WeakKeyDictionary

from belljar.api.words import Beside, Options, Word, argv_of, environment
from belljar.assembly import Runtime
from belljar.errors import OUR_FAILURE, BelljarError, MachineBusy, NoSuchMachine
from belljar.guest import BytesSink, BytesSource, Guest, Streams
from belljar.host.caller import caller, rlimits, umask
from belljar.host.room import Room
from belljar.host.threads import in_thread, to_its_end
from belljar.jobs.asked import Asked, understood
from belljar.jobs.starting import brought_image, container_of, make_request
from belljar.journal import Event
from belljar.machine import STDERR_LOG, STDOUT_LOG, MachineView
from belljar.machine.life import control
from belljar.machine.life.claim import room_now
from belljar.machine.life.output import kept
from belljar.machine.outside.detached import Keeper
from belljar.machine.outside.registry import Machines
from belljar.machine.outside.watching import ENDED, Stream
from belljar.model import (
    Account,
    MachineId,
    Outcome,
    Payload,
    Port,
    Request,
    RunPayload,
    State,
    StdinKind,
    Transfer,
    Work,
)
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.api.executor import Executor as Executor
    from belljar.api.executor import TaskError as TaskError
else:

    def __getattr__(name: str) -> object:
        """What few programs use, and takes long to import."""
        if name not in ("Executor", "TaskError"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from belljar.api import executor

        return getattr(executor, name)


__all__ = ["Account", "Beside", "Completed", "Executor", "Failed", "Machine", "Options", "Outcome", "Port", "Streams", "TaskError", "TimedOut", "abegin",
           "aevents", "arun", "astart", "events", "find", "image_digest", "logs", "machines", "request", "request_of", "room", "run", "start",
           "start_many"]  # fmt: skip

T = TypeVar("T")
P = ParamSpec("P")
Order = Sequence[Word] | Request  # a command, or all that is asked of a machine
BEGUN = (State.RUNNING.value, "paused")
_absolute = os.path.abspath


@dataclass(frozen=True)
class Completed:
    """What came of a payload, and what it wrote: of each stream the latest part, `machine.output_limit` at most."""

    outcome: Outcome
    stdout: bytes
    stderr: bytes

    @property
    def exit_code(self) -> int:
        """As a shell tells it: 128 + N for signal N; 125 where it never ran."""
        code = self.outcome.shell_code
        return OUR_FAILURE if code is None else code

    def check(self) -> Completed:
        """Itself, where the payload ended with 0. Raises Failed."""
        if self.exit_code != 0:
            raise Failed(self)
        return self


class Failed(BelljarError):
    """A payload that was to end with 0 did not."""

    def __init__(self, completed: Completed) -> None:
        outcome = completed.outcome
        super().__init__(f"{outcome.id}: {outcome.reason}", hint=outcome.hint or f"See `belljar show {outcome.id}`.")
        self.completed = completed


class TimedOut(TimeoutError):
    """A command beside the payload was killed, for its time was over; with what it wrote until then."""

    def __init__(self, seconds: float, stdout: bytes, stderr: bytes) -> None:
        super().__init__(f"not finished after {seconds:g} s")
        self.stdout, self.stderr = stdout, stderr


def _sync(call: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The same for programs without an event loop."""

    @wraps(call)
    def run_to_its_end(*words: P.args, **options: P.kwargs) -> T:
        with asyncio.Runner() as runner:
            return runner.run(call(*words, **options))

    return run_to_its_end


class Machine:
    """A machine, live or ended. Made by `start`, `find` and `machines`."""

    def __init__(self, id: MachineId, runtime: Runtime, keeper: Keeper | None = None) -> None:
        self.id = id
        self._runtime, self._keeper = runtime, keeper

    def __repr__(self) -> str:
        return f"<Machine {self.id}>"

    @property
    def view(self) -> MachineView:
        """What is known of it now. Raises NoSuchMachine."""
        return self._runtime.machines.find(self.id)

    async def await_end(self, timeout: float | None = None) -> Outcome:
        """Return when it has ended. Waiting for many at once costs nothing while nothing happens. Raises TimeoutError."""
        fresh = Machines(self._runtime.folders, self._runtime.reaper)
        async with asyncio.timeout(timeout):  # one watch for all machines that an event loop waits for
            return await _of_loops.setdefault(asyncio.get_running_loop(), fresh).ended(self.id)

    async def _completed(self) -> Completed:
        outcome = await self.await_end()
        self.release()
        return Completed(outcome, self.stdout, self.stderr)

    async def await_running(self) -> None:
        """Return when its work has begun; calls that talk to its guest wait for that themselves. Raises MachineBusy if
        it ended."""
        stream = self._runtime.machines.events(of=self.id)  # before the look: nothing falls between
        view = self.view
        if view.ended is not None or view.state in BEGUN:
            stream.close()
        else:
            async for event in stream:
                if event["machine"] == self.id and (event.get("state") in BEGUN or event["event"] == ENDED):
                    break
        if self.view.ended is not None:
            raise MachineBusy(f"{self.id}: has ended", hint="`Machine.wait` tells how.")

    async def reboots(self) -> AsyncIterator[None]:
        """Each time that its guest reboots as it may, from its start on. It does not end by itself."""
        async for event in self._runtime.machines.events(of=self.id):
            if event["event"] == "rebooted":
                yield

    async def aexec(
        self, argv: Sequence[Word], stdin: bytes = b"", account: Account | None = None, most: int | None = None,
        *, timeout: float | None = None, **beside: Unpack[Beside],
    ) -> tuple[int, bytes, bytes]:  # fmt: skip
        """A second command beside the payload, as its user or *account*: exit code, stdout, stderr (of each the first
        *most* bytes). A cancel ends it. Raises MachineBusy, TimedOut."""
        out, err = BytesSink(most), BytesSink(most)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                code = await self.acarry(argv, Streams(BytesSource(stdin), out, err), account, **beside)
        except TimeoutError:
            if timeout is None or not limit.expired():
                raise
            raise TimedOut(timeout, bytes(out.data), bytes(err.data)) from None
        return code, bytes(out.data), bytes(err.data)

    async def acarry(
        self, argv: Sequence[Word], streams: Streams, account: Account | None = None, **beside: Unpack[Beside]
    ) -> int:
        """`aexec` with these streams, as they come; its exit code."""
        async with self._guest(account) as (guest, who):
            payload = self._beside(argv, who, **beside)
            await guest.add_account(who)
            status = await (await guest.start(payload, streams)).wait()
        if status.error and streams.stderr is not None:
            await streams.stderr.write(status.message.encode() + b"\n")
        if status.signal is not None:
            return 128 + status.signal
        return OUR_FAILURE if status.exit_code is None else status.exit_code

    def _beside(self, argv: Sequence[Word], account: Account, **beside: Unpack[Beside]) -> Payload:
        view = self.view
        cwd = os.fsencode(beside.get("cwd") or str(view.payload.get("cwd") or "/"))
        env = environment(account, beside.get("env", {}), container_of(self._runtime, view.image))
        return Payload(argv_of(argv), account, cwd=cwd, env=env, leaves=beside.get("leaves", False))

    async def aput(self, outside: str, inside: str, account: Account | None = None) -> None:
        """Copy a file or folder of this host into the guest, as the payload's user or *account*."""
        async with self._guest(account) as (guest, who):
            await guest.put(Transfer(_absolute(outside), inside), who, b"/")

    async def aget(self, inside: str, outside: str, account: Account | None = None) -> None:
        """Copy a file or folder of the guest to this host. Raises OutputMissing."""
        async with self._guest(account) as (guest, who):
            await guest.get(Transfer(_absolute(outside), inside), who, b"/")

    @asynccontextmanager
    async def _guest(self, account: Account | None = None) -> AsyncIterator[tuple[Guest, Account]]:
        """Its guest, once its work has begun, and *account*, else the one whose payload it runs."""
        await self.await_running()
        view = self.view
        async with control.talk(view, self._runtime.converse) as guest:
            yield guest, account or control.account_of(view) or caller()

    async def astop(self, grace: float | None = None) -> Outcome:
        """TERM to the payload, the machine's end after the grace; returns when it is gone. Stopping what ended is success."""
        self.ask("stop", grace=grace)
        return await self.await_end()

    wait, exec, put, get, stop = _sync(await_end), _sync(aexec), _sync(aput), _sync(aget), _sync(astop)

    def extend(self, seconds: float) -> float:
        """Its deadline comes later by this; returns the new one, in seconds since the epoch. Raises MachineBusy without
        a deadline."""
        return self._move(by=seconds)

    def stop_at(self, moment: float) -> float:
        """Its deadline is this moment now, in seconds since the epoch. Raises MachineBusy where the last one has passed."""
        return self._move(at=moment)

    def _move(self, **how: float) -> float:
        with control.connect(self.view.folder) as connection:
            return float(control.ask(connection, "deadline", **how)["at"])

    def forward(self, guest: int, host: int = 0, address: str = "127.0.0.1") -> Port:
        """Publish a port of its guest on this host (0: a free one), and return where, until it ends. Raises NoSuchMachine,
        MachineBusy where that cannot be."""
        return control.publish(self.view, Port(guest, host, address))

    def fork(self, count: int = 1, argv: Sequence[Word] = (), **beside: Unpack[Beside]) -> list[Machine]:
        """So many machines that go on where this one stands, with its memory and disk; each runs the command, or stands ready for
        `exec`. Raises MachineBusy where that cannot be."""
        from belljar.jobs.forking import fork

        view, payload = self.view, None
        if argv:
            who = control.account_of(view) or caller()
            payload = replace(self._beside(argv, who, **beside), stdin=StdinKind.NULL, leaves=False)
        ids = fork(self._runtime, view, count, payload, requester="api")
        return [Machine(id, self._runtime) for id in ids]

    @property
    def ports(self) -> list[Port]:
        """Those that are published."""
        return control.published(self.view.folder)

    def ask(self, do: str, **details: Any) -> None:
        """One order to its keeper; nothing where there is none any more."""
        view = self.view
        if view.alive:
            with suppress(NoSuchMachine), control.connect(view.folder) as connection:  # it may end meanwhile
                control.ask(connection, do, **details)

    @property
    def stdout(self) -> bytes:
        """What its payload wrote so far, where it was started by `start`."""
        return b"".join(kept(self.view.folder / STDOUT_LOG))

    @property
    def stderr(self) -> bytes:
        return b"".join(kept(self.view.folder / STDERR_LOG))

    def release(self) -> None:
        """Let a tied machine go: it is stopped."""
        if self._keeper is not None and self._keeper.count > 1:  # others hang on the same tie
            self.ask("stop")
        elif self._keeper is not None:
            self._keeper.release()

    async def aleave(self) -> Outcome:
        """Let a tied machine go, and return when it is gone, also after a cancel."""
        self.release()
        ending = asyncio.ensure_future(self.await_end())
        await to_its_end(ending)
        return ending.result()


# -- calls -----------------------------------------------------------------------------------------------------------


async def arun(argv: Order, *, stdin: bytes = b"", **options: Unpack[Options]) -> Completed:
    """Run a command in its own fresh machine, and return when that is gone, also after a cancel, which stops it. The machine
    ends with this process. Raises what kept it from starting; later errors are in the outcome."""
    async with _tied(argv, stdin=stdin, **options) as machine:
        return await machine._completed()


async def abegin(argv: Order, *, within: float | None = None, **options: Unpack[Options]) -> Machine:
    """A tied machine whose work has begun. After an error, a cancel, or *within* seconds, nothing of it is left. Raises
    what kept it from starting, Failed where it began and ended, TimeoutError."""
    async with asyncio.timeout(within), _tied(argv, **options) as machine:
        try:
            await machine.await_running()
        except MachineBusy:
            raise Failed(await machine._completed()) from None
        return machine


@asynccontextmanager
async def _tied(argv: Order, *, stdin: bytes = b"", **options: Unpack[Options]) -> AsyncIterator[Machine]:
    """After an error or a cancel it is gone, or never comes to be."""
    starting = asyncio.ensure_future(astart(argv, stdin=stdin, tied=True, **options))

    async def leave() -> None:
        with suppress(BelljarError, OSError, ValueError, TypeError):
            await (await starting).aleave()

    try:
        yield await asyncio.shield(starting)
    except BaseException:
        await to_its_end(asyncio.ensure_future(leave()))
        raise


run = _sync(arun)


def start(argv: Order, *, stdin: bytes = b"", tied: bool = False, **options: Unpack[Options]) -> Machine:
    """A machine that lives on its own, claimed when this returns. A *tied* one is stopped when it is released or this
    process ends."""
    return start_many(argv, 1, stdin=stdin, tied=tied, **options)[0]


def start_many(
    argv: Order, count: int, *, stdin: bytes = b"", tied: bool = False, **options: Unpack[Options]
) -> list[Machine]:
    """`start`, so many times: all are claimed when this returns, or none lives. It costs a fraction of single starts, since
    one process starts them all. Raises what kept one of them from being claimed."""
    if count < 1:
        raise ValueError(f"count: {count}: not a number of machines")
    order = argv if isinstance(argv, Request) else request(argv, **options)
    orders = [order, *(replace(order, id=os.urandom(6).hex()) for _ in range(count - 1))]
    keeper = _expected() if tied and not stdin and count == 1 else None
    with open(os.memfd_create("stdin"), "w+b") as file:
        file.write(stdin)
        file.seek(0)
        descriptor = file.fileno() if stdin else None
        keeper = keeper or Keeper(config_file=_runtime().config_file, stdin=descriptor, tied=tied, count=count)
        answers = keeper.take_all(orders)
    machines = [Machine(answer, _runtime(), keeper) for answer in answers if isinstance(answer, str)]
    for error in answers:
        if isinstance(error, BelljarError):
            for machine in machines:
                machine.ask("kill")
            raise error
    return machines


async def astart(argv: Order, *, stdin: bytes = b"", tied: bool = False, **options: Unpack[Options]) -> Machine:
    """`start`."""
    return await in_thread(lambda: start(argv, stdin=stdin, tied=tied, **options), undo=Machine.release)


_KEEPERS: list[Keeper] = []  # that wait


def expect() -> None:
    """A tied machine without stdin is started soon: its keeper starts now, and `start` does not wait for that."""
    with suppress(BelljarError, OSError):  # `start` tells it
        if not _KEEPERS:
            _KEEPERS.append(Keeper(config_file=_runtime().config_file, tied=True))


def expect_none() -> None:
    """What `expect` has begun is of no use any more."""
    with suppress(IndexError):
        _KEEPERS.pop().release()


def _expected() -> Keeper | None:
    with suppress(IndexError):
        keeper = _KEEPERS.pop()
        if keeper.is_there:
            return keeper
        keeper.release()
    return None


def machines(*, ended: bool = False) -> list[Machine]:
    """The live machines of this user, oldest first; with *ended* those too whose records are kept. Dead ones are finished."""
    _runtime().reaper.quick()
    return [Machine(view.id, _runtime()) for view in _runtime().machines.list(ended=ended)]


def find(reference: str) -> Machine:
    """By id, unique beginning of it, name or batch job's id. Raises NoSuchMachine, UsageError."""
    return Machine(_runtime().machines.find(reference).id, _runtime())


def aevents(since: str | None = None) -> Stream:
    """What happens to all machines, for `async for`: the journals of live machines first, then what comes, without end.
    Each is a dict with `machine`, `time` and `event`; the event `ended` has a `position` to go on *since* another time."""
    return _runtime().machines.events(since)


def events(since: str | None = None) -> Iterator[Event]:
    """`aevents`, for plain programs."""
    with asyncio.Runner() as runner:
        coming = aiter(aevents(since))
        while True:
            yield runner.run(anext(coming))  # type: ignore[arg-type]


def request_of(work: Work, **asked: Unpack[Asked]) -> Request:
    """What `start` asks for a machine at this work, which may be the guest's own, by the settings and these options."""
    return make_request(_runtime().settings, work, **understood({"requester": "api", **asked}))


def logs() -> Path:
    """The folder of the ledger, and of what is kept of ended machines."""
    return _runtime().folders.logs


def live_folder() -> Path:
    """The folder of what lives on this host: machines, and isolated networks."""
    return _runtime().folders.run


def image_digest(reference: str) -> str:
    """What this name of an image stands for now. Raises ImageUnknown, ImageCorrupt."""
    return _runtime().images.resolve(reference).digest


def room() -> Room:
    """What of this host's memory and processors is left for machines of this user, and what is reserved."""
    return room_now(_runtime().folders, _runtime().settings.host)


def request(argv: Sequence[Word], **options: Unpack[Options]) -> Request:
    """What `start` asks for, by the settings and these options, of this process's user; with a container image, which is imported
    first, as that is to be started: without words its own command. Raises TypeError, ValueError."""
    asked = dict[str, Any](options)
    image = brought_image(_runtime(), options.get("image"))
    container = image.container if image else None
    if image and (recipe := image.recipe):  # a warm image's machines are of its size, or larger
        asked = {"cpus": recipe.cpus, "memory": recipe.memory, **asked}
    if container:
        argv = argv or (*container.entrypoint, *container.command)
    account = container.account if container else caller()
    inside = {name: asked.pop(name) for name in Options.__annotations__.keys() - Asked.__annotations__ if name in asked}
    payload = Payload(
        argv_of(argv), account, script=inside.get("script"), cwd=os.fsencode(inside.get("cwd", container.cwd if container else "/")),
        env=environment(account, inside.get("env", {}), container), umask=umask(), rlimits=rlimits(), stdin=StdinKind.NULL,
        inputs=tuple(Transfer(os.path.abspath(here), there) for here, there in inside.get("inputs", {}).items()),
        outputs=tuple(Transfer(os.path.abspath(here), there) for there, here in inside.get("outputs", {}).items()),
    )  # fmt: skip
    return request_of(RunPayload(payload), **asked)


# -- small helps -----------------------------------------------------------------------------------------------------


@cache
def _runtime() -> Runtime:
    return Runtime()


_of_loops = WeakKeyDictionary[asyncio.AbstractEventLoop, Machines]()
