"""The images of a site, in a repository of The Update Framework: https://theupdateframework.github.io/specification/latest/

    metadata/N.root.json        the keys of all roles; each version is signed by the keys of the one before
    metadata/N.targets.json     the images of the site, and the delegations: which role may publish which names
    metadata/N.ROLE.json        the images of a delegated role
    metadata/N.snapshot.json    which versions belong together; metadata/timestamp.json says which snapshot is the present one
    targets/NAME/SHA256.FILE.zst

`publish` writes one, `client` reads it, `sync` brings images from there. This module is read without TUF's library.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from belljar.errors import BadSetting
from belljar.image.intake import fetch
from belljar.records import dataclass

PIN = "#sha256="
LINE = re.compile(rf"(/[^?#]*|file:///[^?#]+|https?://[^/?#]+[^?#]*){PIN}([0-9a-f]{{64}})")


def target_path(name: str, file: str) -> str:
    """What TUF calls a file of an image; a delegation of NAMES is for the paths NAMES/*."""
    return f"{name}/{file}.zst"


@dataclass(frozen=True)
class Source:
    """Where a repository is, and which root metadata a node trusts."""

    address: str  # file, http or https, without a slash at its end
    root: str  # sha256 of a version of its root metadata

    @property
    def folder(self) -> Path | None:
        return fetch.local_path(self.address)

    @property
    def shown(self) -> str:
        return fetch.shown(self.address)

    def origin(self, name: str) -> str:
        """How an image knows that this name came to it from here."""
        return f"{name} {self.shown}"


def source_of(line: str) -> Source:
    """The source that a line of `image.sources` means. Raises BadSetting."""
    with suppress(ValueError):
        match = LINE.fullmatch(line)
        if match and urlsplit(match[1]).port != 0:  # it is checked when it is asked for
            address = match[1].rstrip("/")
            return Source(Path(address).as_uri() if address.startswith("/") else address, match[2])
    hint = "`belljar image publish --init` printed the whole line: docs/batch/images.md"
    form = f"/PATH{PIN}DIGEST or https://HOST/PATH{PIN}DIGEST"
    raise BadSetting(f"image.sources: {line!r} is not of the form {form}", hint=hint)
