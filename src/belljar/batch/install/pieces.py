"""What a site has to put in place for a batch system, piece by piece; siting_engine.py puts it there and takes it away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from belljar.batch import Settings
from belljar.batch.install.commands import Needs


@dataclass(frozen=True)
class Place:
    """Where a site's files go, and what is known there."""

    settings: Settings
    wrapper: Path  # the executable that systems start: `belljar internal wrap SYSTEM` in one word
    belljar: Path  # the `belljar` command for hooks
    store: Path  # of the images
    folder: Path  # of the system's configuration: /etc/slurm, mom_priv, ...
    options: Mapping[str, str] = field(default_factory=dict)  # --queue, --host, ... as the system needs
    run: Callable[[tuple[str, ...]], bytes] = lambda argv: (
        b""
    )  # a command of the system; raises CommandFailed, CommandMissing
    node: Path | None = None  # `paths.node`


@dataclass(frozen=True)
class OurFile:
    """A file that is ours alone. Somebody else's at the same path is never overwritten."""

    purpose: str
    path: Path
    content: bytes
    mode: int = 0o644
    folders: int = 0  # so many of those it lies in are ours as well, and go when they are empty
    caller: Path | None = None  # a file of the site's: as long as it names this one, this one stays


@dataclass(frozen=True)
class OurLines:
    """Lines of ours, between two marks, in a file of the site's."""

    purpose: str
    path: Path
    lines: tuple[str, ...]
    comment: str = "#"
    clashes: tuple[str, ...] = ()  # keys (regular expressions) that must not stand outside of our marks


@dataclass(frozen=True)
class Change:
    """A setting made by the system's own command."""

    purpose: str
    probe: tuple[str, ...]  # prints the present state
    is_done: Callable[[bytes], bool]
    do: tuple[tuple[str, ...], ...]
    undo: tuple[tuple[str, ...], ...]
    stdin: bytes = b""
    undo_hint: str | None = None  # what to do where the system refuses to undo it
    answers: tuple[str, ...] = ()  # succeeds where the system answers at all: then a probe that fails says "not there"


@dataclass(frozen=True)
class Advice:
    """What only a person can do: shown by install, looked at by check where `is_done` is given."""

    purpose: str
    text: str


@dataclass(frozen=True)
class Guard:
    """What must not be there, and is not ours to change: it stops `install`, and `check` names it."""

    purpose: str
    look: Callable[[], str]  # what is in the way; "" where nothing is


Piece = OurFile | OurLines | Change | Advice | Guard


@dataclass(frozen=True)
class Finding:
    """One thing `batch check` saw."""

    what: str
    is_good: bool
    detail: str = ""
    remedy: str = ""


class SiteOfSystem(Protocol):
    """What a site needs for one system."""

    default_folder: Path
    needs: Needs

    def pieces(self, place: Place) -> list[Piece]:
        """Everything to be put in place, in order. Raises BadOption for options it cannot use."""

    def findings(self, place: Place) -> list[Finding]:
        """What is right and wrong beyond the pieces: versions, daemons that did not reread, settings that hurt."""

    def after(self, place: Place) -> tuple[tuple[str, ...], ...]:
        """Commands that make the system read its files again."""
