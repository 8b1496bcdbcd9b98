"""`belljar wait ID`: sleep until a machine has ended, then exit as its payload did."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import as_duration
from belljar.cli.several import add_machines, each
from belljar.errors import OUR_FAILURE, BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.model import Outcome

HELP = (
    "Wait until a machine has ended, then exit with its payload's code (128 + N where signal N ended it; "
    "125 where it never ran, or where --timeout passed before). Of several, the first code that is not 0."
)


class NotEnded(BelljarError):
    """The machine did not end within --timeout."""

    hint = "It goes on running; wait again, or end it with `belljar stop ID`."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_machines(parser)
    parser.add_argument(
        "--timeout", type=as_duration, metavar="TIME", help="give up waiting after this long, such as 90s or 5m"
    )


def run(args: argparse.Namespace, house: House) -> int:
    return each(args, lambda machine: wait(house, machine, args.timeout))


def wait(house: House, reference: str, timeout: float | None) -> int:
    """The exit code of one machine, when it has ended."""
    from belljar.jobs.users import reach

    house, machine = reach(house, reference)
    outcome = until_ended(house, machine.id, timeout)
    code = exit_code(outcome)
    if code == OUR_FAILURE and outcome.exit_code is None:
        raise BelljarError(f"{machine.id}: {outcome.reason}", hint=outcome.hint or None)
    return code


def exit_code(outcome: Outcome) -> int:
    """The code by which a shell would know this end."""
    if outcome.signal is not None:
        return 128 + outcome.signal
    return OUR_FAILURE if outcome.exit_code is None else outcome.exit_code


def until_ended(house: House, id: str, timeout: float | None) -> Outcome:
    """What came of the machine, once it has ended. Raises NotEnded after *timeout* seconds."""
    from belljar.host import quick_asyncio  # isort: skip - it must come before asyncio

    import asyncio

    assert quick_asyncio

    async def wait() -> Outcome:
        async with asyncio.timeout(timeout):
            return await house.machines.ended(id)

    try:
        return asyncio.run(wait())
    except TimeoutError:
        raise NotEnded(f"{id}: still running after {timeout:g} s") from None
