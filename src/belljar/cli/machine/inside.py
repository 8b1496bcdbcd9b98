"""`belljar exec`, `ssh`, `fork`, `cp`, `console`, `port`: into a running machine, or a copy of it, with a second command, a shell,
files, by hand, by network."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from contextlib import suppress
from fnmatch import fnmatchcase as fnmatch

from belljar import batch
from belljar.assembly import Runtime
from belljar.cli.machine import request as words
from belljar.cli.parser import MACHINE, Args, acts, after_dashes
from belljar.cli.render import show
from belljar.errors import BadOption, BelljarError, InputMissing, NoSuchMachine, OutputMissing
from belljar.guest import ExitStatus
from belljar.host.processes import die_by
from belljar.jobs import forking
from belljar.jobs.attend import StoppableLoop, in_loop, listen, raw_terminal, streams_of
from belljar.jobs.shares import port_of
from belljar.jobs.starting import container_of
from belljar.jobs.users import reach
from belljar.machine import MachineView
from belljar.machine.life import control
from belljar.machine.life.control import talk
from belljar.machine.orders import Pause, Resize, Signal
from belljar.model import Account, Payload, State, Transfer

LEAVE = b"\x1d"  # Ctrl-]


# -- exec ----------------------------------------------------------------------------------------------------------------


def exec_(args: Args, runtime: Runtime) -> int:
    """A second process beside the payload, with the same contract."""
    if not after_dashes(args):
        raise BadOption("nothing to run", hint=f"Put `--` before the command: belljar exec {args.machine} -- CMD.")
    if args.wait is not None:
        asyncio.run(_running(runtime, args.machine, args.wait))
    runtime, view = reach(runtime, args.machine)
    payload = _payload(args, runtime, view)
    return _leave(in_loop(lambda loop: _attend(runtime, view, payload, loop)))


async def _running(runtime: Runtime, reference: str, longest: float) -> None:
    """Return when a machine of this reference runs, or *longest* seconds have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(longest):
            async for _ in runtime.machines.events():
                with suppress(NoSuchMachine):
                    if runtime.machines.find(reference).state == State.RUNNING.value:
                        return


async def _attend(runtime: Runtime, view: MachineView, payload: Payload, loop: StoppableLoop) -> ExitStatus:
    """Start the command, pass on what this process is sent, wait for its end."""

    async def pass_on() -> None:
        while True:
            match await orders.next():
                case Signal(number=number):
                    await process.signal(number)
                case Resize(rows=rows, columns=columns):
                    await process.resize(rows, columns)
                case Pause(done=done):
                    done.set()  # this process stops; the machine belongs to somebody else and goes on

    async with talk(view, runtime.converse) as guest:
        with raw_terminal(payload.terminal) as terminal:
            orders = listen(loop, terminal)
            await guest.add_account(payload.account)
            process = await guest.start(payload, streams_of(payload))
            passing = asyncio.ensure_future(pass_on())
            try:
                return await process.wait()
            finally:
                passing.cancel()


def _payload(args: Args, runtime: Runtime, view: MachineView) -> Payload:
    """The command, as the machine's user and in its directory where no others are named."""
    args.command = ["--", *after_dashes(args)]
    args.cwd = args.cwd or str(view.payload.get("cwd") or "/")
    return words.payload(args, _account(args.user, view), container_of(runtime, view.image))


def _account(user: str | None, view: MachineView) -> Account:
    """Who is meant: the user that was named, else the machine's."""
    return words.account_of(user) if user else control.account_of(view) or words.account_of(None)


def _leave(status: ExitStatus) -> int:
    if status.error:
        why = f"the command could not be started: {status.message or status.error}"
        refusal = BelljarError(why, hint="Check the command's path inside the guest.")
        refusal.exit_code = status.exit_code or refusal.exit_code
        raise refusal
    if status.signal is not None:
        die_by(status.signal)
    return status.exit_code or 0


# -- ssh -----------------------------------------------------------------------------------------------------------------

LOGIN = 'test -x "$SHELL" || SHELL=/bin/sh; export SHELL; exec "$SHELL" "$@"'  # the guest may not have the user's own
SENT = ("LANG", "LC_*", "COLORTERM", "NO_COLOR", "TERM")


def ssh(args: Args, runtime: Runtime) -> int:
    """As people use the program of that name: a login shell, or its `-c` with all the words in one."""
    words = after_dashes(args)
    args.tty = args.tty or (not words and os.isatty(0))
    names = [name for name in os.environ if any(fnmatch(name, pattern) for pattern in SENT)]
    args.env = [*names, *args.env]
    args.command = ["--", "sh", "-c", LOGIN, "sh", *(["-c", " ".join(words)] if words else ["-l"])]
    return exec_(args, runtime)


# -- fork ----------------------------------------------------------------------------------------------------------------


def fork(args: Args, runtime: Runtime) -> None:
    words.check_name(args.name)
    runtime, view = reach(runtime, args.machine)
    payload = words.unattended(_payload(args, runtime, view)) if after_dashes(args) else None
    for id in forking.fork(runtime, view, args.count, payload, name=args.name):
        print(id, flush=True)


# -- cp ------------------------------------------------------------------------------------------------------------------


