"""`belljar wait`, `stop`, `extend`, `kill`: wait for the end of a machine, order it, or move its deadline."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from belljar.assembly import Runtime
from belljar.cli import reported, with_hints
from belljar.cli.parser import MACHINE, MACHINES, Args, acts
from belljar.cli.render import moment
from belljar.errors import OUR_FAILURE, BadOption, BelljarError, NoSuchMachine
from belljar.host.processes import is_stopped
from belljar.jobs.users import reach
from belljar.machine.cleaning.reaper import supervisor
from belljar.machine.life import control
from belljar.model import Outcome


def wait(args: Args, runtime: Runtime) -> int:
    """The exit code of each machine's payload, when it has ended."""

    def wait_for(reference: str) -> int:
        owners, machine = reach(runtime, reference)
        outcome = until_ended(owners, machine.id, args.timeout)
        if outcome.shell_code is None:
            raise BelljarError(f"{machine.id}: {outcome.reason}", hint=outcome.hint or None)
        return outcome.shell_code

    return each(args, wait_for)


def until_ended(runtime: Runtime, id: str, timeout: float | None) -> Outcome:
    """What came of the machine, once it has ended. Raises BelljarError after *timeout* seconds."""

    async def ended() -> Outcome:
        async with asyncio.timeout(timeout):
            return await runtime.machines.ended(id)

    try:
        return asyncio.run(ended())
    except TimeoutError:
        hint = "It goes on running; wait again, or end it with `belljar stop ID`."
        raise BelljarError(f"{id}: still running after {timeout:g} s", hint=hint) from None


def stop(args: Args, runtime: Runtime) -> int:
    if args.at is None:
        return each(args, lambda machine: end(runtime, machine, "stop", grace=args.grace))
    if args.grace is not None:
        raise BadOption("--grace with --at: at its deadline a machine has the grace it was begun with")
    if args.at <= time.time():
        raise BadOption("--at: this moment has passed", hint="Without --at the machine ends now.")
    return each(args, lambda machine: move(runtime, machine, at=args.at))


def kill(args: Args, runtime: Runtime) -> int:
    return each(args, lambda machine: end(runtime, machine, "kill"))


def extend(args: Args, runtime: Runtime) -> None:
    move(runtime, args.machine, by=args.by)


def checkpoint(args: Args, runtime: Runtime) -> None:
    runtime, view = reach(runtime, args.machine)
    folder = os.path.abspath(args.folder)
    with control.connect(view.folder, patience=None) as connection:
        answer = control.ask(connection, "checkpoint", folder=folder, stop=args.stop, within=args.within)
    if args.stop:
        until_ended(runtime, view.id, None)
    print(f"{view.id}  {folder}/{answer['number']}")


def end(runtime: Runtime, reference: str, do: str, **how: object) -> None:
    """Ask the supervisor to end the machine, then wait until its lock is free. An ended machine is success."""
    runtime, view = reach(runtime, reference)
    if view.ended:
        return
    pid = supervisor(view.folder) if view.alive else None
    if pid is not None and is_stopped(pid):  # suspended (Ctrl-Z, a batch system) it hears nothing: it goes on, to end
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    try:
        with control.connect(view.folder) as connection:
            control.ask(connection, do, **how)
    except NoSuchMachine:
        if view.alive:
            raise
        runtime.reaper.full()  # its supervisor is dead: finish what it left
    else:
        until_ended(runtime, view.id, None)


def move(runtime: Runtime, reference: str, **how: float) -> None:
    """Give a living machine another deadline, `at` a moment or `by` some seconds later, and say which it is now."""
    runtime, view = reach(runtime, reference)
    with control.connect(view.folder) as connection:
        answer = control.ask(connection, "deadline", **how)
    print(f"{view.id}  {moment(float(answer['at']))}")


# -- several machines ----------------------------------------------------------------------------------------------------


def each(args: Args, act: Callable[[str], int | None]) -> int:
    """Do this to several machines at once, each in a process of its own: one failure stops no other, and root can
    become each user. The first exit code that is not 0, in the order named."""
    names = list(dict.fromkeys(args.machines))
    if len(names) == 1:
        args.machine = names[0]  # for hints
        return act(names[0]) or 0
    children = [os.fork() or _be(args, name, act) for name in names]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _be(args: Args, machine: str, act: Callable[[str], int | None]) -> NoReturn:
    code, args.machine = OUR_FAILURE, machine
    try:
        code = reported(lambda: with_hints(lambda: act(machine) or 0, args), detail=args.verbose)
    finally:
        os._exit(code)


VERBS = acts(
    f"""
    # wait | Wait until machines have ended, then exit with the job's exit code (128 + N: signal N ended it; 125: it never ran, or
    | --timeout passed). With several machines: the first code that is not 0.
    {MACHINES}
    --timeout TIME | stop waiting after this time, such as 90s or 5m
    # stop | End machines: the job gets SIGTERM, and after the grace period the machine ends. Returns when all are gone.
    --grace TIME | how long the job may take to end (default: as the machine was started)
    --at MOMENT | not now, but at 18:30, 2026-12-24T18:00 or +45m; returns at once
    {MACHINES}
    # extend | Move a machine's deadline to a later time. `belljar stop --at` sets one. The guest finds the new one in its machine and
    | job features.
    {MACHINE}
    TIME @by | how much later, such as 30m or 2h
    # checkpoint | Write a machine to a folder, as it is. `belljar run --restore DIR` goes on from there, on this host or another one
    | with the same processor model and QEMU.
    --stop | end the machine then (`belljar run` exits with 75); without, it goes on
    --within TIME | give up after this time, such as 60s: the machine goes on
    {MACHINE}
    DIR @folder | a folder for this machine alone, made if missing
    # kill | End machines at once: the jobs get no time to finish. Returns when all are gone.
    {MACHINES}""",
    globals(),
)
