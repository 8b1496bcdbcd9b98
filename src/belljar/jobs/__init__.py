"""What a batch job, or a detached machine, is on this host: between the keeper of machines and the programs.

    wrap.py      in place of a job's script: without a machine, or in one, and out again as the system wants it
    batch/       of batch jobs alone: their checkpoints, output and end, prolog and epilog
    site/        what a site asks of this host                      node.py     this node in its system; the self-check
    reap.py      what dead supervisors left, and orphans            users.py    root among the users of a node
    attend.py    signals, streams and the clock of who keeps        starting.py what comes before a machine: the request, limits

No words of the command line are read here. The parts of belljar are handed in, as a `Runtime`. What is said on stderr beside
a job's own words is one line and a hint.
"""

from __future__ import annotations

import sys
from contextlib import suppress

from belljar.hints import TYPE_CHECKING

if TYPE_CHECKING:
    from belljar.assembly import Runtime as Runtime
    from belljar.model import Outcome
else:
    Runtime = object  # every part of belljar, as it is handed in: here it is only ever an annotation


def plain(text: str, also: str = "") -> str:
    """*text* without what could steer a terminal, but for the characters of *also*: names, reasons and logs may come from a guest."""
    return "".join(char if char.isprintable() or char in also else repr(char)[1:-1] for char in text)


def size(count: int) -> str:
    """About so many bytes, for people."""
    power = min((max(count, 1).bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}" if power else f"{count} B"


def complain(message: str, hint: str = "") -> None:
    """Say on stderr what went wrong and what to do next."""
    with suppress(OSError):  # where nothing can be told, the exit code still tells
        for text in message.splitlines() or [""]:
            print(f"belljar: {plain(text)}", file=sys.stderr)
        if hint:
            print(f"hint: {plain(hint)}", file=sys.stderr)


def tell_troubles(outcome: Outcome) -> None:
    """Report what went wrong while the machine was cleared away. The payload's own end stays as it is."""
    if outcome.troubles:
        hint = "`belljar reap` finishes it, once what is named there is mended."
        complain(f"{outcome.id}: its machine could not be cleared away completely: {'; '.join(outcome.troubles)}", hint)
