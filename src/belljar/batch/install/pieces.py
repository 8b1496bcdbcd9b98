"""What a site gets for a batch system, piece by piece: how each stands, how it is put in place and taken out again.

A folder of ours, a file of ours where the system looks for it, a block of lines in a file of the site's, a setting in the
system's own database, advice for a person. What the site has of its own is never changed: a clash names it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Protocol

from belljar.batch import Settings
from belljar.batch.install.commands import Needs
from belljar.errors import BelljarError, CommandFailed, CommandMissing
from belljar.findings import Finding
from belljar.host.files import read_capped, write_whole
from belljar.records import dataclass, field

Argv = tuple[str, ...]
MADE = b"Made by `belljar batch install"  # in the first lines of each file of ours that is not in our folder
MADE_WITHIN = 400  # bytes
LARGEST_FILE = 16 << 20
BEGIN, END = "# belljar begin", "# belljar end"
HOOK_DEADLINE = 60  # seconds; systems wait for hooks as long as they like, or close the node


@dataclass(frozen=True)
class Place:
    """Where a site's files go, and what is known there."""

    settings: Settings
    wrapper: Path  # the executable that systems start: `belljar internal wrap SYSTEM` in one word; its folder is ours
    belljar: Path  # the `belljar` command for hooks
    store: Path  # of the images
    folder: Path  # of the system's configuration: /etc/slurm, mom_priv, ...
    options: Mapping[str, str] = field(default_factory=dict)  # --queue, --set ... as the system needs
    run: Callable[[Argv], bytes] = lambda argv: b""  # a command of the system; raises CommandFailed, CommandMissing
    node: Path | None = None  # `paths.node`

    def output(self, *argv: str) -> str:
        """What a command of the system prints, as text. Raises CommandFailed, CommandMissing."""
        return self.run(argv).decode(errors="replace")

    def asked(self, *argv: str) -> str:
        """The same; "" where the system does not answer."""
        with suppress(BelljarError):
            return self.output(*argv)
        return ""

    def filled(self, template: Path, **words: object) -> bytes:
        """A template with a word for each `@name@` in it: belljar's path, the deadline of hooks, and these."""
        known = {"belljar": shlex.quote(str(self.belljar)), "deadline": HOOK_DEADLINE, **words}
        return re.sub("@([a-z_]+)@", lambda match: str(known[match[1]]), template.read_text()).encode()

    def hook(self, system: str, verb: str) -> bytes:
        """A script that calls `belljar internal` as root around a job, and always exits 0."""
        return self.filled(Path(__file__).with_name("hook.sh"), system=system, verb=verb)


class Status(str, Enum):
    """How a piece stands."""

    THERE = "there"
    MISSING = "missing"
    DIFFERENT = "different"  # ours, but not as it should be now
    CLASH = "in the way"  # the site's own where ours is to be
    ADVICE = "by hand"


@dataclass(frozen=True)
class Step:
    """One piece and how it stands; *diff*: of a file that is there."""

    piece: Piece
    status: Status
    detail: str = ""
    diff: str = ""


@dataclass(frozen=True)
class Piece:
    """One thing to be put in place."""

    purpose: str

    @property
    def name(self) -> str:
        """What makes two pieces the same thing, whatever is in them."""
        return str(getattr(self, "path", self.purpose))

    def look(self, place: Place) -> Step:
        """How it stands. Changes nothing."""
        return Step(self, Status.ADVICE)

    def put(self, place: Place) -> None:
        """Put it in place."""

    def take(self, place: Place) -> str:
        """Take it out. Returns what was done; "" where it was not there."""
        return ""


