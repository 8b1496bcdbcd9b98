"""`belljar events`: what happens to all machines of this user, in one stream."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import add_format, as_duration

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.journal import Event
    from belljar.machine import Folders

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
    begin = time.time() - args.since
    # Those to come are watched before those so far are read: nothing falls between.
    stream = Stream(house.folders) if args.follow else None
    shown = set()
    for event in past(house, begin):
        shown.add(_key(event))
        _print(event, args.format)
    for event in stream or ():
        if event.get("time", 0.0) >= begin and _key(event) not in shown:
            _print(event, args.format)
    return 0


def past(house: House, begin: float) -> list[Event]:
    """The events of all machines since then, live and ended, by time."""
    from belljar.journal import read

    events = []
    for machine in house.machines.list(ended=True):
        if machine.ended is None or machine.ended >= begin:
            events += [{**event, "machine": machine.id} for event in read(machine.folder)]
    return sorted((event for event in events if event.get("time", 0.0) >= begin), key=lambda event: event["time"])


class Stream:
    """The events of every machine of these folders as they are written, of machines to come as well. Never ends."""

    def __init__(self, folders: Folders) -> None:
        from belljar.host.files import private_folder
        from belljar.host.watch import IN_CREATE, IN_DELETE, IN_MOVED_FROM, IN_MOVED_TO, Watch

        self._live, self._ended = folders.machines, folders.logs
        self._watch = Watch()
        for folder in (self._live, self._ended):  # an empty folder can be watched, a missing one cannot
            self._watch.add(private_folder(folder), IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO)
        self._known = set(os.listdir(self._ended))
        self._tails: dict[str, Tail] = {}

    def __iter__(self) -> Iterator[Event]:
        while True:
            live, ended = set(os.listdir(self._live)), set(os.listdir(self._ended))
            for id in (live | (ended - self._known)) - set(self._tails):
                self._begin(id)
            for id, tail in list(self._tails.items()):
                for event in tail.more():
                    yield {**event, "machine": id}
                if id not in live:  # when we looked; all it wrote is read now
                    self._tails.pop(id).close()
            self._known = ended
            sys.stdout.flush()
            self._watch.wait()

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._watch.close()

    def _begin(self, id: str) -> None:
        """Read this machine's journal from now on; a short life may have ended before we came."""
        from belljar.host.watch import IN_CREATE, IN_MODIFY
        from belljar.journal import JOURNAL

        self._watch.add(self._live / id, IN_CREATE)  # its journal may not be there yet
        for folder in (self._live / id, self._ended / id):
            with suppress(OSError):
                self._tails[id] = Tail(folder / JOURNAL)
                self._watch.add(folder / JOURNAL, IN_MODIFY)
                return


class Tail:
    """A journal that is being written, read from where we stopped."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        self._rest = b""

    def more(self) -> list[Event]:
        import json

        self._rest += self._file.read() or b""
        lines, _, self._rest = self._rest.rpartition(b"\n")
        events: list[Any] = []
        for line in lines.splitlines():
            with suppress(ValueError):
                events.append(json.loads(line))
        return [event for event in events if isinstance(event, dict) and "event" in event]

    def close(self) -> None:
        self._file.close()


def _print(event: Event, form: str) -> None:
    from belljar.cli.machine.logs import story
    from belljar.cli.render import as_json_line

    print(as_json_line(event) if form == "json" else f"{event['machine']}  {story(event)}", flush=True)


def _key(event: Event) -> tuple[object, ...]:
    return event["machine"], event.get("time"), event.get("event"), event.get("state")
