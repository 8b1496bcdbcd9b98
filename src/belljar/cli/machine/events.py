"""`belljar events`: what happens to all machines of this user, in one stream."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format, as_duration

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.journal import Event
    from belljar.machine.outside.watching import Stream

HELP = "Show what happened to the machines of this user, oldest first; with -f go on with what happens from now on."
A_DAY = 86400.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on with what happens from now on, until interrupted"
    )
    parser.add_argument(
        "--since",
        type=as_duration,
        default=A_DAY,
        metavar="TIME",
        help="how far back to begin, such as 1h (default: 1d)",
    )
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    import asyncio

    begin = time.time() - args.since
    # Those to come are watched before those so far are read: nothing falls between.
    stream = house.machines.events() if args.follow else None
    shown = set()
    for event in past(house, begin):
        shown.add(_key(event))
        _print(event, args.format)

    async def follow(stream: Stream) -> None:
        async for event in stream:
            if event.get("time", 0.0) >= begin and _key(event) not in shown:
                _print(event, args.format)

    if stream is not None:
        asyncio.run(follow(stream))
    return 0


def past(house: House, begin: float) -> list[Event]:
    """The events of all machines since then, live and ended, by time."""
    from belljar.journal import read

    events = []
    for machine in house.machines.list(ended=True):
        if machine.ended is None or machine.ended >= begin:
            events += [{**event, "machine": machine.id} for event in read(machine.folder)]
    return sorted((event for event in events if event.get("time", 0.0) >= begin), key=lambda event: event["time"])


def _print(event: Event, form: str) -> None:
    from belljar.cli.machine.logs import story
    from belljar.cli.render import as_json_line

    print(as_json_line(event) if form == "json" else f"{event['machine']}  {story(event)}", flush=True)


def _key(event: Event) -> tuple[object, ...]:
    return event["machine"], event.get("time"), event.get("event"), event.get("state")
