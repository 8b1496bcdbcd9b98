"""A site in small: somebody who publishes, a repository, and a node that gets its images from there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.unit.image.http_server import Server
from tuf.api.metadata import Metadata

from belljar.errors import ImageError
from belljar.host import commands
from belljar.image import Image, Settings
from belljar.image.images import Images
from belljar.image.intake import intake
from belljar.image.progress import Progress
from belljar.image.site import publish
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.model import MIB

SIZE = 16 * MIB


@dataclass
class Site:
    """`put` publishes a small image; `serve` lets a web server have what is in the folder."""

    folder: Path  # the repository
    publisher: Images
    node: Store
    keys: Path
    line: str = ""  # of `image.sources`
    moment: float = 0.0  # seconds that the publisher's clock is ahead

    def begin(self) -> Site:
        self.line = publish.init(self.folder, self.keys, time.time() + self.moment)
        return self

    def make(
        self, name: str | None, content: bytes, *, to: Store, kernel: bytes = b"a kernel", **facts: object
    ) -> Image:
        """A small image in a store, its disk as QEMU writes it."""
        with intake.draft(to, name or "nameless") as folder:
            raw = folder / "raw"
            raw.write_bytes(bytes(1 << 16) + content)
            os.truncate(raw, SIZE)
            disk = str(folder / manifest.DISK)
            commands.run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), disk], timeout=30)
            raw.unlink()
            (folder / manifest.KERNEL).write_bytes(kernel)
            (folder / manifest.INITRD).write_bytes(b"a ramdisk")
            what = manifest.Facts(
                "build debian bookworm", "quiet", 1.0, "Debian", SIZE, {"agent_in_initrd": True, **facts}
            )
            return to.publish(folder, what, name)

    def put(self, name: str, content: bytes, *, by: str = "", **more: Any) -> Image:
        """Publish an image, by the site's keys or by a delegate's."""
        image = self.make(None, content, to=self.publisher, **more)
        self.change(lambda repository: repository.put(self.publisher, name, image, Progress()), by=by)
        return image

    def change(self, change: Callable[[publish.Repository], object] = bool, *, by: str = "") -> publish.Repository:
        """Change the repository; after a delegate, the site's timer renews the timestamp."""
        for keys in [self.key(by)] if by else []:
            with publish.opened(self.line, publish.load_keys([keys]), time.time() + self.moment) as repository:
                change(repository)
        with publish.opened(self.line, publish.load_keys([self.keys]), time.time() + self.moment) as repository:
            if not by:
                change(repository)
        return repository

    def key(self, name: str) -> Path:
        path = self.keys.with_name(f"{name}.pem")
        publish.make_key(path)
        return path

    def word(self, name: str) -> str:
        return publish.public_word(publish.load_keys([self.key(name)])[0])

    def delegate(self, role: str, names: str, *keys: str, threshold: int = 1) -> None:
        words = [self.word(key) for key in keys or (role,)]
        self.change(lambda repository: repository.delegate(role, names, words, threshold))

    def trusting(self, *lines: str, **settings: object) -> Store:
        """The node, with this source (the folder)."""
        self.node.settings = replace(self.node.settings, sources=lines or (self.line,), **settings)  # type: ignore[arg-type]
        return self.node

    def serve(self, server: Server, **tricks: object) -> str:
        """Have the web server serve the folder as it is now. Returns the line for it."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                data = path.read_bytes()
                place = f"/images/{path.relative_to(self.folder)}"
                server.put(place, data, etag=f'"{sha256(data).hexdigest()[:16]}"', **tricks)
        return f"{server.address}/images#{self.line.partition('#')[2]}"

    def files(self) -> list[Path]:
        return sorted((self.folder / "targets").glob("*/*"))

    def metadata(self, role: str) -> Path:
        """The newest file of a role."""
        if role == "timestamp":
            return self.folder / "metadata/timestamp.json"
        return max((self.folder / "metadata").glob(f"*.{role}.json"), key=lambda path: int(path.name.partition(".")[0]))

    def forge(self, role: str, change: Callable[[Any], object], *keys: Path) -> None:
        """Change the newest file of a role in place, as somebody who has these keys."""
        path = self.metadata(role)
        metadata: Metadata[Any] = Metadata.from_bytes(path.read_bytes())
        change(metadata.signed)
        if keys:
            metadata.signatures.clear()
        for signer in publish.load_keys(keys):
            metadata.sign(signer, append=True)
        path.write_bytes(metadata.to_bytes())


def site_in(folder: Path, settings: Settings) -> Site:
    publisher, node = (Images(folder / name, None, settings) for name in ("publisher", "node"))
    return Site(folder / "repository", publisher, node, folder / "keys").begin()


def nothing_left(store: Store) -> bool:
    """Neither images nor drafts."""
    drafts = store.folder / "drafts"
    return store.images() == [] and (not drafts.exists() or list(drafts.iterdir()) == [])


def refused(site: Site, kind: type[ImageError], what: str, name: str = "base") -> ImageError:
    with pytest.raises(kind, match=what) as caught:
        site.node.ensure(name)
    assert nothing_left(site.node)
    return caught.value
