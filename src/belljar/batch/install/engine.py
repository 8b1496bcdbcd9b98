"""Puts the pieces of a site in place and takes them out again. Knows no batch system: pieces and commands are handed in.

Nothing of the site's is lost: its files get our lines between marks, after a copy was laid beside them; a file of
somebody else's is never overwritten, and one of ours that was changed by hand is neither overwritten nor removed unless
that is asked for. An installation that fails half-way takes back what it did.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from belljar.batch.install import pieces as kinds
from belljar.batch.install import record as records
from belljar.batch.install.files import Undo, read
from belljar.batch.install.pieces import (
    Argv,
    Change,
    Finding,
    Ground,
    OurFile,
    Piece,
    Place,
    SiteOfSystem,
    Status,
    Step,
)
from belljar.batch.install.record import Choice, Record, digest
from belljar.errors import BadOption, BelljarError, NotOurs, SystemSilent
from belljar.records import replace

BLOCKING = (Status.CHANGED, Status.FOREIGN, Status.UNKNOWN)
TO_DO = (Status.MISSING, Status.DIFFERENT)


class Engine:
    """One system in one place."""

    def __init__(
        self, system: str, site: SiteOfSystem, place: Place, own: Callable[[Place], list[Piece]],
        execute: Callable[[Argv, bytes], bytes],
    ) -> None:  # fmt: skip
        """*own*: the pieces every system needs (the launchers)."""
        self._system, self._site, self._place, self._own, self._execute = system, site, place, own, execute
        self._record_path = records.path_of(place.folder, system)
        self._choice = Choice(dict(place.options), str(place.wrapper), str(place.belljar))

    def plan(self) -> list[Step]:
        """How each piece stands, what is no longer wanted last. Changes nothing."""
        ground, pieces = self._ground(), self._pieces(self._place)
        steps = [piece.look(ground) for piece in pieces]
        # A guard that found nothing is not worth a word.
        told = [one for one in steps if not (isinstance(one.piece, kinds.Guard) and one.status is Status.THERE)]
        return [*told, *self._leftovers(ground, pieces)]

    def install(self, *, prefix: str = "", force: bool = False) -> list[Step]:
        """Put in place what is missing or different, and take out what other options had put there; all of it, or
        nothing. Returns the steps that were done. Raises NotOurs where something is in the way."""
        if not self._place.folder.is_dir():
            raise BadOption(
                f"{self._place.folder}: no such folder", hint="Tell with --folder where the system's settings are."
            )
        ground, pieces = self._ground(), self._pieces(self._place)
        record, before = ground.record, copy.deepcopy(ground.record)
        _refuse_blocked([piece.look(ground) for piece in pieces], force)
        leftovers = self._leftovers(ground, pieces)
        if not force:
            refuse_called([step.piece for step in leftovers], record)
        with _all_or_nothing() as ground.undo:
            ground.undo.append(partial(records.save, self._record_path, before))
            record.prefix = prefix
            record.choices = (*(one for one in record.choices if one != self._choice), self._choice)
            if leftovers:
                ground.save()
            self._take_changes([step.piece for step in leftovers], ground)
            wanted = [step for piece in pieces if (step := piece.look(ground)).status in (*TO_DO, Status.CHANGED)]
            for step in wanted:
                step.piece.put(step, ground)
            for step in reversed(leftovers):
                if not isinstance(step.piece, Change):
                    list(step.piece.take(ground))
            record.choices = (self._choice,)
            if record != before:
                ground.save()
        launchers = {Path(name).parent for one in before.choices for name in (one.wrapper, one.belljar)}
        _drop_empty_folders(launchers, [step.piece for step in leftovers])
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
        ground, pieces = self._ground(), self._pieces(self._place)
        pieces += [step.piece for step in self._leftovers(ground, pieces)]
        if not force:
            _refuse_changed(ground.record)
            refuse_called(pieces, ground.record)
        done = self._take_changes(pieces, ground)
        comments = {piece.name: piece.comment for piece in pieces if isinstance(piece, kinds.OurLines)}
        for name in list(ground.record.edited):
            done += kinds.take_lines(Path(name), comments.get(name, "#"), ground)
        for name in reversed(list(ground.record.files)):
            done += kinds.take_file(name, ground)
        _drop_empty_folders({self._place.wrapper.parent, self._place.belljar.parent}, pieces)
        ground.save()
        return done

    def check(self) -> Iterator[Finding]:
        """The pieces and what the system's own side found, with remedies."""
        for step in self.plan():
            if step.status is not Status.ADVICE:
                is_ours = step.status in (*TO_DO, Status.CHANGED, Status.LEFTOVER)
                remedy = f"belljar batch install {self._system}" if is_ours else "See the detail."
                where = f" ({step.path})" if step.path else ""
                detail = step.detail or step.status.value
                yield Finding(f"{step.piece.purpose}{where}", step.status is Status.THERE, detail, remedy)
        try:
            yield from self._site.findings(self._place)
        except BelljarError as exc:
            yield Finding(f"{self._system} itself", False, exc.message, exc.hint)

    def _ground(self) -> Ground:
        try:
            record = records.load(self._record_path)
        except ValueError as exc:
            raise NotOurs(str(exc), hint="Look at the file; without it, what is installed cannot be told.") from exc
        return Ground(self._place.run, self._execute, record, lambda: records.save(self._record_path, record))

    def _pieces(self, place: Place) -> list[Piece]:
        return kinds.joined([*self._own(place), *self._site.pieces(place)])

    def _leftovers(self, ground: Ground, wanted: list[Piece]) -> list[Step]:
        """Pieces that other options, or another prefix, had put there, and that are not among the *wanted* ones."""
        kept, found = {(type(piece), piece.name) for piece in wanted}, list[Step]()
        for choice in ground.record.choices:
            if choice == self._choice:
                continue
            wrapper, belljar = Path(choice.wrapper), Path(choice.belljar)
            place = replace(self._place, options=choice.options, wrapper=wrapper, belljar=belljar)
            with suppress(BelljarError):  # options of what is no more, a queue that was deleted for instance
                for piece in self._pieces(place):
                    key = type(piece), piece.name
                    if key not in kept and piece.name in piece.noted(ground.record):
                        kept.add(key)
                        found.append(piece.leftover(ground))
        return found

    def _take_changes(self, pieces: list[Piece], ground: Ground) -> list[str]:
        """In reverse order. A setting that the site had before we came is not ours to take back."""
        ours = [piece for piece in reversed(pieces) if isinstance(piece, Change)]
        steps = [piece.look(ground) for piece in ours if piece.purpose in ground.record.changes]
        if silent := next((step for step in steps if step.status is Status.UNKNOWN), None):
            raise SystemSilent(
                f"{silent.piece.purpose}: {silent.detail}",
                hint=f"Nothing is forgotten and nothing was taken out: try again when {self._system} answers.",
            )
        return [line for step in steps for line in step.piece.take(ground)]