def cp(args: Args, runtime: Runtime) -> None:
    source_id, source = split(args.source)
    target_id, target = split(args.target)
    if bool(source_id) == bool(target_id):
        hint = "For example: belljar cp 3f2a:/etc/os-release ."
        raise BadOption("one of SRC and DST must be ID:PATH, the other a path here", hint=hint)
    if target_id and not os.path.lexists(source):
        raise InputMissing(f"{source}: does not exist", hint="Correct SRC.")
    runtime, view = reach(runtime, source_id or target_id)
    if source_id and os.path.isdir(target):
        target = os.path.join(target, os.path.basename(source.rstrip("/")) or source_id)
    if source_id and not os.path.isdir(folder := os.path.dirname(target)):
        raise BadOption(f"{folder}: no such folder here", hint="Make it, or name another place.")

    async def copy() -> None:
        cwd = os.fsencode(str(view.payload.get("cwd") or "/"))
        async with talk(view, runtime.converse) as guest:
            move, transfer = (
                (guest.put, Transfer(source, target)) if target_id else (guest.get, Transfer(target, source))
            )
            await move(transfer, _account(args.user, view), cwd)

    try:
        asyncio.run(copy())
    except OutputMissing as exc:
        raise OutputMissing(exc.message, hint=f"Correct {view.id}:PATH.") from exc


def split(text: str) -> tuple[str, str]:
    """(ID, PATH), or ("", PATH) for a path here: one with a slash before its first colon, or without a colon."""
    id, colon, path = text.partition(":")
    if colon and id in batch.names():  # a batch id has a colon of its own
        number, colon, path = path.partition(":")
        id = f"{id}:{number}"
    if not colon or "/" in id or os.path.lexists(text):
        return "", os.path.abspath(text)
    if not id or not path:
        raise BadOption(f"{text}: not of the form ID:PATH")
    return id, path


# -- console -------------------------------------------------------------------------------------------------------------


def console(args: Args, runtime: Runtime) -> None:
    """The serial console, as it speaks; what is typed goes to it."""
    runtime, view = reach(runtime, args.machine)
    connection = control.connect(view.folder)
    control.ask(connection, "console")
    connection.settimeout(None)
    if is_typed := os.isatty(0):
        print(f"console of {view.id}; Ctrl-] leaves", file=sys.stderr)
    with raw_terminal(is_typed):
        _pump(connection.fileno())


def _pump(console: int) -> None:
    """Bytes both ways until the machine ends, our input ends, or Ctrl-] is typed."""
    poller = select.poll()
    poller.register(console, select.POLLIN)
    poller.register(0, select.POLLIN)
    while True:
        for descriptor, _ in poller.poll():
            data = os.read(descriptor, 4096)
            if descriptor == console:
                if not data:
                    return
                os.write(1, data)
            elif not data:
                poller.unregister(0)
            elif LEAVE in data and os.isatty(0):
                return
            else:
                os.write(console, data)


# -- port ---------------------------------------------------------------------------------------------------------------


def port(args: Args, runtime: Runtime) -> None:
    asked = None if args.port is None else port_of(args.port, "")
    runtime, view = reach(runtime, args.machine)
    if not view.alive:
        raise NoSuchMachine(f"{view.id}: the machine has ended")
    if asked is not None:
        print(control.publish(view, asked).place)
        return
    ports = control.published(view.folder)
    show(ports, ("PLACE", "GUEST"), [(port.place, port.guest) for port in ports], as_=args.format)


COMMAND = f"""
    --user NAME|UID[:GID] | the user in the guest (default: the job's)
    -e --env K=V * | set a variable; K alone passes on yours
    --cwd PATH | working directory in the guest (default: the job's)
    {MACHINE}
    CMD ... @command"""
WAIT = "--wait TIME | wait this long for a machine of yours with this name to run"
VERBS = acts(
    f"""
    # exec +command +wait | Run a second command in a running machine, as the job's user. The exit code is the command's, as with
    | `belljar run`.
    $ belljar exec [options] ID -- CMD ARG...
    -n --no-input | read no input: for shell loops that read from standard input
    --inherit-env | pass on your whole environment
    -t --tty | give the command a terminal
    # ssh +command +wait | Open a login shell in a running machine, as the job's user, with your TERM and LANG; or run a command
    | there, its words joined as ssh does. No ssh server and no network is needed.
    $ belljar ssh [options] ID [COMMAND...]
    -t --tty | give a command a terminal, too
    # fork +command | Start machines that go on where a running one stands, with its memory and disk, and print their IDs. Each runs
    | the command, or stands ready for `belljar exec`.
    $ belljar fork [options] ID [-- CMD ARG...]
    -n --count N =1 | so many
    --name NAME = | their name; of several, NAME-1 and so on
    # cp | Copy a file or folder into or out of a running machine: SRC or DST is ID:PATH, the other one a path on this host.
    --user NAME|UID[:GID] | the user in the guest (default: the job's)
    SRC @source | PATH on this host, or ID:PATH in the machine
    DST @target | ID:PATH in the machine, or PATH on this host
    # console | Connect to a running machine's serial console. Leave with Ctrl-]. Earlier output is in `belljar logs ID --console`.
    {MACHINE}
    # port +format | Publish a port of a running machine on this host, and print where: connections there go to that port in the
    | machine, until it ends. Without PORT: list the ports that are published.
    {MACHINE}
    PORT ? | [[ADDR:]HOST:]GUEST, as `belljar run --publish` takes it; GUEST alone: a free port of 127.0.0.1""",
    globals(),
    command=COMMAND,
    wait=WAIT,
)
