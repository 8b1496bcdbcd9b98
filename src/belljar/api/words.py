"""What callers may say: options of a machine, a command, its variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from belljar.host.caller import plain_environment
from belljar.jobs.asked import Asked
from belljar.jobs.starting import environment_of
from belljar.model import Account, Container

Word = str | bytes


class Options(Asked, total=False):
    """What may be said of a machine and its payload, beside what is said of every machine; the settings decide the rest."""

    script: bytes  # copied in and run by its `#!` line; argv[0] is its name
    cwd: Word
    env: Mapping[str, str]
    inputs: Mapping[str, str]  # path here -> path in the guest
    outputs: Mapping[str, str]  # path in the guest -> path here


class Beside(TypedDict, total=False):
    """What may be said of a command beside the payload."""

    cwd: Word | None  # None: the payload's
    env: Mapping[str, str]  # beside what every payload has
    leaves: bool  # what it starts in the background goes on until the machine ends, not until the command does


def environment(
    account: Account, more: Mapping[str, str], container: Container | None
) -> tuple[tuple[bytes, bytes], ...]:
    """The user's, the container image's, and these. Raises ValueError for what cannot be a variable."""
    given = {os.fsencode(name): os.fsencode(value) for name, value in more.items()}
    env = plain_environment(account) | environment_of(container) | given
    for name, value in env.items():
        if not name or b"=" in name or b"\0" in name + value:
            raise ValueError(f"env: {name!r}={value!r} cannot be a variable")
    return tuple(env.items())


def argv_of(words: Sequence[Word]) -> tuple[bytes, ...]:
    """Raises TypeError, ValueError for what is not a command."""
    if isinstance(words, (str, bytes)):
        raise TypeError(f"argv is one text, {words!r}: give a list of words, such as `shlex.split` makes")
    argv = tuple(map(os.fsencode, words))
    if not argv or b"\0" in b"".join(argv):
        raise ValueError(f"argv: {list(words)!r} is not a command: nothing in it, or a NUL")
    return argv