def _refuse_blocked(steps: list[Step], force: bool) -> None:
    """Raises NotOurs for what is in the way; *force* takes what was changed by hand out of it."""
    found = [step for step in steps if step.status in BLOCKING and not (force and step.status is Status.CHANGED)]
    _refuse(f"{step.path or step.piece.purpose}: {step.status.value}: {step.detail}" for step in found)


def _refuse_changed(record: Record) -> None:
    """Raises NotOurs where a file of ours was changed by hand."""
    there = ((name, known, read(Path(name))) for name, known in record.files.items())
    changed = [name for name, known, text in there if text is not None and digest(text) != known]
    hint = "Look at it first; `belljar batch uninstall --force` removes it all the same."
    _refuse((f"{name}: changed since belljar wrote it" for name in changed), hint)


def refuse_called(pieces: list[Piece], record: Record) -> None:
    """What a site's own script starts with would be missing from it: some daemons do not start then, some drain nodes."""
    ours = [piece for piece in pieces if isinstance(piece, OurFile) and piece.name in record.files]
    found = []
    for caller in dict.fromkeys(piece.caller for piece in ours if piece.caller):
        with suppress(OSError):
            text = read(caller) or b""
            for piece in ours:  # the launchers by their paths, whoever asked for them
                word = piece.path.name if piece.caller == caller else str(piece.path)
                if os.fsencode(word) in text:
                    found.append(f"{caller}: calls {piece.path}")
    _refuse(found, "Take that out of your file first.")


def _refuse(lines: Iterable[str], hint: str | None = None) -> None:
    """One line for each thing in the way."""
    if text := "\n".join(lines):
        raise NotOurs(text, hint=hint)


def _drop_empty_folders(ours: set[Path], pieces: list[Piece]) -> None:
    """*ours*, and the folders that pieces lay in."""
    lain_in = {one for piece in pieces if isinstance(piece, OurFile) for one in [*piece.path.parents][: piece.folders]}
    for folder in sorted(ours | lain_in, reverse=True):  # what lies in a folder stands before it
        with suppress(OSError):  # it is not empty, or not there
            os.rmdir(folder)


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
