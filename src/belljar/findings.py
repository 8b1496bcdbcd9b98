"""What a check found, and what to do about it: one value for `doctor`, `batch check` and `bait check`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from belljar.errors import BelljarError, HostError
from belljar.records import dataclass


class Grade(str, Enum):
    OK = "ok"
    WARN = "warn"  # it works, but something is slow, tight or impossible
    FAIL = "fail"  # it does not work


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing. Only what is not ok has a remedy."""

    name: str
    grade: Grade
    text: str = ""
    remedy: str = ""

    @property
    def is_good(self) -> bool:
        """Not a failure: it works, perhaps with a warning."""
        return self.grade is not Grade.FAIL


def ok(name: str, text: str = "") -> Finding:
    return Finding(name, Grade.OK, text)


def warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Grade.WARN, text, remedy)


def fail(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Grade.FAIL, text, remedy)


def expect(name: str, is_good: bool, text: str = "", remedy: str = "") -> Finding:
    return ok(name, text) if is_good else fail(name, text, remedy)


def fail_if(name: str, wrong: str, remedy: str) -> Finding:
    """*wrong*: what is wrong, or nothing."""
    return expect(name, not wrong, wrong, remedy)


def examine(name: str, look: Callable[[], Finding]) -> Finding:
    """Look. A check that breaks is a failed one."""
    try:
        return look()
    except BelljarError as exc:
        return fail(name, exc.message, "" if exc.hint == HostError.hint else exc.hint)  # that hint is to ask doctor
    except Exception as exc:  # whatever this host does to one check, the others are made
        text = f"the check broke: {type(exc).__name__}: {exc}"
        return fail(name, text, "This is a defect of belljar or of the host.")
