"""What all errors have in common."""

from __future__ import annotations

import errno
import re
from enum import Enum

from belljar.model import Cause

OUR_FAILURE = 125


def about(hint: str, machine: str) -> str:
    """A hint with its ID filled in, as in `belljar logs ID`."""
    return hint if " ID" not in hint else re.sub("(`belljar [a-z]+ )ID\\b", lambda found: f"{found[1]}{machine}", hint)


def in_words(exc: OSError) -> str:
    """What the system refused, with the file where it is known."""
    words = f"{exc.filename}: {exc.strerror}" if exc.filename else str(exc)
    return f"{words}: raise the limit on them (`ulimit -n`)" if exc.errno == errno.EMFILE else words


class Retry(Enum):
    """May the same request be tried again?"""

    NEVER = "never"  # the request must change first
    LATER = "later"  # the same host may do it next time
    ELSEWHERE = "elsewhere"  # another host may do it


class BelljarError(Exception):
    """Something belljar could not do. `message` is one line; `hint` is the next step for the reader."""

    hint = "See `belljar logs ID` and `belljar doctor`."
    exit_code = OUR_FAILURE
    retry = Retry.LATER
    cause = Cause.NODE_FAULT

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint

    def __str__(self) -> str:
        return self.message
