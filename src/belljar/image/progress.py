"""Say what is going on, on stderr: to a person at a terminal, or to a log.

`shown` is for verbs that work on images. `begin_and_end` is for what a job waits for: stderr is then the payload's, and gets
these two lines only where a person watches, or asked for them by -v.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, Protocol

SOON = 1.0  # seconds; what ends before is not worth a line


class Progress(Protocol):
    """Gets the steps of something that takes long."""

    def step(self, text: str) -> None:
        """Something new begins."""

    def amount(self, done: int, total: int | None) -> None:
        """So many bytes of the current step are done."""


class Silent:
    """Shows nothing."""

    def step(self, text: str) -> None: ...
    def amount(self, done: int, total: int | None) -> None: ...


class Lines:
    """One line per step: for logs and pipes."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self.out = out or sys.stderr

    def step(self, text: str) -> None:
        print(f"belljar: {text}", file=self.out, flush=True)

    def amount(self, done: int, total: int | None) -> None: ...


class Screen:
    """A moving line at a terminal, drawn by rich."""

    def __init__(self, bars: Any) -> None:
        self.bars = bars
        self.task: Any = None

    def step(self, text: str) -> None:
        if self.task is not None:
            self.bars.update(self.task, visible=False)
        self.task = self.bars.add_task(text, total=None)

    def amount(self, done: int, total: int | None) -> None:
        if self.task is not None:
            self.bars.update(self.task, completed=done, total=total)


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
        yield Silent()
        return
    if not is_terminal:
        yield Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        """How much of it is done, where that is known."""

        def render(self, task: Any) -> Any:
            return Text(f"{task.percentage:.0f}% of ").append(super().render(task)) if task.total else ""

    console = Console(stderr=True)
    if console.is_dumb_terminal:  # it cannot go back in a line
        yield Lines()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        Bytes(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        yield Screen(bars)
