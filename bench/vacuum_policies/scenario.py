"""What is simulated: factories, experiments and what befalls them, from a TOML file. All its mistakes are told at once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BadSetting
from belljar.host.toml import Mistake
from belljar.host.values import duration
from belljar.model import setting
from belljar.records import dataclass
from belljar.service.tables import Key, Wrong, blame, keys_of, read_values
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
    kills: float = setting(0.0, "of each factory in a day: machines that their host ends")
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


KINDS = {"simulation": (Course,), "factories": (Factories,), "experiment": (Queue,)}
NAMED = ("factories", "experiment")


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
    tables, values = read_values([path], {kind: keys(kind) for kind in KINDS}, NAMED, mistakes)
    factories = [Factories(**given) for name, given in values.items() if name.startswith("factories.")]
    experiments = [_experiment(name, given) for name, given in values.items() if name.startswith("experiment.")]
    blame(path, tables, _wrongs(factories, experiments), mistakes)
    for kind, there in (("factories", factories), ("experiment", experiments)):
        if not there and not mistakes:
            mistakes.append(Mistake(str(path), "", f"no [{kind}.NAME]", "a simulation has at least one"))
    if mistakes:
        raise BadSetting("\n".join(map(str, mistakes)), hint="docs/develop/simulator.md shows a scenario.")
    return Scenario(path.stem, Course(**values["simulation"]), tuple(factories), tuple(experiments))


def keys(kind: str) -> dict[str, Key]:
    """What may stand in a table of this kind."""
    found = keys_of(KINDS[kind], kind)
    if kind == "experiment":
        found = found | {name: key for name, key in keys_of((MachineType,), kind).items() if name in OF_A_TYPE}
    return found


def _experiment(name: str, given: Mapping[str, Any]) -> Experiment:
    of_type = {key: value for key, value in given.items() if key in OF_A_TYPE}
    queue = Queue(**{key: value for key, value in given.items() if key not in of_type})
    return Experiment(MachineType(name.partition(".")[2], **of_type), queue, tuple(map(_span, queue.dry)))


def _span(text: str) -> tuple[float, float]:
    """From when until when; nothing where it is not written so."""
    begin, _, end = text.partition("-")
    with suppress(ValueError):
        return duration(begin), duration(end)
    return 0.0, 0.0


def _wrongs(factories: list[Factories], experiments: list[Experiment]) -> Iterator[tuple[str, Wrong]]:
    for one in experiments:
        name, least = f"experiment.{one.kind.name}", one.kind.min_processors
        if least > one.kind.max_processors:
            yield name, ("max_processors", f"less than the {least} of min_processors", "give it, too")
        if any(begin >= end for begin, end in one.dry):
            yield name, ("dry", f"{', '.join(one.queue.dry)}: no time that ends after it begins", "as in 6h-9h")
    if sum(one.count for one in factories) > MOST_FACTORIES:
        yield "factories", ("count", "too many", f"at most {MOST_FACTORIES} together")
