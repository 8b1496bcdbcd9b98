"""Puts the pieces of a site in place and takes them out again. Knows no batch system: pieces and commands are handed
in.

Our lines in a site's file stand between marks, and a copy is kept beside it. A file of somebody else's is never
overwritten, one of ours that was changed by hand only with --force. An installation that fails half-way is undone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from belljar.batch.install import files
from belljar.batch.install import pieces as kinds
from belljar.batch.install.files import Record, Undo, digest, read
from belljar.batch.install.pieces import Change, OurFile, Piece, Place, Status, Step
from belljar.errors import BadOption, BelljarError, NotOurs, SystemSilent

BLOCKING = (Status.CHANGED, Status.FOREIGN, Status.UNKNOWN)
TO_DO = (Status.MISSING, Status.DIFFERENT)


class Engine:
    """One system in one place."""

    def __init__(
        self, system: str, site: kinds.SiteOfSystem, place: Place, own: Callable[[Place], list[Piece]],
        execute: Callable[[kinds.Argv, bytes], bytes], command: str = "",
    ) -> None:  # fmt: skip
        """*own*: the pieces every system needs (the launchers). *command*: what installs just this, for people."""
        self._command = command or f"belljar batch install {system}"
        self._system, self._site, self._place, self._own, self._execute = system, site, place, own, execute
        self._record_path = files.path_of(place.folder, system)

    def plan(self) -> list[Step]:
        """How each piece stands. Changes nothing."""
        ground = self._ground()
        steps = [piece.look(ground) for piece in self._pieces()]
        # A guard that found nothing is not worth a word.
        return [one for one in steps if not (isinstance(one.piece, kinds.Guard) and one.status is Status.THERE)]

    def install(self, *, prefix: str = "", force: bool = False) -> list[Step]:
        """Put in place what is missing or different: all, or nothing. Returns what was done. Raises NotOurs."""
        if not self._place.folder.is_dir():
            raise BadOption(
                f"{self._place.folder}: no such folder", hint="Tell with --folder where the system's settings are."
            )
        ground, pieces = self._ground(), self._pieces()
        record, before = ground.record, copy.deepcopy(ground.record)
        steps = [piece.look(ground) for piece in pieces]
        _refuse_blocked(steps, force)
        if not force:
            self.refuse_unwanted()
        wanted = [step for step in steps if step.status in (*TO_DO, Status.CHANGED)]
        with _all_or_nothing() as ground.undo:
            ground.undo.append(partial(files.save, self._record_path, before))
            record.prefix, record.options = prefix, dict(self._place.options)
            for step in wanted:
                step.piece.put(step, ground)
            if record != before:
                ground.save()
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
        """Take out what is ours; what was done. Raises NotOurs before anything is touched, unless *force*, for a file
        that was changed by hand, or that a script of the site's calls."""
        ground, pieces = self._ground(), self._pieces()
        if not force:
            _refuse_changed(ground.record)
            refuse_called(pieces, ground.record)
        done = self._take_changes(pieces, ground)
        if force:
            ground.record.changes = ()  # of what is no more, a queue that was deleted for instance
        comments = {piece.name: piece.comment for piece in pieces if isinstance(piece, kinds.OurLines)}
        for name in list(ground.record.edited):
            done += kinds.take_lines(Path(name), comments.get(name, "#"), ground)
        for name in reversed(list(ground.record.files)):
            done += kinds.take_file(name, ground)
        _drop_empty_folders({self._place.wrapper.parent, self._place.belljar.parent}, pieces)
        ground.save()
        return done

    def check(self) -> Iterator[kinds.Finding]:
        """The pieces and what the system's own side found, with remedies."""
        for step in self.plan():
            if step.status is not Status.ADVICE:
                is_ours = step.status in (*TO_DO, Status.CHANGED)
                again = f"{self._command} --force" if step.status is Status.CHANGED else self._command
                remedy = again if is_ours else "See the detail."
                where = f" ({step.path})" if step.path else ""
                detail = step.detail or step.status.value
                yield kinds.Finding(f"{step.piece.purpose}{where}", step.status is Status.THERE, detail, remedy)
        try:
            yield from self._site.findings(self._place)
        except BelljarError as exc:
            yield kinds.Finding(f"{self._system} itself", False, exc.message, exc.hint)

    def _ground(self) -> kinds.Ground:
        try:
            record = files.load(self._record_path)
        except ValueError as exc:
            raise NotOurs(str(exc), hint="Look at the file; without it, what is installed cannot be told.") from exc
        return kinds.Ground(self._place.run, self._execute, record, lambda: files.save(self._record_path, record))

    def _pieces(self) -> list[Piece]:
        return kinds.joined([*self._own(self._place), *self._site.pieces(self._place)])

    def refuse_unwanted(self) -> None:
        """Raises NotOurs for what other options, or another prefix, have put there: jobs may need it. More can be
        added."""
        record, wanted = self._ground().record, {piece.name for piece in self._pieces()}
        found = [name for name in (*record.files, *record.edited, *record.changes) if name not in wanted]
        if record.options != dict(self._place.options) or str(self._place.wrapper) not in record.files:
            hint = f"Let jobs with machines end, then `belljar batch uninstall {self._system}`, and install again."
            _refuse((f"{name}: installed with other options, and not wanted with these" for name in found), hint)

    def _take_changes(self, pieces: list[Piece], ground: kinds.Ground) -> list[str]:
        """In reverse order. A setting that the site had before we came is not ours to take back."""
        changes = [piece for piece in reversed(pieces) if isinstance(piece, Change)]
        ours = [piece for piece in changes if piece.purpose in ground.record.changes]
        steps = [piece.look(ground) for piece in ours]
        if silent := next((step for step in steps if step.status is Status.UNKNOWN), None):
            raise SystemSilent(
                f"{silent.piece.purpose}: {silent.detail}",
                hint=f"Nothing is forgotten and nothing was taken out: try again when {self._system} answers.",
            )
        return [line for piece in ours for line in piece.take(ground)]


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
    except BaseException:  # Ctrl-C leaves no half of an installation either
        for back in reversed(undo):
            with suppress(OSError, BelljarError):
                back()
        raise
