"""`belljar exec ID -- CMD`: a second process in a running machine, beside its payload, with the same contract."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from belljar.cli.parser import add_machine, add_repeatable
from belljar.errors import BadOption, BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.guest import ExitStatus, Guest
    from belljar.jobs.attend import StoppableLoop
    from belljar.machine import MachineView
    from belljar.model import Payload

HELP = "Run a second command in a running machine, as the machine's own user. Exits as `belljar run` does."


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "belljar exec [options] ID -- CMD ARG..."
    parser.add_argument("--user", metavar="NAME|UID[:GID]", help="who the command is (default: the machine's user)")
    add_repeatable(parser, "--env", "K=V", "set a variable; K alone passes the caller's")
    add_repeatable(parser, "--env-file", "FILE", "lines K=V; # begins a comment line")
    parser.add_argument("--inherit-env", action="store_true", help="pass the caller's whole environment")
    parser.add_argument("--cwd", metavar="PATH", help="working directory in the guest (default: the payload's)")
    parser.add_argument("-t", "--tty", action="store_true", help="give the command a terminal")
    add_machine(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.jobs.attend import StoppableLoop
    from belljar.jobs.users import reach

    # argparse takes the `--` behind a parameter away, and leaves one that stands behind it.
    args.command = ["--", *(args.command[1:] if args.command[:1] == ["--"] else args.command)]
    if args.command == ["--"]:
        raise BadOption("nothing to run", hint="Put `--` before the command: belljar exec ID -- CMD.")
    house, view = reach(house, args.machine)
    payload = _payload(args, view)
    loop = StoppableLoop()
    try:
        status = loop.run_until_complete(_attend(house, view, payload, loop))
    finally:
        loop.close()
    return _leave(status)


async def _attend(house: House, view: MachineView, payload: Payload, loop: StoppableLoop) -> ExitStatus:
    """Start the command, pass on what this process is sent, wait for its end."""
    from belljar.machine.outside.talking import talk

    async with talk(view, house.converse) as guest:
        return await _carry_out(guest, payload, loop)


async def _carry_out(guest: Guest, payload: Payload, loop: StoppableLoop) -> ExitStatus:
    from belljar.jobs.attend import listen, raw_terminal, streams_of
    from belljar.machine.orders import Orders, Pause, Resize, Resume, Signal

    orders = Orders()
    terminal = raw_terminal() if payload.terminal else None
    listen(loop, orders, terminal, alone=False)
    try:
        await guest.add_account(payload.account)
        process = await guest.start(payload, streams_of(payload))

        async def obey() -> None:
            while True:
                match await orders.next():
                    case Signal(number=number):
                        await process.signal(number)
                    case Resize(rows=rows, columns=columns):
                        await process.resize(rows, columns)
                    case Pause(done=done):
                        done.set()  # this process stops; the machine belongs to somebody else and goes on
                    case Resume():
                        pass

        obeying = asyncio.ensure_future(obey())
        try:
            return await process.wait()
        finally:
            obeying.cancel()
    finally:
        if terminal is not None:
            terminal.restore()


def _payload(args: argparse.Namespace, view: MachineView) -> Payload:
    from belljar.cli.machine import request as words
    from belljar.machine.outside.talking import account_of

    args.inputs, args.outputs = [], []
    if args.cwd is None:
        args.cwd = str(view.payload.get("cwd") or "/")
    account = words.account_of(args.user) if args.user else account_of(view) or words.account_of(None)
    return words.payload(args, account)


def _leave(status: ExitStatus) -> int:
    from belljar.host.processes import die_by

    if status.error:
        raise CannotStart(f"the command could not be started: {status.message or status.error}", code=status.exit_code)
    if status.signal is not None:
        die_by(status.signal)
    return status.exit_code or 0


class CannotStart(BelljarError):
    """The guest could not start the command."""

    hint = "Check the command's path inside the guest."

    def __init__(self, message: str, *, code: int | None) -> None:
        super().__init__(message)
        self.exit_code = code or self.exit_code
