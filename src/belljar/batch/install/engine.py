"""Puts the pieces of a site in place and takes them out again. Knows no batch system: the pieces are handed in.

All is looked at before anything is touched. An installation that ended half-way is made whole by the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from belljar.batch.install.pieces import Change, OurFile, OurFolder, Piece, Place, SiteOfSystem, Status, Step
from belljar.errors import BadOption, BelljarError, UsageError
from belljar.findings import Finding, expect, fail
from belljar.records import dataclass

TO_DO = (Status.MISSING, Status.DIFFERENT)


@dataclass(frozen=True)
class Installation:
    """One system in one place."""

    system: str
    site: SiteOfSystem
    place: Place
    launchers: Mapping[str, bytes]
    command: str  # what installs just this, for people
    before: Place | None = None  # as at the last installation

    def pieces(self, place: Place) -> list[Piece]:
        """The folder with all that lies beside the launchers, then the rest."""
        ours, files, rest = place.wrapper.parent, dict(self.launchers), list[Piece]()
        for piece in self.site.pieces(place):
            if isinstance(piece, OurFile) and piece.path.parent == ours:
                files[piece.path.name] = piece.content
            else:
                rest.append(piece)
        return [OurFolder("launchers and hooks", ours, files), *rest]

    def plan(self) -> list[Step]:
        """How each piece stands. Changes nothing."""
        return [piece.look(self.place) for piece in self.pieces(self.place)]

    def stale(self) -> list[Piece]:
        """What the last installation put in place, and this one does not want."""
        if self.before is None or self.before == self.place:
            return []
        names = {piece.name for piece in self.pieces(self.place)}
        return [piece for piece in self.pieces(self.before) if piece.name not in names]

    def install(self) -> list[Step]:
        """Put in place what is missing or different. Returns what was done. Raises UsageError."""
        if not self.place.folder.is_dir():
            raise BadOption(f"{self.place.folder}: no such folder", hint="Name the system's folder with --folder.")
        steps, stale = self.plan(), self.stale()
        self._must_answer([*stale, *(step.piece for step in steps)])
        clashes = [step for step in steps if step.status is Status.CLASH]
        if clashes:
            hint = "Do what it says there, then run it again; `belljar batch install --print` shows ours."
            raise UsageError("\n".join(f"{step.piece.name}: {step.detail}" for step in clashes), hint=hint)
        for piece in reversed(stale):
            piece.take(self.place)
        done = [step for step in steps if step.status in TO_DO]
        for step in done:
            step.piece.put(self.place)
        return done

    def reread(self) -> list[str]:
        """Have the system read its files again. Returns what went wrong: that can be repeated by hand."""
        trouble = []
        for argv in self.site.after(self.place):
            try:
                self.place.run(argv)
            except BelljarError as exc:
                trouble.append(f"{' '.join(argv)}: {exc.message}")
        return trouble

    def uninstall(self) -> list[str]:
        """Take out what is ours, the folder last. Returns what was done. Raises BelljarError before anything is touched."""
        folder, *rest = self.pieces(self.place)
        self._must_answer(rest)
        # Settings first, the last of them first: the files they need are there as long as they are.
        in_order = sorted(reversed(rest), key=lambda piece: not isinstance(piece, Change))
        return [done for piece in [*in_order, folder] if (done := piece.take(self.place))]

    def _must_answer(self, pieces: list[Piece]) -> None:
        """A system that does not answer would look like one that has no setting of ours."""
        if not (self.site.needs.answers and any(isinstance(piece, Change) for piece in pieces)):
            return
        try:
            self.place.run(self.site.needs.answers)
        except BelljarError as exc:
            hint = f"Nothing was changed. Try again when {self.system} answers. {exc.hint}"
            raise BelljarError(f"{self.system} does not answer: {exc.message}", hint=hint) from exc

    def check(self) -> Iterator[Finding]:
        """The pieces and what the system's own side found, with remedies."""
        for step in self.plan():
            if step.status is not Status.ADVICE:
                path = getattr(step.piece, "path", None)
                what = f"{step.piece.purpose} ({path})" if path else step.piece.purpose
                remedy = self.command if step.status in TO_DO else "See the detail."
                yield expect(what, step.status is Status.THERE, step.detail or step.status.value, remedy)
        try:
            yield from self.site.findings(self.place)
        except BelljarError as exc:
            yield fail(f"{self.system} itself", exc.message, exc.hint)
