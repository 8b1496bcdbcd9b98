"""Say what is going on, to a person at a terminal or to a log: on stderr, never more than one line where nobody watches.

`shown` is for verbs that work on images, whose stderr is belljar's own. `clock` is for what a job waits for: its stderr is
the payload's, and gets a word only where a person watches, or asked for it by -v.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol

TICK = 1.0  # seconds
USUAL_COLUMNS = 80


class Progress(Protocol):
    """Told by whoever does something that takes long."""

    def step(self, text: str) -> None:
        """Something new begins."""

    def amount(self, done: int, total: int | None) -> None:
        """So many bytes of the present step are done."""


class Silent:
    """For those who do not want to know."""

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


class Clock:
    """What is waited for, and for how long by now: one line at a terminal, drawn anew each second, gone at the end."""

    def __init__(self, what: str, usual: str, out: IO[str]) -> None:
        self._what, self._usual, self._out = what, usual, out
        self._loop = asyncio.get_running_loop()
        self._begin, self._is_drawn = self._loop.time(), False
        self._next = self._loop.call_later(TICK, self._tick)

    def _tick(self) -> None:
        passed = self._loop.time() - self._begin
        self._draw(f"belljar: {self._what}: {passed:.0f} s{self._usual}"[: _columns(self._out) - 1])
        self._next = self._loop.call_later(TICK, self._tick)

    def _draw(self, text: str) -> None:
        if not _in_foreground(self._out):
            return
        with suppress(OSError, ValueError):  # the terminal is gone
            self._out.write(f"\r\x1b[K{text}")
            self._out.flush()
            self._is_drawn = bool(text)

    def end(self) -> None:
        self._next.cancel()
        if self._is_drawn:
            self._draw("")


_shown: list[bool] = []  # one element while something moves at the terminal


@contextmanager
def _line_of_its_own() -> Iterator[bool]:
    """Is there nothing else that moves at the terminal? It is ours inside."""
    is_free = not _shown
    _shown.extend([True] * is_free)
    try:
        yield is_free
    finally:
        del _shown[: int(is_free)]


@contextmanager
def clock(what: str, usual: str, out: IO[str]) -> Iterator[None]:
    """Show a person at the terminal *out* what is waited for inside, for how long by now, and how long it *usual*ly takes.
    Nothing, where something else that lasts longer is shown already."""
    with _line_of_its_own() as is_free:
        shown = Clock(what, usual, out) if is_free else None
        try:
            yield
        finally:
            if shown is not None:
                shown.end()


@contextmanager
def begin_and_end(what: str, usual: str, out: IO[str]) -> Iterator[None]:
    """The same for a log: a line at the beginning, and one at the end."""
    begin = asyncio.get_running_loop().time()
    print(f"belljar: {what}{usual}", file=out, flush=True)
    yield
    print(f"belljar: {what}: {asyncio.get_running_loop().time() - begin:.0f} s", file=out, flush=True)


def _columns(out: IO[str]) -> int:
    try:
        return os.get_terminal_size(out.fileno()).columns or USUAL_COLUMNS
    except (OSError, ValueError):
        return USUAL_COLUMNS


def _in_foreground(out: IO[str]) -> bool:
    """A job in the background would be stopped for writing to some terminals."""
    try:
        return os.tcgetpgrp(out.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return True  # no terminal of the kernel's


@contextmanager
def shown() -> Iterator[Progress]:
    """Progress for whoever reads stderr."""
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
        """How much of it is done, where a step tells."""

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
    with _line_of_its_own(), Progress(*columns, console=console, transient=True) as bars:
        yield Screen(bars)
