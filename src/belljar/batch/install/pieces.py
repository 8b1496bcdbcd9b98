"""What a site has to put in place, piece by piece: how each stands, is put in place, and is taken out again."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Protocol

from belljar.batch import Settings
from belljar.batch.install import files
from belljar.batch.install.commands import Needs
from belljar.batch.install.files import Edited, Record, Undo, digest, read, real
from belljar.errors import BelljarError, CommandFailed, CommandHung, NotOurs
from belljar.records import dataclass, field, replace

Argv = tuple[str, ...]
HOOK_DEADLINE = 60  # seconds; systems wait for hooks as long as they like, or close the node
PATH_LINES = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nexport PATH"  # of hooks in shell
HOOK = f"""#!/bin/sh
# {{comment}}
{PATH_LINES}
timeout -k 5 {HOOK_DEADLINE} {{belljar}} internal {{verb}} {{system}} </dev/null || :
exit 0
"""


@dataclass(frozen=True)
class Place:
    """Where a site's files go, and what is known there."""

    settings: Settings
    wrapper: Path  # the executable that systems start: `belljar internal wrap SYSTEM` in one word
    belljar: Path  # the `belljar` command for hooks
    store: Path  # of the images
    folder: Path  # of the system's configuration: /etc/slurm, mom_priv, ...
    options: Mapping[str, str] = field(default_factory=dict)  # --queue, --host, ... as the system needs
    run: Callable[[Argv], bytes] = lambda argv: b""  # a command of the system; raises CommandFailed, CommandMissing
    node: Path | None = None  # `paths.node`

    def said(self, *argv: str) -> str:
        """What a command of the system prints, as text. Raises CommandFailed, CommandMissing."""
        return self.run(argv).decode(errors="replace")


class Status(str, Enum):
    """How a piece stands."""

    THERE = "there"
    MISSING = "missing"
    DIFFERENT = "different"  # ours, but not as it should be now
    CHANGED = "changed by hand"
    FOREIGN = "in the way"  # somebody else's where ours is to be
    UNKNOWN = "unknown"  # it could not be asked
    ADVICE = "by hand"


@dataclass
class Ground:
    """What pieces are put on: the system's commands, what is on record there, and the way back."""

    run: Callable[[Argv], bytes]
    execute: Callable[[Argv, bytes], bytes]  # (argv, stdin) -> stdout; raises CommandFailed, CommandMissing
    record: Record
    save: Callable[[], None]  # the record
    undo: Undo = field(default_factory=list)


@dataclass(frozen=True)
class Piece:
    """One thing to be put in place."""

    purpose: str

    @property
    def name(self) -> str:
        """What makes two pieces of a kind the same thing, whatever is in them."""
        return self.purpose

    def look(self, ground: Ground) -> Step:
        """How it stands. Changes nothing."""
        return Step(self, Status.ADVICE)

    def put(self, step: Step, ground: Ground) -> None:
        """Put it in place."""


@dataclass(frozen=True)
class Step:
    """One piece, how it stands, and for files what is there and what is to be."""

    piece: Piece
    status: Status
    path: Path | None = None
    before: bytes | None = None
    after: bytes | None = None
    detail: str = ""