@dataclass(frozen=True)
class OurFolder(Piece):
    """A folder that is ours alone, name -> content. Each file is replaced as a whole."""

    path: Path
    files: Mapping[str, bytes]

    def look(self, place: Place) -> Step:
        present = {path.name: (path.read_bytes(), mode_at(path)) for path in self.path.glob("*") if path.is_file()}
        expected = {name: (content, mode_of(content)) for name, content in self.files.items()}
        if present and not {*present} & {*expected}:
            return Step(self, Status.CLASH, "somebody else's folder: move it away, or choose another --prefix")
        wrong = sorted(name for name in {*present, *expected} if present.get(name) != expected.get(name))
        status = Status.MISSING if not present else Status.DIFFERENT if wrong else Status.THERE
        changed = [name for name in wrong if name in present]
        diff = [difference(self.path / name, present[name][0], self.files.get(name, b"")) for name in changed]
        return Step(self, status, ", ".join(wrong), "".join(diff))

    def put(self, place: Place) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o755)
        for name, content in self.files.items():
            write_whole(self.path / name, content, mode=mode_of(content), durable=True)
        for path in self.path.glob("*"):
            if path.name not in self.files:
                path.unlink()

    def take(self, place: Place) -> str:
        if not self.path.exists() or self.look(place).status is Status.CLASH:
            return ""
        # What another version left goes first: a folder with nothing else in it would look like somebody else's.
        for path in sorted(self.path.glob("*"), key=lambda path: path.name in self.files):
            path.unlink()
        self.path.rmdir()
        with suppress(OSError):  # other systems' folders are there
            self.path.parent.rmdir()
        return f"removed {self.path}"


@dataclass(frozen=True)
class OurFile(Piece):
    """A file of ours: beside the launchers, or with our mark in it where the system looks for it."""

    path: Path
    content: bytes

    def look(self, place: Place) -> Step:
        text = read(self.path)
        if text is None:
            return Step(self, Status.MISSING)
        if MADE not in text[:MADE_WITHIN]:
            return Step(self, Status.CLASH, "the site's own: move it away")
        if text == self.content and mode_at(self.path) == mode_of(text):
            return Step(self, Status.THERE)
        return Step(self, Status.DIFFERENT, diff=difference(self.path, text, self.content))

    def put(self, place: Place) -> None:
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(self.path, self.content, mode=mode_of(self.content), durable=True)

    def take(self, place: Place) -> str:
        if MADE not in (read(self.path) or b"")[:MADE_WITHIN]:
            return ""
        self.path.unlink()
        return f"removed {self.path}"


@dataclass(frozen=True)
class OurLines(Piece):
    """Lines of ours, between two marks, in a file of the site's."""

    path: Path
    lines: tuple[str, ...]
    clashes: tuple[str, ...] = ()  # keys (regular expressions) that must not stand outside of our marks

    @property
    def block(self) -> bytes:
        return "".join(f"{line}\n" for line in (BEGIN, *self.lines, END)).encode()

    def look(self, place: Place) -> Step:
        text = read(self.path) or b""
        try:
            begin, end = span(text)
        except ValueError as exc:
            return Step(self, Status.CLASH, str(exc))
        for number, line in enumerate(text.decode("utf-8", "replace").split("\n"), 1):
            is_ours = text[:begin].count(b"\n") < number <= text[:end].count(b"\n")
            if not is_ours and any(re.match(rf"\s*{key}", line, re.IGNORECASE) for key in self.clashes):
                return Step(self, Status.CLASH, f"line {number}: {line.strip()[:100]}: take it out, belljar sets that")
        after = self._after(text)
        status = Status.MISSING if begin == end else Status.THERE if after == text else Status.DIFFERENT
        return Step(self, status, diff=difference(self.path, text, after))

    def _after(self, text: bytes) -> bytes:
        begin, end = span(text)
        newline = b"\n" if begin == end and text and not text.endswith(b"\n") else b""
        return text[:begin] + newline + self.block + text[end:]

    def put(self, place: Place) -> None:
        replace_text(self.path, self._after(read(self.path) or b""))

    def take(self, place: Place) -> str:
        text = read(self.path) or b""
        if (rest := outside(text)) == text:
            return ""
        if rest:
            replace_text(self.path, rest)
        else:  # it was made for our lines
            self.path.unlink()
        return f"took our lines out of {self.path}"


