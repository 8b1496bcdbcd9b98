"""The store as programs use it: an image that is missing comes from a source or is built, and what nobody can use goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import ImageNotAllowed, ImageUnknown, NoStore
from belljar.image import Image
from belljar.image.store.store import DEFAULT_NAME, PREFIX, Store


class Images(Store):
    """Implements `ImageStore`."""

    _builds = True

    def ensure_default(self) -> Image:
        """The default image, built now (single flight, progress on stderr) when it is missing and is `debian12`."""
        try:
            return self.resolve(self.settings.default)
        except ImageUnknown:
            if self.settings.default != DEFAULT_NAME:
                raise
        if not self._builds:
            raise NoStore(
                f"image {DEFAULT_NAME}: this node has none, and none is built inside a batch job",
                hint=f"The site has to put it there: `belljar image build {DEFAULT_NAME}` or `belljar image sync`, as root.",
            )
        from belljar.image.build.debian import Recipe, build

        return build(self, Recipe(suite="bookworm", name=DEFAULT_NAME), only_if_missing=True)

    def ensure(self, reference: str) -> None:
        """See `ImageStore`: from a source that offers it, or built where it is the default."""
        with suppress(ImageUnknown):
            self._find(reference)
            return
        if self.settings.sources:
            from belljar.image.site.sync import pull

            try:
                pull(self, reference)
                return
            except ImageUnknown:
                if reference != self.settings.default:
                    raise
        if reference == self.settings.default:
            self.ensure_default()

    def settle(self, reference: str, *, own: bool) -> None:
        """For a batch job: this is the site's image from now on, as its store has it, though a private one be called so. With
        *own* a private image may stand in for one that the site does not have; else only one that a source states. Nothing is
        built from now on. Raises ImageUnknown, ImageNotAllowed, NoStore."""
        self._builds = False
        if self.shared:
            return
        with suppress(ImageUnknown):
            found, _ = self._find_in([self.site] if self.site else [], reference)
            self._settled[reference] = found.name.removeprefix(PREFIX)
            return
        if own:
            return
        from belljar.image.site.sync import pull

        try:
            self._settled[reference] = pull(self, reference).digest
        except ImageUnknown:
            self._find(reference)
            raise ImageNotAllowed(
                f"image {reference}: the site has none of this name, and your own of this name is not meant by its rules",
                hint="Ask for an image of the site, or ask your site for a rule `user:NAME *` (batch.allow).",
            ) from None

    def gc(self, *, dry_run: bool = False) -> Iterator[Path]:
        """Remove what nobody can use: images without a name that nobody holds, abandoned drafts and downloads, ramdisks of
        other versions. Yields each path, also with *dry_run*, which removes nothing."""
        from belljar.image.store.sweep import sweep

        return sweep(self, dry_run=dry_run)