@dataclass(frozen=True)
class OurFile(Piece):
    """A file that is ours alone. Somebody else's at the same path is never overwritten."""

    path: Path
    content: bytes
    mode: int = 0o644
    folders: int = 0  # so many of those it lies in are ours as well, and go when they are empty
    caller: Path | None = None  # a file of the site's: as long as it names this one, this one stays

    @property
    def name(self) -> str:
        return str(self.path)

    def look(self, ground: Ground) -> Step:
        text, known = read(self.path), ground.record.files.get(self.name)
        as_it_is = partial(Step, self, path=self.path, before=text, after=self.content)
        if text is None:
            return as_it_is(Status.MISSING)
        is_recorded = known == digest(text)
        if text == self.content:
            mode = stat.S_IMODE(os.stat(self.path).st_mode)
            if mode != self.mode:
                return as_it_is(Status.DIFFERENT, detail=f"its mode is {mode:04o}, not {self.mode:04o}")
            if not is_recorded:  # else `uninstall` would leave it
                return as_it_is(Status.DIFFERENT, detail="not recorded")
            return as_it_is(Status.THERE)
        if is_recorded:
            return as_it_is(Status.DIFFERENT)
        if known is not None:
            return as_it_is(Status.CHANGED, detail="changed since belljar wrote it; --force replaces it")
        return as_it_is(Status.FOREIGN, detail="a file of somebody else's")

    def put(self, step: Step, ground: Ground) -> None:
        if step.status is Status.CHANGED and step.before is not None:
            files.keep_copy(self.path, step.before, ground.undo)
        files.put(self.path, self.content, self.mode, None, ground.undo)
        ground.record.files[self.name] = digest(self.content)


@dataclass(frozen=True)
class OurLines(Piece):
    """Lines of ours, between two marks, in a file of the site's."""

    path: Path
    lines: tuple[str, ...]
    comment: str = "#"
    clashes: tuple[str, ...] = ()  # keys (regular expressions) that must not stand outside of our marks

    @property
    def name(self) -> str:
        return str(real(self.path))

    def look(self, ground: Ground) -> Step:
        path = real(self.path)
        text = read(path)
        as_it_is = partial(Step, self, path=path, before=text)
        try:
            after = files.with_lines(text or b"", self.lines, self.comment, str(path))
            clashes = files.clashes(text or b"", self.clashes, self.comment, str(path))
        except NotOurs as exc:
            return as_it_is(Status.FOREIGN, detail=exc.message)
        if clashes:
            return as_it_is(Status.FOREIGN, after=after, detail="; ".join(clashes))
        if text == after:
            return as_it_is(Status.THERE, after=after)
        is_new = text is None or files.without_lines(text, self.comment, str(path)) == text
        return as_it_is(Status.MISSING if is_new else Status.DIFFERENT, after=after)

    def put(self, step: Step, ground: Ground) -> None:
        """On record before it is written: after a crash between the two `uninstall` knows what to look for."""
        assert step.path is not None and step.after is not None
        name, before = str(step.path), step.before
        if name not in ground.record.edited:
            if before is not None:
                files.keep_copy(step.path, before, ground.undo)
            ground.record.edited[name] = Edited(before is not None, (before or b"\n")[-1:] != b"\n")
        ground.save()
        files.put(step.path, step.after, 0o644, None if before is None else os.stat(step.path), ground.undo)


@dataclass(frozen=True)
class Change(Piece):
    """A setting made by the system's own command."""

    probe: Argv  # prints the present state
    is_done: Callable[[bytes], bool]
    do: tuple[Argv, ...]
    undo: tuple[Argv, ...]
    stdin: bytes = b""
    undo_hint: str | None = None  # what to do where the system refuses to undo it
    answers: Argv = ()  # succeeds where the system answers at all: then a probe that fails says "not there"

    def look(self, ground: Ground) -> Step:
        """No answer is not "it is not there", although to some systems asking for what does not exist is an error."""
        try:
            is_done = self.is_done(ground.run(self.probe))
        except BelljarError as exc:
            is_answer = isinstance(exc, CommandFailed) and not isinstance(exc, CommandHung) and self._answers(ground)
            return Step(self, Status.MISSING if is_answer else Status.UNKNOWN, detail=exc.message)
        return Step(self, Status.THERE if is_done else Status.MISSING)

    def _answers(self, ground: Ground) -> bool:
        with suppress(BelljarError):
            return bool(self.answers and ground.run(self.answers) is not None)
        return False

    def put(self, step: Step, ground: Ground) -> None:
        """On record before it is made, as lines are."""
        if self.purpose not in ground.record.changes:
            ground.record.changes += (self.purpose,)
            ground.save()
        ground.undo.append(lambda: self._take_back(ground))  # half of it may be done
        for argv in self.do:
            ground.execute(argv, self.stdin)
        if self.look(ground).status is not Status.THERE:
            raise CommandFailed(f"{self.purpose}: `{' '.join(self.do[-1])}` succeeded and changed nothing")

    def _take_back(self, ground: Ground) -> None:
        for argv in self.undo:
            with suppress(BelljarError):
                ground.execute(argv, b"")

    def take(self, ground: Ground) -> Iterator[str]:
        """Take it out; what was done. What is gone already needs no command. Raises CommandFailed with the piece's own hint."""
        if self.look(ground).status is not Status.MISSING:
            try:
                for argv in self.undo:
                    ground.execute(argv, b"")
            except CommandFailed as exc:
                raise CommandFailed(f"{self.purpose}: {exc.message}", hint=self.undo_hint) from exc
            yield f"undid: {self.purpose}"
        ground.record.changes = tuple(one for one in ground.record.changes if one != self.purpose)


