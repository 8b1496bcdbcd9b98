"""Which live machines have outlived their jobs, judged from what the batch systems say. Pure.

Silence is no answer: a system that cannot be asked, or says what makes no sense, is never read as "the job is gone".
And one answer is not enough: a system that was just restarted may not know its jobs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from belljar.batch.job.terms import Dialect
from belljar.errors import BelljarError
from belljar.records import dataclass


@dataclass(frozen=True)
class Live:
    """A live machine of a batch job."""

    key: str  # of whoever remembers: owner and machine
    system: str
    jobs: frozenset[str]  # every id the job is known by


@dataclass(frozen=True)
class Answer:
    """What a system said: the jobs it knows here, or why that is not known."""

    living: frozenset[str] | None
    trouble: str = ""


@dataclass(frozen=True)
class Decision:
    """What is to be done, and what is to be remembered for the next time."""

    to_end: tuple[str, ...]
    waiting: tuple[str, ...]  # unknown for the first time, or not for long enough
    remembered: dict[str, float]


def ask(dialect: Dialect, run: Callable[[tuple[str, ...]], bytes]) -> Answer:
    """Ask one system. Never raises for what a system may do wrong."""
    try:
        return Answer(dialect.living(run(dialect.alive())))
    except (BelljarError, OSError, ValueError) as exc:
        return Answer(None, str(exc))


def decide(
    live: Iterable[Live], answers: Mapping[str, Answer], remembered: Mapping[str, float], now: float, gone_after: float
) -> Decision:
    """*remembered*: when a machine's job was first not known, on a clock that nobody sets. A machine that is known again
    is forgotten, and so is one that is gone."""
    to_end, waiting, kept = [], [], {}
    for one in live:
        known = answers.get(one.system, Answer(None)).living
        if known is None:
            if one.key in remembered:
                kept[one.key] = remembered[one.key]
            continue
        if one.jobs & known:
            continue
        since = min(remembered.get(one.key, now), now)
        kept[one.key] = since
        if one.key in remembered and now - since >= gone_after:
            to_end.append(one.key)
        else:
            waiting.append(one.key)
    return Decision(tuple(to_end), tuple(waiting), kept)
