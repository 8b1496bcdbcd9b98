"""`belljar top`: machines as they live and end, on a terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from belljar.assembly import Runtime
from belljar.cli.monitor.serve import SEEN, host_of
from belljar.cli.parser import Args, Verb
from belljar.cli.render import as_json, duration
from belljar.jobs import plain, size
from belljar.monitor.view import Values, view
from belljar.service.streams import first_of

REFRESH = 1.0  # seconds after which ages are shown anew
LEAST = 0.2  # seconds between two pictures
BAR = 24  # characters of a machine's life
COLOURS = {"run": "green", "paused": "green", "stop": "magenta", "clean": "magenta", "req": "white", "prep": "white"}
SORTS: dict[str, Callable[[Values], Any]] = {  # the first letter is the key
    "age": lambda machine: machine["phases"][:1], "user": lambda machine: machine["user"], "cpus": lambda machine: -machine["cpus"],
    "memory": lambda machine: -machine["memory"], "state": lambda machine: machine["state"], "image": lambda machine: machine["image"],
}  # fmt: skip


def top(args: Args, runtime: Runtime) -> None:
    asyncio.run(_watch(args, runtime))


async def _watch(args: Args, runtime: Runtime) -> None:
    host, changed, ended, console = host_of(args, runtime), asyncio.Event(), asyncio.Event(), Console()
    is_table, order = args.format == "table", [args.sort]
    is_once = args.once or (is_table and not console.is_terminal)

    def press(key: str) -> None:
        order[:] = [name for name in SORTS if name[0] == key] or order
        (ended if key in "q\x03\x1b" else changed).set()

    async def change(longest: float | None = None) -> None:
        """Return when there is a new picture to show."""
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                await changed.wait()
        changed.clear()

    def picture() -> Any:
        values = view(host.nodes(), is_trusted=True)
        return screen(values, order[0], console.height) if is_table else as_json(values, indent=2 if is_once else None)

    async def pictures() -> None:
        while not host.is_read:
            await change()
        if is_once or not is_table:
            console.print(picture()) if is_table else print(picture(), flush=True)
            while not is_once:
                await change()
                await asyncio.sleep(LEAST)
                print(picture(), flush=True)
            return
        with Live(console=console, screen=True, auto_refresh=False) as live, _keys(press):
            while True:
                live.update(picture(), refresh=True)
                await asyncio.sleep(LEAST)
                await change(REFRESH)

    await first_of(host.watch(changed.set), pictures(), ended.wait())


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Each key as it is pressed, where standard input is a terminal."""
    import os
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    loop, before = asyncio.get_running_loop(), termios.tcgetattr(0)
    tty.setcbreak(0)
    loop.add_reader(0, lambda: press(os.read(0, 64).decode(errors="replace")[:1]))
    try:
        yield
    finally:
        loop.remove_reader(0)
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def screen(values: Values, order: str, height: int) -> Group:
    """The whole picture. Text of guests and users steers no terminal."""
    totals, failures = values["totals"], values["causes"][:3]
    states = ", ".join(f"{count} {state}" for state, count in sorted(totals["states"].items()))
    head = Text.assemble(
        ("belljar ", "bold"), (str(totals["live"]), "bold green"), f" machines{f' ({states})' if states else ''}, {totals['cpus']} cpus, "
        f"{size(totals['memory'])};  24 h: {totals['machines']} ended, ", (f"{totals['failed']} failed", "red" if totals["failed"] else ""),
    )  # fmt: skip
    paths = [f"{path['path']} {duration(path['p50'])} (99 %: {duration(path['p99'])})" for path in values["starts"]]
    machines = Table(box=None, pad_edge=False, expand=True, header_style="bold reverse")
    for name in ("MACHINE", "USER", "IMAGE", "CPUS", "MEMORY", "STATE", "START", "AGE", "LIFE", "REQUESTER"):
        is_number = name in ("CPUS", "MEMORY", "AGE")
        machines.add_column(name, justify="right" if is_number else "left", no_wrap=True, overflow="ellipsis")
    live = sorted((row for row in values["machines"] if row["ended"] is None), key=SORTS[order])
    ended = (row for row in values["machines"] if row["ended"] is not None)
    for machine in [*live, *ended][: max(height - len(failures) - 5, 1)]:
        machines.add_row(*_row(machine))
    words = [f"{item['count']:>6} {plain(item['cause'])} -> {plain(item['hint'])}" for item in failures]
    hints = [Text(line, "red", no_wrap=True, overflow="ellipsis") for line in words]
    foot = Text(f"sort by the first letter: {', '.join(SORTS)};  q quits", "dim")
    return Group(head, Text(f"median start: {', '.join(paths) or 'none yet'}"), machines, *hints, foot)


def _row(machine: Values) -> Iterator[Text]:
    end, phases = machine["ended"] or time.time(), machine["phases"]
    begin, style = phases[0][1] if phases else end, "dim" if machine["ended"] else ""
    ran = next((moment - begin for name, moment in phases if name.startswith("run")), None)
    state = machine["cause"] or machine["state"]
    words = (
        machine["name"] or machine["id"], machine["user"], machine["image"], machine["cpus"], size(machine["memory"]), state,
        "" if ran is None else f"{duration(ran)} {machine['start']}", duration(max(end - begin, 0.0)),
    )  # fmt: skip
    for word in words:
        yield Text(plain(str(word)), "red" if word == state and machine["state"] in ("failed", "abandoned") else style)
    yield _life(phases, begin, end)
    yield Text(plain(machine["requester"]), style)


def _life(phases: list[tuple[str, float]], begin: float, end: float) -> Text:
    """Its phases side by side, each as long as it took; the short ones are seen, too."""
    bar = Text()
    for (name, since), (_, until) in zip(phases, [*phases[1:], ("", end)], strict=True):
        colour = next((colour for word, colour in COLOURS.items() if name.startswith(word)), "yellow")
        width = round(BAR * min((until - since) / max(end - begin, 1e-9), 1.0))  # a user may write any moment
        bar.append("\N{LOWER HALF BLOCK}" * width, colour)
    return bar


VERBS = {
    "top": Verb(
        "Watch the machines of this host live and end, as it happens: their phases, how fast they start, what fails and what to do. "
        "A letter sorts, q quits. Where the output is not a terminal, it is shown once.",
        top,
        f"""
        --once | show it once
        --sort {{{",".join(SORTS)}}} =age | what decides the order
        {SEEN}
        --format {{table,json}} =table | json: a line for each change, or with --once one value""",
    )
}