@dataclass(frozen=True)
class Advice(Piece):
    """What only a person can do: shown by install."""

    text: str


@dataclass(frozen=True)
class Guard(Piece):
    """What must not be there, and is not ours to change: it stops `install`, and `check` names it."""

    seen: Callable[[], str]  # what is in the way; "" where nothing is

    def look(self, ground: Ground) -> Step:
        seen = self.seen()
        return Step(self, Status.FOREIGN if seen else Status.THERE, detail=seen)


def hook_text(place: Place, system: str, verb: str, comment: str) -> bytes:
    """A script that calls `belljar internal` as root around a job, and always exits 0."""
    words = {"belljar": shlex.quote(str(place.belljar)), "system": system, "verb": verb, "comment": comment}
    return HOOK.format(**words).encode()


def names(script: Path, word: str) -> bool:
    """Does a script of the site's have this in it?"""
    try:
        return word in script.read_text(errors="replace")
    except OSError:
        return False


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces, those with lines for one file made one: a file has our marks once."""
    found: dict[object, Piece] = {}
    for piece in pieces:
        before = found.get(key := (type(piece), piece.name))
        if isinstance(piece, OurLines) and isinstance(before, OurLines):
            purpose = "; ".join(dict.fromkeys((before.purpose, piece.purpose)))
            lines, clashes = before.lines + piece.lines, before.clashes + piece.clashes
            piece = replace(before, purpose=purpose, lines=lines, clashes=clashes)
        found[key] = piece
    return list(found.values())


def take_lines(path: Path, comment: str, ground: Ground) -> Iterator[str]:
    """Our lines out of a file of the site's; the file too, if it was made for them and nothing else is in it."""
    facts, text = ground.record.edited.pop(str(path)), read(path)
    if text is None or (left := files.without_lines(text, comment, str(path))) == text:
        return
    if not left.strip() and not facts.existed:
        path.unlink()
        yield f"removed {path}"
        return
    left = left[:-1] if facts.lacked_newline and left.endswith(b"\n") else left
    files.put(path, left, 0o644, os.stat(path), ground.undo)
    files.drop_copy(path)
    yield f"took our lines out of {path}"


def take_file(name: str, ground: Ground) -> Iterator[str]:
    """A file that is ours alone."""
    with suppress(FileNotFoundError):
        Path(name).unlink()
        yield f"removed {name}"
    del ground.record.files[name]


@dataclass(frozen=True)
class Finding:
    """One thing `batch check` saw; a remedy is for what is wrong."""

    what: str
    is_good: bool
    detail: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.is_good:
            object.__setattr__(self, "remedy", "")


class SiteOfSystem(Protocol):
    """What a site needs for one system."""

    default_folder: Path
    needs: Needs

    def pieces(self, place: Place) -> Iterable[Piece]:
        """Everything to be put in place, in order. Raises BadOption for options it cannot use."""

    def findings(self, place: Place) -> Iterable[Finding]:
        """What is right and wrong beyond the pieces: versions, daemons that did not reread, settings that hurt."""

    def after(self, place: Place) -> tuple[Argv, ...]:
        """Commands that make the system read its files again."""
