"""`belljar top`: machines as they live and end, on a terminal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from belljar.assembly import Runtime
from belljar.cli.monitor import SEEN, host_of
from belljar.cli.parser import Args, acts
from belljar.cli.render import as_json, duration
from belljar.jobs import plain, size
from belljar.monitor.view import Values, view
from belljar.service.streams import at_most, first_of

REFRESH = 1.0  # seconds after which ages are shown anew
LEAST = 0.2  # seconds between two pictures
HEADS = ("MACHINE", "USER", "IMAGE", "CPUS", "MEMORY", "STATE", "START", "AGE", "REQUESTER")
SORTS: dict[str, Callable[[Values], Any]] = {
    "age": lambda machine: machine["phases"][:1], "user": lambda machine: machine["user"], "cpus": lambda machine: -machine["cpus"],
}  # fmt: skip


def top(args: Args, runtime: Runtime) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_watch(args, runtime))


async def _watch(args: Args, runtime: Runtime) -> None:
    host, changed, console = host_of(args, runtime), asyncio.Event(), Console()
    is_table = args.format == "table"
    is_once = args.once or (is_table and not console.is_terminal)

    async def change() -> None:
        """Return when there is a new picture to show: where ages are shown, after a while."""
        await at_most(REFRESH if is_table and host.is_read else None, changed.wait())
        changed.clear()

    async def pictures() -> None:
        while not host.is_read:
            await change()
        with Live(console=console, screen=not is_once, auto_refresh=False) if is_table else nullcontext() as live:
            while True:
                values = view(host.nodes(), is_trusted=True)
                if live is not None:
                    live.update(screen(values, args.sort, console.height), refresh=True)
                else:
                    print(as_json(values, indent=2 if is_once else None), flush=True)
                if is_once:
                    return
                await asyncio.sleep(LEAST)
                await change()

    await first_of(host.watch(changed.set), pictures())


def screen(values: Values, order: str, height: int) -> Group:
    """The whole picture. Text of guests and users steers no terminal."""
    totals, failures = values["totals"], values["causes"][:3]
    states = ", ".join(f"{count} {state}" for state, count in sorted(totals["states"].items()))
    head = Text.assemble(
        ("belljar ", "bold"), (str(totals["live"]), "bold green"), f" machines{f' ({states})' if states else ''}, {totals['cpus']} cpus, "
        f"{size(totals['memory'])};  24 h: {totals['machines']} ended, ", (f"{totals['failed']} failed", "red" if totals["failed"] else ""),
    )  # fmt: skip
    paths = [f"{path['path']} {duration(path['p50'])} (99 %: {duration(path['p99'])})" for path in values["starts"]]
    table = Table(*HEADS, box=None, pad_edge=False, expand=True, header_style="bold reverse")
    for column in table.columns:
        column.no_wrap = True
    live = sorted((row for row in values["machines"] if row["ended"] is None), key=SORTS[order])
    ended = (row for row in values["machines"] if row["ended"] is not None)
    for machine in [*live, *ended][: max(height - len(failures) - 4, 1)]:
        has_failed = machine["state"] in ("failed", "abandoned")
        style = "red" if has_failed else "dim" if machine["ended"] else ""
        table.add_row(*(Text(plain(word)) for word in _row(machine)), style=style)
    words = [f"{item['count']:>6} {plain(item['cause'])} -> {plain(item['hint'])}" for item in failures]
    hints = [Text(line, "red", no_wrap=True, overflow="ellipsis") for line in words]
    return Group(head, Text(f"median start: {', '.join(paths) or 'none yet'}"), table, *hints)


def _row(machine: Values) -> tuple[str, ...]:
    end, phases = machine["ended"] or time.time(), machine["phases"]
    begin = phases[0][1] if phases else end
    ran = next((moment - begin for name, moment in phases if name.startswith("run")), None)
    return (
        machine["name"] or machine["id"], machine["user"], machine["image"], str(machine["cpus"]), size(machine["memory"]),
        machine["cause"] or machine["state"], "" if ran is None else f"{duration(ran)} {machine['start']}",
        duration(max(end - begin, 0.0)), machine["requester"],
    )  # fmt: skip


ROWS = f"""
# top | Watch the machines of this host: their phases, how fast they start, what fails and what to do. Until interrupted; once where
| the output is not a terminal.
--once | show it once
--sort {{{",".join(SORTS)}}} =age | what decides the order
{SEEN}
--format {{table,json}} =table | json: a line for each change, or with --once one value"""
VERBS = acts(ROWS, globals())
