"""The store as programs use it: an image that is missing comes from a source or is built, what nobody can use is removed, and
what the importer of an image said of it can be changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.errors import ImageNotAllowed, ImageUnfit, ImageUnknown, NoStore
from belljar.hints import Any
from belljar.image import Image
from belljar.image.store import manifest
from belljar.image.store.store import DEFAULT_NAME, PREFIX, Store
from belljar.model import Context, Firmware


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
        """For a batch job: from now on this name means the image in the site's store, even where a private one has the same name.
        Where the site has none: a private image with *own*, else only one that a source offers. Nothing is built from now
        on. Raises ImageUnknown, ImageNotAllowed, NoStore."""
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
                f"image {reference}: the site has no image of this name, and its rules do not allow your own",
                hint="Ask for an image of the site, or ask your site for a rule `user:NAME *` (batch.allow).",
            ) from None

    def gc(self, *, dry_run: bool = False) -> Iterator[Path]:
        """See `belljar.image.store.sweep`. Yields each path, also with *dry_run*, which removes nothing."""
        from belljar.image.store.sweep import sweep

        return sweep(self, dry_run=dry_run)

    def amend(
        self,
        image: Image,
        *,
        context: Context | None = None,
        firmware: Firmware | None = None,
    ) -> Image:
        """Change what the importer of an image said of it; None leaves a thing as it is. Running machines are not touched,
        older templates of the image are not used any more. Raises ImageUnfit, NotPermitted."""
        self._ours(image, "changed")
        changes: dict[str, Any] = {}
        if context is not None:
            changes["context"] = None if context is Context.AUTO else context.value
        if firmware is not None:
            _check(image, firmware)
            changes["use_firmware"] = firmware.value
        manifest.set_facts(image.disk.parent, changes, mode=self.file_mode)
        return manifest.read(image.disk.parent, image.names)


def _check(image: Image, firmware: Firmware) -> None:
    if image.kernel is not None:
        raise ImageUnfit(
            "the image is booted directly, by a kernel that was taken out of it",
            hint=f"Remove it, and import its disk again with `--firmware {firmware.value}`.",
        )
    if firmware.value not in image.facts.get("firmware", ()):
        raise ImageUnfit(f"the image's disk has no boot loader for {firmware.value}")
