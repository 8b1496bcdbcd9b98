"""What machines took, added up by user, image, cause, node or day: as rows, as CSV, as a plot. Memory grows with the groups alone."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from belljar.errors import BadOption, CommandMissing
from belljar.host.files import named_when_whole, no_space_as_error
from belljar.monitor.outcomes import Ended
from belljar.records import dataclass

BY: Mapping[str, Callable[[Ended], str]] = {
    "user": lambda ended: ended.user,
    "image": lambda ended: ended.image,
    "cause": lambda ended: ended.cause,
    "node": lambda ended: ended.node,
    "day": lambda ended: time.strftime("%Y-%m-%d", time.localtime(ended.ended)),
}
MOST_BARS = 40
FORMS = ("png", "svg")


@dataclass
class Group:
    """What the machines of one user, image, ... add up to, in seconds."""

    name: str
    machines: int = 0
    failed: int = 0
    wall: float = 0.0
    payload: float = 0.0
    overhead: float = 0.0  # wall, but for the payload's own time
    payload_cpu: float = 0.0  # processor time that guests told of their payloads
    host_cpu: float = 0.0  # and that machines took on the host, guests included
    started: int = 0  # with a payload that began
    ready: float = 0.0
    ready_longest: float = 0.0

    def add(self, ended: Ended) -> None:
        self.machines += 1
        self.failed += ended.has_failed
        self.wall += ended.wall
        self.payload += ended.run
        self.overhead += ended.overhead
        self.payload_cpu += ended.guest_cpu
        self.host_cpu += ended.host_cpu
        if "run" in ended.phases:
            self.started += 1
            self.ready += ended.until_ready
            self.ready_longest = max(self.ready_longest, ended.until_ready)

    @property
    def ready_mean(self) -> float:
        """Seconds from the request to the payload's first moment."""
        return self.ready / self.started if self.started else 0.0


COLUMNS = (
    "machines", "failed", "wall", "payload", "overhead", "payload_cpu", "host_cpu", "ready_mean", "ready_longest",
)  # fmt: skip


def report(rows: Iterable[Ended], by: str) -> list[Group]:
    """A group for each value there is: days by their order, else what took most time first."""
    groups, key = dict[str, Group](), BY[by]
    for ended in rows:
        name = key(ended)
        groups.setdefault(name, Group(name)).add(ended)
    if by == "day":
        return sorted(groups.values(), key=lambda group: group.name)
    return sorted(groups.values(), key=lambda group: (-group.wall, group.name))


def values(group: Group) -> dict[str, int | float]:
    """Counts, and seconds to the millisecond."""
    return {name: round(getattr(group, name), 3) for name in COLUMNS}


def as_csv(groups: Sequence[Group], by: str) -> str:
    """One line for each group, and a head."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((by, *COLUMNS))
    writer.writerows((group.name, *values(group).values()) for group in groups)
    return text.getvalue()


def plot(groups: Sequence[Group], by: str, path: Path) -> None:
    """Hours of payloads and of the machines around them, and how many machines ended well: PNG or SVG, by the file's name. Of more
    groups than fit the first are shown, of days the last. Raises BadOption, CommandMissing, NoSpace."""
    if (form := path.suffix[1:]) not in FORMS:
        raise BadOption(f"--plot {path}: neither PNG nor SVG", hint="Give a name that ends in .png or .svg.")
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        hint = "In a checkout: `make install EXTRAS=plots`, or `pip install '.[plots]'`."
        raise CommandMissing("--plot: the library matplotlib is not installed", hint=hint) from exc
    shown = groups[-MOST_BARS:] if by == "day" else groups[:MOST_BARS][::-1]
    names = [group.name or "(none)" for group in shown]
    figure = Figure(figsize=(11, 1.5 + 0.3 * max(len(shown), 3)), layout="constrained")
    hours, machines = figure.subplots(1, 2, sharey=True)
    payload = [group.payload / 3600 for group in shown]
    hours.barh(names, payload, label="payloads", color="#2b6cb0")
    hours.barh(names, [group.overhead / 3600 for group in shown], left=payload, label="their machines", color="#dd8833")
    ended_well = [group.machines - group.failed for group in shown]
    machines.barh(names, ended_well, label="ended well", color="#2f855a")
    machines.barh(names, [group.failed for group in shown], left=ended_well, label="failed", color="#c53030")
    hours.set(xlabel="hours", ylabel=by)
    machines.set(xlabel="machines", xlim=(0, None))
    for axes in (hours, machines):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    with no_space_as_error(path), named_when_whole(path) as descriptor, open(descriptor, "wb", closefd=False) as file:
        figure.savefig(file, format=form, dpi=120)
