"""What is simulated: factories, experiments and what befalls them, from a TOML file. All its mistakes are told at once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from belljar.errors import BadSetting
from belljar.host.toml import Mistake, meant, place, read
from belljar.host.values import convert, duration
from belljar.model import setting
from belljar.records import dataclass, fields
from belljar.vacuum import MachineType, Mode, Space

MOST_FACTORIES = 5000
OF_A_TYPE = (
    "share", "group", "min_processors", "max_processors", "min_wallclock", "max_wallclock", "memory", "disk", "backoff", "fizzle",
)  # fmt: skip


@dataclass(frozen=True)
class Course:
    """`[simulation]`: how long, and how the space works."""

    lasts: float = setting(86400.0, "simulated time", unit="seconds", minimum=60)
    settles: float = setting(10800.0, "shares are judged so long after work began or ended", unit="seconds")
    sample: float = setting(600.0, "between two looks", unit="seconds", minimum=1)
    seed: int = setting(1, "another one is another course of chance")
    superslot: int = setting(1, "processors_per_superslot of all factories", minimum=1)
    history: float = setting(0.0, "as in vacuum.toml", unit="seconds")
    reserve: float = setting(0.25, "as in vacuum.toml", maximum=1)
    cycle: float = setting(60.0, "as in vacuum.toml", unit="seconds", minimum=1)
    loss: float = setting(0.0, "part of all packets that is lost", maximum=0.9)
    failures: float = setting(0.0, "of each factory, in a day")
    failure_lasts: float = setting(3600.0, "on average", unit="seconds", minimum=1)
    machines_lost: bool = setting(True, "the machines end with their factory; false: it only falls silent")


@dataclass(frozen=True)
class Factories:
    """`[factories.NAME]`: some that are alike."""

    count: int = setting(1, "how many", minimum=1, maximum=MOST_FACTORIES)
    processors: int = setting(16, "of each", minimum=1, maximum=1024)
    memory: int | None = setting(None, "of each, for machines; empty: not limited", unit="bytes", minimum=1)
    disk: int | None = setting(None, "of each, for machines; empty: not limited", unit="bytes", minimum=1)


@dataclass(frozen=True)
class Queue:
    """`[experiment.NAME]`, beside the keys of its machinetype: what its machines find."""

    boot: float = setting(60.0, "from the start of a machine until it asks for work", unit="seconds")
    asks: float = setting(60.0, "so long a machine asks before it ends, where there is no work", unit="seconds")
    length: float = setting(21600.0, "of a job, half of all are shorter", unit="seconds", minimum=1)
    spread: float = setting(0.5, "of the logarithm of the length; 0: all are as long", maximum=3)
    jobs: int = setting(0, "that a machine runs, one after the other; 0: as long as there is time for one more")
    dry: tuple[str, ...] = setting((), "times without work, as in 6h-9h")


@dataclass(frozen=True)
class Experiment:
    """A machinetype and its work."""

    kind: MachineType
    queue: Queue
    dry: tuple[tuple[float, float], ...]

    def has_work(self, now: float) -> bool:
        return not any(begin <= now < end for begin, end in self.dry)

    def job(self, dice: random.Random) -> float:
        """Seconds that the next job takes."""
        return self.queue.length * (dice.lognormvariate(0.0, self.queue.spread) if self.queue.spread else 1.0)


@dataclass(frozen=True)
class Scenario:
    """All that a simulation begins with."""

    name: str
    course: Course
    factories: tuple[Factories, ...]
    experiments: tuple[Experiment, ...]

    def space(self, mode: Mode) -> Space:
        """As its factories see it, but for their own name and size."""
        names = tuple(f"f{number}" for number in range(sum(one.count for one in self.factories)))
        course = self.course
        return Space(
            self.name, names[0], names, tuple(one.kind for one in self.experiments), mode=mode, history=course.history,
            reserve=course.reserve, cycle=course.cycle, processors_per_superslot=course.superslot,
        )  # fmt: skip


def load(path: Path) -> Scenario:
    """Raises BadSetting with every mistake there is."""
    mistakes: list[Mistake] = []
    text, content = read(path, mistakes)
    reading = _Reading(path, text, mistakes)
    course = reading.record(Course, "simulation", content.pop("simulation", {}))
    factories = [reading.record(Factories, *one) for one in reading.tables(content, "factories")]
    experiments = [reading.experiment(*one) for one in reading.tables(content, "experiment")]
    for section in content:
        reading.wrong(section, "", "no such section", meant(section, ("simulation", "factories", "experiment")))
    for section, found in (("factories", factories), ("experiment", experiments)):
        if not found and not mistakes:
            reading.wrong("", "", f"no [{section}.NAME]", "a simulation has at least one")
    if sum(one.count for one in factories) > MOST_FACTORIES:
        reading.wrong("factories", "", "too many", f"at most {MOST_FACTORIES} together")
    if mistakes:
        raise BadSetting("\n".join(map(str, mistakes)), hint="docs/vacuum/simulator.md shows a scenario.")
    return Scenario(path.stem, course, tuple(factories), tuple(experiments))


class _Reading:
    """A file that is read, and its mistakes."""

    def __init__(self, path: Path, text: str, mistakes: list[Mistake]) -> None:
        self.path, self.text, self.mistakes = path, text, mistakes

    def wrong(self, section: str, key: str, what: str, hint: str = "") -> None:
        name = ".".join(filter(None, (section, key)))
        self.mistakes.append(Mistake(place(self.path, self.text, section, key), name, what, hint))

    def tables(self, content: dict[str, Any], section: str) -> list[tuple[str, object]]:
        found = content.pop(section, {})
        if isinstance(found, Mapping) and all(isinstance(one, Mapping) for one in found.values()):
            return [(f"{section}.{name}", table) for name, table in found.items()]
        self.wrong(section, "", "no table of tables", f"write [{section}.NAME]")
        return []

    def record(self, kind: type[Any], section: str, table: object) -> Any:
        return kind(**self.values(section, table, {one.name: (one, hint) for one, hint in _keys(kind)}))

    def experiment(self, section: str, table: object) -> Experiment:
        queue_keys = {one.name: (one, hint) for one, hint in _keys(Queue)}
        type_keys = {one.name: (one, hint) for one, hint in _keys(MachineType) if one.name in OF_A_TYPE}
        values = self.values(section, table, type_keys | queue_keys)
        queue = Queue(**{key: value for key, value in values.items() if key in queue_keys})
        name = section.partition(".")[2]
        kind = MachineType(name, **{key: value for key, value in values.items() if key in type_keys})
        if kind.min_processors > kind.max_processors:
            self.wrong(section, "max_processors", f"less than the {kind.min_processors} of min_processors")
        return Experiment(kind, queue, tuple(self.span(section, one) for one in queue.dry))

    def values(self, section: str, table: object, known: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        values = {}
        if not isinstance(table, Mapping):
            self.wrong(section, "", "is a section", f"write [{section}] on a line of its own")
            return {}
        for key, raw in table.items():
            if key not in known:
                self.wrong(section, key, "no such key", meant(key, known))
                continue
            one, hint = known[key]
            try:
                values[key] = convert(raw, hint, one.metadata, is_text=False)
            except ValueError as exc:
                self.wrong(section, key, str(exc), one.metadata["help"])
        return values

    def span(self, section: str, text: str) -> tuple[float, float]:
        begin, _, end = text.partition("-")
        try:
            found = duration(begin), duration(end)
        except ValueError as exc:
            self.wrong(section, "dry", str(exc), "as in 6h-9h")
            return 0.0, 0.0
        if found[0] >= found[1]:
            self.wrong(section, "dry", f"{text}: ends before it begins", "as in 6h-9h")
        return found


def _keys(kind: type[Any]) -> list[tuple[Any, Any]]:
    """The fields that are keys, with their types."""
    hints = get_type_hints(kind)
    return [(one, hints[one.name]) for one in fields(kind) if one.metadata.get("help")]
