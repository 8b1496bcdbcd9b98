"""What machines took, added up by user, image, cause, node or day, and drawn. Memory grows with the groups alone."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from belljar.errors import BadOption, CommandMissing
from belljar.host.files import named_when_whole, no_space_as_error
from belljar.monitor import Machine

BY: Mapping[str, Callable[[Machine], str]] = {
    **{name: attrgetter(name) for name in ("user", "image", "cause", "node")},
    "day": lambda ended: time.strftime("%Y-%m-%d", time.localtime(ended.ended)),
}
MOST_BARS = 40


def report(rows: Iterable[Machine], by: str) -> list[dict[str, Any]]:
    """A group for each value there is, with its sums, and the mean and the longest time to the payload's first moment: days by their
    order, else what took most time first."""
    groups, longest = (
        defaultdict[str, defaultdict[str, float]](lambda: defaultdict(int)),
        defaultdict[str, float](float),
    )
    for ended in rows:
        name, sums = BY[by](ended), ended.sums()
        longest[name] = max(longest[name], sums["ready"])
        for column, number in sums.items():
            groups[name][column] += number
    ordered = sorted(groups.items(), key=lambda item: item[0] if by == "day" else (-item[1]["wall"], item[0]))
    for name, group in ordered:
        group |= {"ready_mean": group.pop("ready") / max(group["started"], 1), "ready_longest": longest[name]}
    return [{by: name, **{column: round(sum, 3) for column, sum in group.items()}} for name, group in ordered]


def plot(groups: Sequence[Mapping[str, Any]], by: str, path: Path) -> None:
    """Hours of payloads and of the machines around them, and how many machines ended well: PNG or SVG, by the file's name. Of more
    groups than fit the first are shown, of days the last. Raises BadOption, CommandMissing, NoSpace."""
    if (form := path.suffix[1:]) not in ("png", "svg"):
        raise BadOption(f"--plot {path}: neither PNG nor SVG", hint="Give a name that ends in .png or .svg.")
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        hint = "In a checkout: `make install EXTRAS=plots`, or `pip install '.[plots]'`."
        raise CommandMissing("--plot: the library matplotlib is not installed", hint=hint) from exc
    shown = groups[-MOST_BARS:] if by == "day" else groups[:MOST_BARS][::-1]
    names = [group[by] or "(none)" for group in shown]
    figure = Figure(figsize=(11, 1.5 + 0.3 * max(len(shown), 3)), layout="constrained")
    hours, machines = figure.subplots(1, 2, sharey=True)
    hours.barh(names, [group["wall"] / 3600 for group in shown], label="their machines", color="#dd8833")
    hours.barh(names, [group["payload"] / 3600 for group in shown], label="payloads", color="#2b6cb0")
    machines.barh(names, [group["machines"] for group in shown], label="ended well", color="#2f855a")
    machines.barh(names, [group["failed"] for group in shown], label="failed", color="#c53030")
    for axes, unit in ((hours, "hours"), (machines, "machines")):
        axes.set(xlabel=unit, xlim=(0, None))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    with no_space_as_error(path), named_when_whole(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
        figure.savefig(file, format=form, dpi=120)
