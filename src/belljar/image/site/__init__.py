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
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from belljar.errors import BadSetting
from belljar.image.intake import fetch
from belljar.records import dataclass

if TYPE_CHECKING:
    from tuf.api.metadata import TargetFile

PIN = "#sha256="


def target_path(name: str, file: str) -> str:
    """What TUF calls a file of an image; a delegation of NAMES is for the paths NAMES/*."""
    return f"{name}/{file}.zst"


def packed_file(target: TargetFile) -> str:
    """Where it lies below targets/."""
    name, _, file = target.path.partition("/")
    return f"{name}/{target.hashes['sha256']}.{file}"


@dataclass(frozen=True)
class Source:
    """Where a repository is, and which root metadata a node trusts."""

    address: str  # file, http or https, without a slash at its end
    root: str  # sha256 of a version of its root metadata

    @property
    def folder(self) -> Path | None:
        """Where it is, on a file system."""
        return fetch.local_path(self.address)

    @property
    def shown(self) -> str:
        """Its address without a password."""
        return fetch.shown(self.address)

    def origin(self, name: str) -> str:
        """How an image knows that this name came to it from here."""
        return f"{name} {self.shown}"


def source_of(line: str) -> Source:
    """The source that a line of `image.sources` means. Raises BadSetting."""
    address, _, root = line.rpartition(PIN)
    if not re.fullmatch(r"[0-9a-f]{64}", root):
        hint = "`belljar image publish --init` printed the whole line: docs/image-life.md"
        raise BadSetting(
            f"image.sources: {line!r} does not end with {PIN}DIGEST, the digest of its root metadata", hint=hint
        )
    address = address.rstrip("/")
    if address.startswith("/"):
        return Source(Path(address).as_uri(), root)
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - it is checked when it is asked for
    except ValueError as exc:
        raise BadSetting(f"image.sources: {address!r} is not a valid address: {exc}") from exc
    is_complete = bool(parts.hostname) if parts.scheme in ("http", "https") else parts.path and not parts.netloc
    if parts.scheme not in ("file", "http", "https") or not is_complete or parts.query or parts.fragment:
        hint = "write /PATH#sha256=DIGEST or https://HOST/PATH#sha256=DIGEST"
        raise BadSetting(
            f"image.sources: {address!r} is not an absolute path or an address: file, http, https", hint=hint
        )
    return Source(address, root)
