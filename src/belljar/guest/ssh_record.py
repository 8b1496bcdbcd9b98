"""What a guest's script wrote down about a payload's end, read without trust."""

from __future__ import annotations

import os
import re
import signal

from belljar.errors import AgentLost
from belljar.guest import ExitStatus
from belljar.model import Usage

ERRORS = {
    "not-found": "not found in the guest", "not-executable": "cannot be executed in the guest",
    "no-cwd": "the folder to work in cannot be entered",
}  # fmt: skip
CLOCK = re.compile(r"(\d{1,9})m(\d{1,2}(?:\.\d+)?)s")
DIED = re.compile(r"terminated by signal (\d{1,3})")
FIRST_BY_SIGNAL = 128
# Other words than this host's C library has, of busybox or other shells.
WORDS = {(signal.strsignal(one) or "").lower(): int(one) for one in signal.Signals} | {
    "user defined signal 1": 10, "user defined signal 2": 12, "alarm clock": 14, "terminated": 15, "killed": 9,
    "cpu time limit exceeded": 24, "file size limit exceeded": 25,
}  # fmt: skip


def read_record(record: bytes, error: str, names: dict[str, str]) -> ExitStatus:
    """The end of a payload. *error*: what its last script could not do; *names*: with what, by the kind
    of error. Raises AgentLost for what is no record."""
    rows = [line.split() for line in record.decode("ascii", "replace").splitlines() if line.strip()]
    try:
        code, number, has_core, usage = _how(rows[0], rows[1:])
    except (ValueError, IndexError, OverflowError) as exc:
        raise AgentLost(f"the guest's record of the payload's end makes no sense: {record[:80]!r}") from exc
    if error in ERRORS and number is None:
        return ExitStatus(
            code, None, False, usage, False, error, f"{names.get(error, names.get('', ''))}: {ERRORS[error]}"
        )
    peak = next((int(row[1]) for row in rows[1:] if row[0] == "peak" and len(row) == 2 and row[1].isdecimal()), 0)
    is_oom = any(row[0] == "oom" for row in rows[1:])
    return ExitStatus(code, number, has_core, Usage(usage.user, usage.system, peak), is_oom)


def _how(first: list[str], rest: list[list[str]]) -> tuple[int | None, int | None, bool, Usage]:
    kind, value = first[0], int(first[1])
    if not 0 <= value <= 0xFFFF:
        raise ValueError("out of range")
    if kind == "wait":
        usage = Usage(_seconds(first[2]), _seconds(first[3]))
        if os.WIFSIGNALED(value):
            return None, os.WTERMSIG(value), os.WCOREDUMP(value), usage
        return os.WEXITSTATUS(value), None, False, usage
    if kind == "shell":
        said = " ".join(first[2:])
        words = re.sub(r"^\[\d+\][+-]?\s*", "", said).lower()
        number = next(
            (WORDS[name] for name in sorted(WORDS, key=len, reverse=True) if name and words.startswith(name)), None
        )
        if number is not None and value != FIRST_BY_SIGNAL + number:
            number = None
        return None if number else value, number, number is not None and "core dumped" in said, _clocks(rest)
    if kind == "time":
        words = next((" ".join(row) for row in rest if row[0] == "Command"), "")
        found = DIED.search(words)
        times = next((row for row in rest if len(row) == 3 and row[0].isdecimal()), None)
        usage = Usage() if times is None else Usage(_seconds(times[1]), _seconds(times[2]))
        return (None, int(found[1]), False, usage) if found else (value, None, False, usage)
    if kind == "plain":
        by_signal = value > FIRST_BY_SIGNAL and value - FIRST_BY_SIGNAL in set(signal.Signals)
        return (None, value - FIRST_BY_SIGNAL, False, Usage()) if by_signal else (value, None, False, Usage())
    raise ValueError(kind)


def _seconds(word: str) -> float:
    value = float(word)
    if not 0 <= value < 1e9:
        raise ValueError(word)
    return value


def _clocks(rows: list[list[str]]) -> Usage:
    """The last line of a shell's `times`: user and system of what it waited for."""
    for row in rows:
        found = [CLOCK.fullmatch(word) for word in row]
        if len(found) == 2 and found[0] and found[1]:
            user, system = (int(one[1]) * 60 + float(one[2]) for one in found if one)
            return Usage(user, system)
    return Usage()