@dataclass(frozen=True)
class Change(Piece):
    """A setting made by the system's own command."""

    probe: Argv  # prints the present state; to some systems asking for what does not exist is an error
    is_done: Callable[[str], bool]
    do: tuple[Argv, ...]
    undo: tuple[Argv, ...] = ()
    undo_hint: str | None = None  # what to do where the system refuses to undo it

    def look(self, place: Place) -> Step:
        try:
            is_done = self.is_done(place.output(*self.probe))
        except (CommandFailed, CommandMissing) as exc:
            return Step(self, Status.MISSING, exc.message)
        return Step(self, Status.THERE if is_done else Status.MISSING)

    def put(self, place: Place) -> None:
        for argv in self.do:
            place.run(argv)
        if self.look(place).status is not Status.THERE:
            raise CommandFailed(f"{self.purpose}: `{' '.join(self.do[-1])}` succeeded and changed nothing")

    def take(self, place: Place) -> str:
        if not self.undo or self.look(place).status is Status.MISSING:
            return ""
        try:
            for argv in self.undo:
                place.run(argv)
        except CommandFailed as exc:
            raise CommandFailed(f"{self.purpose}: {exc.message}", hint=self.undo_hint) from exc
        return f"undid: {self.purpose}"


@dataclass(frozen=True)
class Advice(Piece):
    """What only a person can do: shown by install."""

    text: str


@dataclass(frozen=True)
class Clash(Advice):
    """What the site has set and ours would override, or what is missing: `install` stops, and `check` names it."""

    def look(self, place: Place) -> Step:
        return Step(self, Status.CLASH, self.text)


class SiteOfSystem(Protocol):
    """What a site needs for one system."""

    default_folder: Path
    needs: Needs

    def pieces(self, place: Place) -> Iterable[Piece]:
        """Everything to be put in place, in order. Raises BadOption for options it cannot use."""

    def findings(self, place: Place) -> Iterable[Finding]:
        """What is right and wrong beyond the pieces: daemons that did not reread, settings that hurt."""

    def after(self, place: Place) -> tuple[Argv, ...]:
        """Commands that make the system read its files again."""
        return ()


def names(script: Path, word: str) -> bool:
    """Does a script of the site's have this in it?"""
    with suppress(OSError):
        return word in script.read_text(errors="replace")
    return False


def read(path: Path) -> bytes | None:
    """The file; None where there is none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return read_capped(path, LARGEST_FILE)
    return None


def replace_text(path: Path, text: bytes) -> None:
    """Another text for a file of the site's, whole, with its owner and mode; a link stays one."""
    path = path.resolve()
    was = os.stat(path) if path.exists() else None
    write_whole(path, text, mode=0o600, durable=True)
    if was is not None:
        os.chown(path, was.st_uid, was.st_gid)
    os.chmod(path, stat.S_IMODE(was.st_mode) if was else 0o644)


def span(text: bytes) -> tuple[int, int]:
    """Where our block begins and ends, in bytes; twice the end of the text where there is none. Raises ValueError."""
    begins = [match.start() for match in re.finditer(rb"(?m)^# belljar begin\s*?$", text)]
    ends = [match.end() for match in re.finditer(rb"(?m)^# belljar end\s*?(?:\n|\Z)", text)]
    if not begins and not ends:
        return len(text), len(text)
    if len(begins) != 1 or len(ends) != 1 or ends[0] <= begins[0]:
        raise ValueError(f"the lines `{BEGIN}` and `{END}` do not pair: each has to stand there once, in this order")
    return begins[0], ends[0]


def outside(text: bytes) -> bytes:
    """The text without our block. Raises ValueError."""
    begin, end = span(text)
    return text[:begin] + text[end:]


def difference(path: Path, before: bytes, after: bytes) -> str:
    """As `diff -u` shows it."""
    old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (before, after))
    lines = difflib.unified_diff(old, new, str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def mode_of(content: bytes) -> int:
    return 0o755 if content.startswith(b"#!") else 0o644


def mode_at(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)
