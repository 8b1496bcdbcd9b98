"""What is counted while a space is simulated, and what is told of it at the end."""

from __future__ import annotations

from bench.vacuum_policies.scenario import Experiment, Scenario

from belljar.records import dataclass
from belljar.vacuum import Mode


@dataclass(frozen=True)
class TypeReport:
    """One type. Parts are of all processors that machines have; a look counts when work began and ended long enough before."""

    machinetype: str
    target: float  # its part by the shares of those that have work, on average
    part: float  # that it had, on average
    worst: float  # largest difference at one look, with its sign
    starts: int
    wasted: int  # machines that found no work

    @property
    def drift(self) -> float:
        return self.part - self.target


@dataclass(frozen=True)
class Look:
    """One moment: parts of the processors, by type where there are several."""

    at: float
    idle: float
    parts: tuple[float, ...]
    targets: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """One run in one mode."""

    scenario: str
    mode: Mode
    lasts: float
    factories: int
    idle: float  # part of all processor time that no machine had
    useless: float  # part of it that machines had which found no work
    worst_share: float  # largest difference of a type's part from its target, of all looks that count
    worst_drift: float  # and of its average
    starts: int
    wasted: int
    decisions: int
    messages_per_minute: float
    types: tuple[TypeReport, ...]
    looks: tuple[Look, ...]


class Tally:
    """Counts as it goes."""

    def __init__(self, scenario: Scenario, mode: Mode, processors: int) -> None:
        self.scenario, self.mode = scenario, mode
        self.processors, self.used = processors, [0 for _ in scenario.experiments]
        self.starts, self.wasted = [0 for _ in self.used], [0 for _ in self.used]
        self.decisions, self.messages = 0, 0.0
        self.now = self.time = self.busy = self.useless = 0.0
        self.looks: list[Look] = []
        changes = {moment for one in scenario.experiments for span in one.dry for moment in span}
        self.changes = sorted({0.0} | changes)

    def pass_to(self, now: float) -> None:
        self.busy += sum(self.used) * (now - self.now)
        self.time += self.processors * (now - self.now)
        self.now = now

    def begin(self, now: float, type_: int, processors: int, ends: float, found_work: bool) -> None:
        self.pass_to(now)
        self.used[type_] += processors
        self.starts[type_] += 1
        if not found_work:
            self.wasted[type_] += 1
            self.useless += processors * (ends - now)

    def end(self, now: float, type_: int, processors: int) -> None:
        self.pass_to(now)
        self.used[type_] -= processors

    def capacity(self, now: float, processors: int) -> None:
        self.pass_to(now)
        self.processors += processors

    def look(self, now: float) -> None:
        used, whole = sum(self.used), max(1, self.processors)
        parts = tuple(one / used if used else 0.0 for one in self.used)
        self.looks.append(Look(now, 1.0 - used / whole, parts, targets(self.scenario.experiments, now)))

    def is_settled(self, look: Look) -> bool:
        """Did work begin or end long enough before? The beginning of all is such a change, too."""
        return all(not 0 <= look.at - change < self.scenario.course.settles for change in self.changes)

    def report(self) -> Report:
        looks = [one for one in self.looks if self.is_settled(one)]
        types = tuple(self._of_type(number, looks) for number in range(len(self.used)))
        return Report(
            self.scenario.name, self.mode, self.now, sum(one.count for one in self.scenario.factories),
            1.0 - self.busy / self.time, self.useless / self.time,
            max((abs(one.worst) for one in types), default=0.0), max((abs(one.drift) for one in types), default=0.0),
            sum(self.starts), sum(self.wasted), self.decisions, self.messages * 60.0 / self.now, types, tuple(self.looks),
        )  # fmt: skip

    def _of_type(self, number: int, looks: list[Look]) -> TypeReport:
        count = max(1, len(looks))
        differences = [one.parts[number] - one.targets[number] for one in looks]
        return TypeReport(
            self.scenario.experiments[number].kind.name,
            sum(one.targets[number] for one in looks) / count, sum(one.parts[number] for one in looks) / count,
            max(differences, key=abs, default=0.0), self.starts[number], self.wasted[number],
        )  # fmt: skip


def targets(experiments: tuple[Experiment, ...], now: float) -> tuple[float, ...]:
    """The part of each type by the shares: a group keeps its whole share while one of its types has work."""
    shares, wanting = dict[str, float](), dict[str, float]()
    for one in experiments:
        group, share = one.kind.belongs_to, one.kind.share
        shares[group] = shares.get(group, 0.0) + share
        wanting[group] = wanting.get(group, 0.0) + (share if one.has_work(now) else 0.0)
    whole = sum(shares[group] for group in shares if wanting[group])
    return tuple(
        shares[one.kind.belongs_to] / whole * one.kind.share / wanting[one.kind.belongs_to]
        if one.has_work(now) and one.kind.share
        else 0.0
        for one in experiments
    )
