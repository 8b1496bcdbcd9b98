"""A site in small: one who publishes, a master store, and a node that gets its images from there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import pytest
from tests.unit.image.http_server import Server

from belljar.errors import ImageError
from belljar.host import commands
from belljar.image import Image, Settings
from belljar.image.images import Images
from belljar.image.intake import intake
from belljar.image.progress import Silent
from belljar.image.site import signing
from belljar.image.site.publish import Change, publish
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.model import MIB

SIZE = 16 * MIB


@dataclass
class Site:
    """`put` publishes a small image; `serve` lets a web server have what is in the folder."""

    folder: Path  # the master store
    publisher: Images
    node: Store
    key_file: Path
    moment: float = 1_000_000.0

    def make(self, name: str | None, content: bytes, *, to: Store) -> Image:
        """A small image in a store, its disk as QEMU writes it."""
        with intake.draft(to, name or "nameless") as folder:
            raw = folder / "raw"
            raw.write_bytes(bytes(1 << 16) + content)
            os.truncate(raw, SIZE)
            disk = str(folder / manifest.DISK)
            commands.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), disk], timeout=30)
            raw.unlink()
            (folder / manifest.KERNEL).write_bytes(b"a kernel")
            (folder / manifest.INITRD).write_bytes(b"a ramdisk")
            facts = {"agent_in_initrd": True}
            what = manifest.Facts("build debian bookworm", "quiet", 1.0, "Debian", SIZE, facts)
            return to.publish(folder, what, name)

    def key(self, name: str = "key") -> signing.Signer:
        path = self.key_file.with_name(name)
        if not path.exists():
            signing.make_key(path)
        return signing.load_signer(path)

    def word(self, name: str = "key") -> str:
        """The key's line for `image.trust`, but for the names."""
        return f"ed25519:{signing.public_word(self.key(name).key.public_key())}"

    def put(self, name: str, content: bytes, *, signed: bool = True, by: str = "key", **change: object) -> Image:
        image = self.make(None, content, to=self.publisher)
        self.change({name: image}, signed=signed, by=by, **change)
        return image

    def change(self, names: dict[str, Image], *, signed: bool = True, by: str = "key", **change: object) -> None:
        self.moment += 1
        signer = self.key(by) if signed else None
        order = Change(names, signer=signer, **change)  # type: ignore[arg-type]
        publish(self.publisher, self.folder, order, Silent(), now=lambda: self.moment)

    def trusting(self, *lines: str, source: str = "", **settings: object) -> Store:
        """The node, with this policy (every name by the site's key) and source (the folder)."""
        lines = lines or (f"* {self.word()}",)
        self.node.settings = replace(
            self.node.settings, trust=lines, sources=(source or str(self.folder),), **{"sync_interval": 0.0, **settings}
        )  # type: ignore[arg-type]
        return self.node

    def serve(self, server: Server, **tricks: object) -> str:
        """Have the web server serve the folder as it is now."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                place = f"/images/{path.relative_to(self.folder)}"
                server.put(place, data, etag=f'"{sha256(data).hexdigest()[:16]}"', **tricks)
        return f"{server.address}/images"

    def blobs(self) -> list[Path]:
        return sorted(path for path in (self.folder / "blobs").iterdir())


def site_in(folder: Path, settings: Settings) -> Site:
    publisher, node = (Images(folder / name, None, settings) for name in ("publisher", "node"))
    return Site(folder / "master", publisher, node, folder / "key")


def nothing_left(store: Store) -> bool:
    """Neither images nor drafts."""
    drafts = store.folder / "drafts"
    return store.images() == [] and (not drafts.exists() or list(drafts.iterdir()) == [])


def refused(site: Site, kind: type[ImageError], what: str, name: str = "base") -> None:
    with pytest.raises(kind, match=what):
        site.node.ensure(name)
    assert nothing_left(site.node)
