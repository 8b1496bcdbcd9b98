"""Is this image here? `Images.ensure` sees to it, for a name, a digest, an address or a path: nothing else asks a source or builds.

images/named/<key>.json      the `Note` of an address or a path
images/named/<key>.lock      held by the process that asks or imports
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

from belljar.errors import BadOption, BelljarError, ImageUnknown, NotPermitted
from belljar.host.files import read_json, write_whole
from belljar.host.locks import try_lock
from belljar.image import USUAL, is_container, is_source, name_of
from belljar.image.store.store import PREFIX, Store
from belljar.model import dumps
from belljar.records import dataclass, replace


@dataclass(frozen=True)
class Note:
    """What was known of an address or a path when it was asked last."""

    source: str = ""
    version: str = ""  # as the source calls it; "" where it does not say
    asked: float = 0.0
    problem: str = ""  # why it could not be asked, or its image not imported


class Images(Store):
    """A store that gets what it lacks."""

    _pulled = ""  # the one image that a batch job may import

    def ensure(self, reference: str, *, public_only: bool = False, now: float | None = None) -> str:
        """Make sure that the image of this name, digest, address or path is here. A name is brought from the first source that
        offers it, or built where it is the default; no source is asked for one that is here, and one that no source offers is
        refused by `resolve`. An address or a path is imported, and again when it has another version, for which it is asked no
        more often than `image.sync_interval` says. *public_only*: an address leads to public hosts only. Returns why another
        version could not be fetched, "" where nothing is wrong. Raises what keeps a missing image from coming."""
        if not is_source(reference):
            if not self._has(reference):
                self._get(reference)
            return ""
        if self.is_of_job and reference != self._pulled:
            return ""  # a batch job's image is not imported
        return self._ensure_source(reference, public_only, time.time() if now is None else now)

    def settle(self, reference: str, *, own: bool, pulls: bool = False) -> None:
        """For a batch job: from now on this name means the image in the site's store, even where a private one has the same name.
        Where the site has none: a private image with *own*, else only one that a source offers. Nothing is built or imported
        from now on, but this image of a registry with *pulls*. Raises ImageUnknown, NotPermitted, NoStore."""
        self.is_of_job, self._pulled = True, reference if pulls else ""
        if self.shared:
            return
        with suppress(ImageUnknown):
            name = name_of(reference) if is_source(reference) else reference
            folder, _ = self._find_in([self.site] if self.site else [], name)
            self._settled[reference], self._pulled = folder.name.removeprefix(PREFIX), ""
            return
        if own:
            return
        from belljar.image.site.sync import pull

        try:
            self._settled[reference] = pull(self, reference).digest
        except ImageUnknown:
            self._find(reference)
            raise NotPermitted(
                f"image {reference}: the site has no image of this name, and its rules do not allow your own",
                hint="Ask for an image of the site, or ask your site for a rule `user:NAME *` (batch.allow).",
            ) from None

    def gc(self, *, dry_run: bool = False) -> Iterator[Path]:
        """See `belljar.image.store.sweep`. Yields each path, also with *dry_run*, which removes nothing."""
        from belljar.image.store.sweep import sweep

        return sweep(self, dry_run=dry_run)

    def _has(self, reference: str) -> bool:
        with suppress(ImageUnknown):
            self._find(reference)
            return True
        return False

    def _get(self, reference: str) -> None:
        """Bring it from a source that offers it; the usual one is built where it is the default and no source has it."""
        if reference == self.settings.default == USUAL:
            from belljar.image.build.debian import usual

            usual(self)
        elif self.settings.sources:
            from belljar.image.site.sync import pull

            pull(self, reference)

    def _ensure_source(self, source: str, public_only: bool, now: float) -> str:
        """An image that is here is used at once: while another process asks or imports, and where the source cannot be asked."""
        from belljar.image.intake import fetch, intake, sources
        from belljar.image.progress import shown

        place = source.partition(":")[2]
        if is_container(source) and not place.startswith("/"):
            raise BadOption(f"{source}: not an absolute path", hint="Name it by its path from the root.")
        order = sources.Order(source, name_of(source), public_only=public_only)
        path = self.work_folder("named") / f"{fetch.key(source)}.json"
        lock = try_lock(path.with_suffix(".lock"))
        if not lock and not self._has(source):
            with shown() as progress:
                lock = intake.alone(self, path.stem, f"import {fetch.shown(source)}", progress, "named")
        with lock or nullcontext():
            note, is_here = _read(path), self._has(source)
            if is_here and (not lock or note.asked <= now < note.asked + self.settings.sync_interval):
                return note.problem
            note = replace(note, source=fetch.shown(source), asked=now, problem="")
            try:
                version = sources.version(order, self)
                if not is_here or (version and version != note.version):
                    sources.bring(self, order)
                note = replace(note, version=version or note.version)
            except BelljarError as exc:
                if not is_here:
                    raise
                note = replace(note, problem=exc.message)
            write_whole(path, dumps(note))
            return note.problem


def _read(path: Path) -> Note:
    from belljar.reading import from_json

    with suppress(OSError, ValueError, BelljarError):
        return from_json(Note, read_json(path))
    return Note()
