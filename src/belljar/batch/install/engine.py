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

from belljar.batch.install import marks, removal
from belljar.batch.install import record as records
from belljar.batch.install.files import Undo, keep_copy, put, read, real
from belljar.batch.install.pieces import Change, Finding, Guard, OurFile, OurLines, Piece, Place, SiteOfSystem
from belljar.batch.install.record import Choice, Edited, Record, digest
from belljar.batch.install.removal import Execute
from belljar.errors import BadOption, BelljarError, CommandFailed, CommandHung, NotOurs, SystemSilent


class Status(str, Enum):
    """How a piece stands."""

    THERE = "there"
    MISSING = "missing"
    DIFFERENT = "different"  # ours, but not as it should be now
    CHANGED = "changed by hand"
    FOREIGN = "in the way"  # somebody else's where ours is to be
    UNKNOWN = "unknown"  # it could not be asked
    LEFTOVER = "no longer wanted"  # ours, of options that hold no longer
    ADVICE = "by hand"


BLOCKING = (Status.CHANGED, Status.FOREIGN, Status.UNKNOWN)
TO_DO = (Status.MISSING, Status.DIFFERENT)
YOURS = "changed since belljar wrote it: it stays, and is yours"


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

    def __init__(
        self, system: str, site: SiteOfSystem, place: Place, own: Callable[[Place], list[Piece]], execute: Execute
    ) -> None:
        """*own*: the pieces every system needs (the launchers)."""
        self._site, self._place, self._own, self._execute = site, place, own, execute
        self._record_path = records.path_of(place.folder, system)
        self._system = system

    def plan(self) -> list[Step]:
        """How each piece stands, what is no longer wanted last. Changes nothing."""
        record = self._record()
        pieces = self._pieces()
        steps = (self._look(piece, record) for piece in pieces)
        return [*(one for one in steps if not _is_quiet(one)), *self._leftovers(record, pieces)]

    def install(self, *, prefix: str = "", force: bool = False) -> list[Step]:
        """Put in place what is missing or different, and take out what other options had put there; all of it, or
        nothing. Returns the steps that were done. Raises NotOurs where something is in the way."""
        if not self._place.folder.is_dir():
            raise BadOption(
                f"{self._place.folder}: no such folder", hint="Tell with --folder where the system's settings are."
            )
        record, before = self._record(), self._record()
        _refuse_blocked(self.plan(), force)
        leftovers = self._leftovers(record, self._pieces())
        if not force:
            removal.refuse_called([step.piece for step in leftovers], record)
        with _all_or_nothing() as undo:
            undo.append(lambda: records.save(self._record_path, before))
            record.options, record.prefix = dict(self._place.options), prefix
            record.choices = [*(one for one in record.choices if one != self._choice()), self._choice()]
            self._settle_leftovers([step for step in leftovers if isinstance(step.piece, Change)], record, undo)
            wanted = [step for step in self._steps(record) if step.status in (*TO_DO, Status.CHANGED)]
            for step in wanted:
                self._do(step, record, undo)
            self._settle_leftovers([step for step in leftovers if not isinstance(step.piece, Change)], record, undo)
            record.choices = [self._choice()]
            if record != before:
                records.save(self._record_path, record)
        launchers = {Path(name).parent for one in before.choices for name in (one.wrapper, one.belljar)}
        removal.drop_empty_folders(launchers, [step.piece for step in leftovers])
        return [*wanted, *leftovers]

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
        record, pieces = self._record(), self._pieces()
        pieces += [step.piece for step in self._leftovers(record, pieces)]
        if not force:
            removal.refuse_changed(record)
            removal.refuse_called(pieces, record)
        done = list(self._undo_changes([piece for piece in pieces if isinstance(piece, Change)], record, []))
        comments = {str(real(piece.path)): piece.comment for piece in pieces if isinstance(piece, OurLines)}
        for name in list(record.edited):
            done += removal.take_lines(Path(name), comments.get(name, "#"), record, [])
        for name in reversed(list(record.files)):
            done += removal.remove_file(name, record, [])
        removal.drop_empty_folders({self._place.wrapper.parent, self._place.belljar.parent}, pieces)
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
            help = remedy if step.status in (*TO_DO, Status.CHANGED, Status.LEFTOVER) else "See the detail."
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
        return self._pieces_at(self._place)

    def _pieces_at(self, place: Place) -> list[Piece]:
        return _joined([*self._own(place), *self._site.pieces(place)])

    def _steps(self, record: Record) -> list[Step]:
        return [self._look(piece, record) for piece in self._pieces()]

    def _choice(self) -> Choice:
        return Choice(dict(self._place.options), str(self._place.wrapper), str(self._place.belljar))

    def _leftovers(self, record: Record, wanted: list[Piece]) -> list[Step]:
        """Pieces that other options, or another prefix, had put there, and that are not among the *wanted* ones."""
        kept, found = {_key(piece) for piece in wanted}, list[Step]()
        for choice in record.choices:
            if choice == self._choice():
                continue
            wrapper, belljar = Path(choice.wrapper), Path(choice.belljar)
            place = replace(self._place, options=choice.options, wrapper=wrapper, belljar=belljar)
            with suppress(BelljarError):  # options of what is no more, a queue that was deleted for instance
                for piece in self._pieces_at(place):
                    if _key(piece) not in kept and _is_recorded(piece, record):
                        kept.add(_key(piece))
                        found.append(_look_at_leftover(piece, record))
        return found

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
        if isinstance(piece, Guard):
            seen = piece.look()
            return Step(piece, Status.FOREIGN if seen else Status.THERE, detail=seen)
        return Step(piece, Status.ADVICE)

    def _look_at_change(self, piece: Change) -> Step:
        """No answer is not "it is not there", although to some systems asking for what does not exist is an error."""
        try:
            is_done = piece.is_done(self._place.run(piece.probe))
        except BelljarError as exc:
            is_answer = isinstance(exc, CommandFailed) and not isinstance(exc, CommandHung) and self._answers(piece)
            return Step(piece, Status.MISSING if is_answer else Status.UNKNOWN, detail=exc.message)
        return Step(piece, Status.THERE if is_done else Status.MISSING)

    def _answers(self, piece: Change) -> bool:
        if not piece.answers:
            return False
        try:
            self._place.run(piece.answers)
        except BelljarError:
            return False
        return True

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
        undo.append(lambda: removal.run_all(piece.undo, b"", self._execute))  # half of it may be done
        for argv in piece.do:
            self._execute(argv, piece.stdin)
        if self._look_at_change(piece).status is not Status.THERE:
            raise CommandFailed(f"{piece.purpose}: `{' '.join(piece.do[-1])}` succeeded and changed nothing")

    def _undo_changes(self, pieces: list[Change], record: Record, undo: Undo) -> Iterator[str]:
        """In reverse order. A setting that the site had before we came is not ours to take back."""
        steps = [self._look_at_change(piece) for piece in reversed(pieces) if piece.purpose in record.changes]
        if silent := next((step for step in steps if step.status is Status.UNKNOWN), None):
            raise SystemSilent(
                f"{silent.piece.purpose}: {silent.detail}",
                hint=f"Nothing is forgotten and nothing was taken out: try again when {self._system} answers.",
            )
        for step in steps:
            assert isinstance(step.piece, Change)
            yield from removal.undo_change(step.piece, record, step.status is Status.MISSING, self._execute, undo)

    def _settle_leftovers(self, steps: list[Step], record: Record, undo: Undo) -> None:
        """Take them out. What was changed by hand is left, and forgotten. Raises CommandFailed."""
        if steps:
            records.save(self._record_path, record)
        for step in reversed(steps):
            piece = step.piece
            if isinstance(piece, Change):
                list(self._undo_changes([piece], record, undo))
            elif isinstance(piece, OurLines):
                list(removal.take_lines(real(piece.path), piece.comment, record, undo))
            elif step.detail == YOURS:
                del record.files[str(step.path)]
            else:
                list(removal.remove_file(str(step.path), record, undo))


