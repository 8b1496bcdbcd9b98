"""Puts the pieces of a site in place and takes them out again. Knows no batch system: pieces and commands are handed in.

Nothing of the site's is lost: its files get our lines between marks, after a copy was laid beside them; a file of
somebody else's is never overwritten, and one of ours that was changed by hand is neither overwritten nor removed unless
that is asked for. An installation that fails half-way takes back what it did.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from belljar.batch import marks
from belljar.batch import siting_record as records
from belljar.batch.siting import Change, Finding, OurFile, OurLines, Piece, Place, SiteOfSystem
from belljar.batch.siting_files import Undo, drop_copy, keep_copy, put, read, real
from belljar.batch.siting_record import Edited, Record, digest
from belljar.errors import BadOption, BelljarError, CommandFailed, NotOurs

Execute = Callable[[tuple[str, ...], bytes], bytes]  # (argv, stdin) -> stdout; raises CommandFailed, CommandMissing


class Status(str, Enum):
    """How a piece stands."""

    THERE = "there"
    MISSING = "missing"
    DIFFERENT = "different"  # ours, but not as it should be now
    CHANGED = "changed by hand"
    FOREIGN = "in the way"  # somebody else's where ours is to be
    UNKNOWN = "unknown"  # it could not be asked
    ADVICE = "by hand"


BLOCKING = (Status.CHANGED, Status.FOREIGN, Status.UNKNOWN)
TO_DO = (Status.MISSING, Status.DIFFERENT)


@dataclass(frozen=True)
class Step:
    """One piece, how it stands, and for files what is there and what is to be."""

    piece: Piece
    status: Status
    path: Path | None = None
    before: bytes | None = None
    after: bytes | None = None
    detail: str = ""


class Engine:
    """One system in one place."""

    def __init__(self, system: str, site: SiteOfSystem, place: Place, own: list[Piece], execute: Execute) -> None:
        """*own*: the pieces every system needs (the launchers)."""
        self._site, self._place, self._own, self._execute = site, place, own, execute
        self._record_path = records.path_of(place.folder, system)
        self._system = system

    def plan(self) -> list[Step]:
        """How each piece stands. Changes nothing."""
        record = self._record()
        return [self._look(piece, record) for piece in self._pieces()]

    def install(self, *, prefix: str = "", force: bool = False) -> list[Step]:
        """Put in place what is missing or different; all of it, or nothing. Returns the steps that were done.
        Raises NotOurs where something is in the way."""
        if not self._place.folder.is_dir():
            raise BadOption(
                f"{self._place.folder}: no such folder", hint="Tell with --folder where the system's settings are."
            )
        record, steps = self._record(), self.plan()
        _refuse([step for step in steps if step.status in BLOCKING and not (force and step.status is Status.CHANGED)])
        wanted = [step for step in steps if step.status in (*TO_DO, Status.CHANGED)]
        before = self._record()
        with _all_or_nothing() as undo:
            undo.append(lambda: records.save(self._record_path, before))
            record.options, record.prefix = dict(self._place.options), prefix
            for step in wanted:
                self._do(step, record, undo)
            if record != before:
                records.save(self._record_path, record)
        return wanted

    def reread(self) -> list[str]:
        """Have the system read its files again. Returns what went wrong: that can be repeated by hand."""
        trouble = []
        for argv in self._site.after(self._place):
            try:
                self._execute(argv, b"")
            except BelljarError as exc:
                trouble.append(f"{' '.join(argv)}: {exc.message}")
        return trouble

    def uninstall(self, *, force: bool = False) -> list[str]:
        """Take out what is ours. Returns what was done. Raises NotOurs, before anything is touched, where a file of
        ours was changed by hand, or one of the site's still calls it; with *force* it goes all the same."""
        record = self._record()
        pieces = self._pieces()
        if not force:
            _refuse_changed(record)
            _refuse_called(pieces, record)
        done = list(self._undo_changes([piece for piece in pieces if isinstance(piece, Change)], record))
        comments = {str(real(piece.path)): piece.comment for piece in pieces if isinstance(piece, OurLines)}
        for name in list(record.edited):
            done += self._take_lines(Path(name), comments.get(name, "#"), record)
        for name in reversed(list(record.files)):
            with suppress(FileNotFoundError):
                os.unlink(name)
                done.append(f"removed {name}")
            del record.files[name]
        self._drop_empty_folders(pieces)
        records.save(self._record_path, record)
        return done

    def check(self) -> list[Finding]:
        """The pieces and what the system's own side found, with remedies."""
        remedy = f"belljar batch install {self._system}"
        found = []
        for step in self.plan():
            if step.status is Status.ADVICE:
                continue
            where = f" ({step.path})" if step.path else ""
            is_good = step.status is Status.THERE
            help = remedy if step.status in (*TO_DO, Status.CHANGED) else "See the detail."
            found.append(
                Finding(
                    f"{step.piece.purpose}{where}", is_good, step.detail or step.status.value, "" if is_good else help
                )
            )
        try:
            found += self._site.findings(self._place)
        except BelljarError as exc:
            found.append(Finding(f"{self._system} itself", False, exc.message, exc.hint))
        return found

    # -- looking -----------------------------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        return _joined([*self._own, *self._site.pieces(self._place)])

    def _record(self) -> Record:
        try:
            return records.load(self._record_path)
        except ValueError as exc:
            raise NotOurs(str(exc), hint="Look at the file; without it, what is installed cannot be told.") from exc

    def _look(self, piece: Piece, record: Record) -> Step:
        if isinstance(piece, OurFile):
            return _look_at_file(piece, record)
        if isinstance(piece, OurLines):
            return _look_at_lines(piece)
        if isinstance(piece, Change):
            return self._look_at_change(piece)
        return Step(piece, Status.ADVICE)

    def _look_at_change(self, piece: Change) -> Step:
        """A probe that fails says that the thing is not there: asking for what does not exist is an error to most
        systems. Whether the system can be reached at all is found out by doing."""
        try:
            is_done = piece.is_done(self._place.run(piece.probe))
        except CommandFailed as exc:
            return Step(piece, Status.MISSING, detail=exc.message)
        except BelljarError as exc:
            return Step(piece, Status.UNKNOWN, detail=exc.message)
        return Step(piece, Status.THERE if is_done else Status.MISSING)

    # -- doing -------------------------------------------------------------------------------------------------------

    def _do(self, step: Step, record: Record, undo: Undo) -> None:
        """One step. A change of the site's own things is on record before it is made: if the power fails between the two,
        `uninstall` knows what to look for."""
        piece = step.piece
        if isinstance(piece, Change):
            self._change(piece, record, undo)
        elif isinstance(piece, OurFile):
            assert step.path is not None and step.after is not None
            if step.status is Status.CHANGED and step.before is not None:
                keep_copy(step.path, step.before, undo)
            put(step.path, step.after, piece.mode, None, undo)
            record.files[str(step.path)] = digest(step.after)
        elif isinstance(piece, OurLines):
            assert step.path is not None and step.after is not None
            facts = None
            if step.before is not None:
                facts = os.stat(step.path)
                if str(step.path) not in record.edited:
                    keep_copy(step.path, step.before, undo)
            if str(step.path) not in record.edited:
                lacked = bool(step.before) and not (step.before or b"").endswith(b"\n")
                record.edited[str(step.path)] = Edited(step.before is not None, lacked)
            records.save(self._record_path, record)
            put(step.path, step.after, 0o644, facts, undo)

    def _change(self, piece: Change, record: Record, undo: Undo) -> None:
        if piece.purpose not in record.changes:
            record.changes.append(piece.purpose)
            records.save(self._record_path, record)
        undo.append(lambda: self._run_all(piece.undo))  # half of it may be done
        for argv in piece.do:
            self._execute(argv, piece.stdin)
        if self._look_at_change(piece).status is not Status.THERE:
            raise CommandFailed(f"{piece.purpose}: `{' '.join(piece.do[-1])}` succeeded and changed nothing")

    def _run_all(self, commands: tuple[tuple[str, ...], ...]) -> None:
        for argv in commands:
            with suppress(BelljarError):
                self._execute(argv, b"")

    def _undo_changes(self, pieces: list[Change], record: Record) -> Iterator[str]:
        """In reverse order. A setting that the site had before we came is not ours to take back."""
        for piece in reversed(pieces):
            if piece.purpose not in record.changes:
                continue
            if self._look_at_change(piece).status is not Status.MISSING:
                try:
                    for argv in piece.undo:
                        self._execute(argv, b"")
                except CommandFailed as exc:
                    raise CommandFailed(f"{piece.purpose}: {exc.message}", hint=piece.undo_hint) from exc
                yield f"undid: {piece.purpose}"
            record.changes.remove(piece.purpose)

    def _take_lines(self, path: Path, comment: str, record: Record) -> Iterator[str]:
        facts = record.edited.pop(str(path))
        text = read(path)
        if text is None:
            return
        left = marks.take(text, comment, str(path))
        if left == text:
            return
        if not left.strip() and not facts.existed:
            path.unlink()
            yield f"removed {path}"
            return
        put(path, left[:-1] if facts.lacked_newline and left.endswith(b"\n") else left, 0o644, os.stat(path), [])
        drop_copy(path)
        yield f"took our lines out of {path}"

    def _drop_empty_folders(self, pieces: list[Piece]) -> None:
        ours = {self._place.wrapper.parent, self._place.belljar.parent}
        ours |= {
            one for piece in pieces if isinstance(piece, OurFile) for one in [*piece.path.parents][: piece.folders]
        }
        for folder in sorted(ours, reverse=True):  # what lies in a folder stands before it
            with suppress(OSError):  # it is not empty, or not there
                os.rmdir(folder)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces, those with lines for one file made one: a file has our marks once."""
    found: list[Piece] = []
    for piece in pieces:
        for at, before in enumerate(found):
            if isinstance(piece, OurLines) and isinstance(before, OurLines) and piece.path == before.path:
                both = before.purpose if piece.purpose == before.purpose else f"{before.purpose}; {piece.purpose}"
                found[at] = replace(
                    before, purpose=both, lines=before.lines + piece.lines, clashes=before.clashes + piece.clashes
                )
                break
        else:
            found.append(piece)
    return found


def _look_at_file(piece: OurFile, record: Record) -> Step:
    text = read(piece.path)
    if text is None:
        return Step(piece, Status.MISSING, piece.path, None, piece.content)
    step = Step(piece, Status.THERE, piece.path, text, piece.content)
    if text == piece.content:
        mode = stat.S_IMODE(os.stat(piece.path).st_mode)
        if mode != piece.mode:
            return replace(step, status=Status.DIFFERENT, detail=f"its mode is {mode:04o}, not {piece.mode:04o}")
        if record.files.get(str(piece.path)) != digest(text):  # else `uninstall` would leave it
            return replace(step, status=Status.DIFFERENT, detail="not recorded")
        return step
    if record.files.get(str(piece.path)) == digest(text):
        return replace(step, status=Status.DIFFERENT)
    if str(piece.path) in record.files:
        return replace(step, status=Status.CHANGED, detail="changed since belljar wrote it; --force replaces it")
    return replace(step, status=Status.FOREIGN, detail="a file of somebody else's")


def _look_at_lines(piece: OurLines) -> Step:
    path = real(piece.path)
    text = read(path)
    try:
        after = marks.put(text or b"", piece.lines, piece.comment, str(path))
        clashes = marks.clashes(text or b"", piece.clashes, piece.comment, str(path))
    except NotOurs as exc:
        return Step(piece, Status.FOREIGN, path, text, None, exc.message)
    if clashes:
        return Step(piece, Status.FOREIGN, path, text, after, "; ".join(clashes))
    if text == after:
        return Step(piece, Status.THERE, path, text, after)
    is_new = text is None or marks.take(text, piece.comment, str(path)) == text
    return Step(piece, Status.MISSING if is_new else Status.DIFFERENT, path, text, after)


def _refuse_changed(record: Record) -> None:
    changed = [
        name for name, known in record.files.items() if (text := read(Path(name))) is not None and digest(text) != known
    ]
    if changed:
        raise NotOurs(
            "\n".join(f"{name}: changed since belljar wrote it" for name in changed),
            hint="Look at it first; `belljar batch uninstall --force` removes it all the same.",
        )


def _refuse_called(pieces: list[Piece], record: Record) -> None:
    """What a site's own script starts with would be missing from it: some daemons do not start then, some drain nodes."""
    found = []
    for piece in pieces:
        if isinstance(piece, OurFile) and piece.caller and str(piece.path) in record.files:
            with suppress(OSError):
                if os.fsencode(piece.path.name) in (read(piece.caller) or b""):
                    found.append(f"{piece.caller}: calls {piece.path}")
    if found:
        raise NotOurs("\n".join(found), hint="Take that out of your file first, then uninstall.")


def _refuse(steps: list[Step]) -> None:
    """One line for each thing in the way."""
    if steps:
        raise NotOurs(
            "\n".join(f"{step.path or step.piece.purpose}: {step.status.value}: {step.detail}" for step in steps)
        )


@contextmanager
def _all_or_nothing() -> Iterator[Undo]:
    """What is in the list is called, last first, when the inside fails."""
    undo: Undo = []
    try:
        yield undo
    except BaseException:
        for back in reversed(undo):
            with suppress(OSError, BelljarError):
                back()
        raise
