"""Say what is going on, on stderr: to a person at a terminal, or to a log.

`shown` is for verbs that work on images. `begin_and_end` is for what a job waits for: stderr is then the payload's, and gets
these two lines only where a person watches, or asked for them by -v.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

SOON = 1.0  # seconds; what ends before is not worth a line


class Progress:
    """Gets the steps of something that takes long. This one shows nothing."""

    def step(self, text: str) -> None:
        """Something new begins."""

    def amount(self, done: int, total: int | None) -> None:
        """So many bytes of the current step are done."""


class Lines(Progress):
    """One line per step: for logs and pipes."""

    def step(self, text: str) -> None:
        print(f"belljar: {text}", file=sys.stderr, flush=True)


class Screen(Progress):
    """A moving line at a terminal, drawn by rich."""

    def __init__(self, lines: Any) -> None:
        self.lines, self.task, self.text = lines, lines.add_task("", total=None, visible=False), ""

    def step(self, text: str) -> None:
        self.text = text
        self.lines.reset(self.task, description=text, visible=True)

    def amount(self, done: int, total: int | None) -> None:
        if total:
            self.lines.update(self.task, description=f"{self.text}: {done / total:.0%} of {total / 1e6:.1f} MB")


@contextmanager
def begin_and_end(what: str, out: IO[str]) -> Iterator[None]:
    """A line where it has not ended soon, and one at its end."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    telling = loop.call_later(SOON, lambda: print(f"belljar: {what}", file=out, flush=True))
    try:
        yield
    finally:
        telling.cancel()
    if loop.time() - begin > SOON:
        print(f"belljar: {what.partition(' (')[0]}: {loop.time() - begin:.0f} s", file=out, flush=True)


@contextmanager
def shown() -> Iterator[Progress]:
    """Progress on stderr, in the form that fits it."""
    try:
        is_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # closed
        yield Progress()
        return
    if is_terminal:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:  # such a one cannot go back in a line
            text = progress.TextColumn("{task.description}", markup=False)
            columns = (progress.SpinnerColumn(), text, progress.TimeElapsedColumn())
            with progress.Progress(*columns, console=console, transient=True) as lines:
                yield Screen(lines)
            return
    yield Lines()
