"""An image store and overlays without disks, for stories: images are words, and every accident can be ordered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from belljar.errors import BelljarError, ImageUnknown, OverLimit
from belljar.host.python.interpreter import Interpreter
from belljar.image import BootFiles, Image
from belljar.model import GIB, Context, MachineId
from belljar.records import dataclass, field


def fake_image(name: str, *, virtual_size: int = 8 * GIB) -> Image:
    """An image of this name; its digest is the name's."""
    digest = sha256(name.encode()).hexdigest()
    folder = Path("/fake/images") / f"sha256-{digest}"
    return Image(
        digest, (name,), folder / "disk.qcow2", virtual_size, folder / "kernel", folder / "initrd", "quiet",
        f"fake {name}", 0.0, "Fake GNU/Linux", folder.parent, {"agent_in_initrd": True},
    )  # fmt: skip


@dataclass
class FakeStore:
    """Images by name or digest. An error put into `failures` under a reference is raised when that is resolved."""

    known: dict[str, Image] = field(default_factory=lambda: {"debian12": fake_image("debian12")})
    failures: dict[str, BelljarError] = field(default_factory=dict)

    def resolve(self, reference: str) -> Image:
        if failure := self.failures.get(reference):
            raise failure
        for image in self.known.values():
            if reference in image.names or (len(reference) >= 8 and image.digest.startswith(reference)):
                return image
        raise ImageUnknown(f"no image is called {reference!r}")

    def ensure(self, reference: str, *, public_only: bool = False) -> str:
        """Nothing is ever missing that can be had."""
        return ""

    def settle(self, reference: str, *, own: bool, pulls: bool = False) -> None:
        """There is one store only."""

    def boot_files(self, image: Image, context: Context = Context.AUTO) -> BootFiles:
        return BootFiles(image.kernel, image.initrd, image.append, image.digest)

    def interpreter(self) -> Interpreter:
        return Interpreter("0" * 64, Path(__file__))  # its content does not matter

    def work_folder(self, name: str) -> Path:
        raise AssertionError("nothing here is made in a folder")

    @contextmanager
    def hold(self, image: Image, id: MachineId) -> Iterator[None]:
        if all(image.digest != one.digest for one in self.known.values()):
            raise ImageUnknown(f"image {image.names[0]} was removed before machine {id} could use it")
        yield


@dataclass
class FakeOverlays:
    """Overlays as small files, so that a story sees what was left behind. `failure` is raised by the next `create`, `stuck`
    by every `discard`."""

    failure: BelljarError | None = None
    stuck: OSError | None = None

    def create(self, path: Path, image: Image, size: int | None) -> int:
        self.check_room(path.parent)
        size = self.size(image, size)
        path.write_text(image.digest)
        return size

    def check_room(self, folder: Path) -> None:
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure

    def size(self, image: Image, wanted: int | None) -> int:
        if wanted is not None and wanted < image.virtual_size:
            raise OverLimit(f"a disk of {wanted} bytes is smaller than the image's {image.virtual_size}")
        return wanted or image.virtual_size

    def discard(self, path: Path) -> None:
        if self.stuck:
            raise self.stuck
        with suppress(FileNotFoundError):
            path.unlink()