def _is_quiet(step: Step) -> bool:
    """A guard that found nothing is not worth a word."""
    return isinstance(step.piece, Guard) and step.status is Status.THERE


def _key(piece: Piece) -> tuple[str, str]:
    """What makes two pieces the same thing, whatever is in them."""
    if isinstance(piece, OurFile):
        return "file", str(piece.path)
    if isinstance(piece, OurLines):
        return "lines", str(real(piece.path))
    return type(piece).__name__, piece.purpose


def _is_recorded(piece: Piece, record: Record) -> bool:
    if isinstance(piece, OurFile):
        return str(piece.path) in record.files
    if isinstance(piece, OurLines):
        return str(real(piece.path)) in record.edited
    return isinstance(piece, Change) and piece.purpose in record.changes


def _look_at_leftover(piece: Piece, record: Record) -> Step:
    if isinstance(piece, OurFile):
        text = read(piece.path)
        is_theirs = text is not None and record.files[str(piece.path)] != digest(text)
        step = Step(piece, Status.LEFTOVER, piece.path, text, b"")
        return replace(step, after=text, detail=YOURS) if is_theirs else step
    if isinstance(piece, OurLines):
        path = real(piece.path)
        text = read(path) or b""
        return Step(piece, Status.LEFTOVER, path, text, marks.take(text, piece.comment, str(path)))
    return Step(piece, Status.LEFTOVER)


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


def _refuse_blocked(steps: list[Step], force: bool) -> None:
    """Raises NotOurs for what is in the way; *force* takes what was changed by hand out of it."""
    _refuse([step for step in steps if step.status in BLOCKING and not (force and step.status is Status.CHANGED)])


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
