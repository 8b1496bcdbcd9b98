"""A page of docs/ followed as a newcomer follows it: its commands in their order, as they stand there.

A fence `sh` is run, as root in the checkout or, in a section whose title says "as an ordinary user", as that user in its
home. A fence `text` right after one is what it prints: `...` stands for anything, alone on a line for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

AS_USER = "as an ordinary user"


@dataclass(frozen=True)
class Step:
    """One fence with commands."""

    commands: str
    as_user: bool
    expected: str | None


def steps(page: str) -> Iterator[Step]:
    as_user = False
    fences = re.compile(
        r"^(## [^\n]*)$|^```sh\n(.*?)^```\n(?:(?:(?!^## |^```).)*?^```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
    )
    for match in fences.finditer(page):
        if match[1]:
            as_user = AS_USER in match[1]
        else:
            yield Step(match[2], as_user, match[3])


def fits(expected: str, printed: str) -> bool:
    """Does what was printed end with what the page says?"""
    parts = [
        "(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
        for line in expected.splitlines()
    ]
    return re.search(rf"(?m)^{''.join(parts)}\Z", printed) is not None


def follow(path: Path, run: Callable[[str, bool], str]) -> list[str]:
    """Run each step by *run* (commands, as the user), which returns what both streams said. Returns the transcript."""
    told = []
    for step in steps(path.read_text()):
        printed = run(step.commands, step.as_user)
        told.append(f"$ {step.commands}{printed}")
        if step.expected is not None and not fits(step.expected, printed):
            raise AssertionError(f"the page says\n{step.expected}\nafter\n{step.commands}\nbut it was\n{printed}")
    return told
