"""What is said on stderr beside a job's own words: one line, and a hint."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from belljar.model import Outcome


def plain(text: str) -> str:
    """*text* without what could steer a terminal: names, reasons and logs may come from a guest."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def size(count: int) -> str:
    """About so many bytes, for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if unit != "B" else f"{count} B"
        amount /= 1024
    return f"{amount:.3g} TiB"


def complain(message: str, hint: str) -> None:
    """Say on stderr what went wrong and what to do next."""
    with suppress(OSError):  # where nothing can be told, the exit code still tells
        for text in message.splitlines() or [""]:
            print(f"belljar: {plain(text)}", file=sys.stderr)
        if hint:
            print(f"hint: {plain(hint)}", file=sys.stderr)


def tell_troubles(outcome: Outcome) -> None:
    """What went wrong with the machine when all was over: no affair of the payload's, and its end stays as it is."""
    if outcome.troubles:
        hint = "`belljar reap` finishes it, once what is named there is mended."
        complain(f"{outcome.id}: its machine could not be put away whole: {'; '.join(outcome.troubles)}", hint)
