"""A machine that works on an untrusted disk: it mounts the disk's file systems, does one task, and is discarded.

So this host never parses a file system of a foreign image, neither in its kernel nor in a process. The machine runs the
default image and `inside/foreign.py`. The disk's file is only read; what the machine writes goes into an overlay, which is
discarded with it unless it is what was asked for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import ImageError, OutputMissing
from belljar.guest import BytesSink, Sink, Streams
from belljar.hypervisor import ExtraDisk
from belljar.image import Image
from belljar.machine import DISK_NOT_WHOLE
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import Orders
from belljar.machine.services import Keep
from belljar.model import Account, MachineSpec, Payload, PlainFile, Request, RunPayload, StdinKind, Transfer, to_json
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.image.store.qcow2 import Overlays

SCRIPT = Path(__file__).parent / "inside" / "foreign.py"
FOREIGN = "foreign"  # the disk's name
OUT, IN = "/var/foreign/out", "/var/foreign/in"  # as in inside/foreign.py
TASK = b"/var/foreign/task"
ROOT = Account("root", 0, 0, "root", home="/root")
MEMORY = 512 << 20
MOST_WORDS = 64 << 10
PATIENCE = 3600.0  # seconds for one task
Disk = Path | Image  # an overlay that is changed, or an image that is only read
Task = dict[str, Any]
Transfers = tuple[Transfer, ...]
FAILED = "Check that the image has a file system belljar's default image knows, and that the paths are there."


@dataclass(frozen=True)
class Item:
    """A file or folder of the host that is put into an image. *mode* None: as it is here; of a folder's files too."""

    source: str
    target: str  # absolute; an existing folder, or one that ends with a slash, gets it by its own name
    mode: int | None = None
    owner: tuple[int, int] = (0, 0)


class ForeignDisk(Extra):
    """The disk to work on. An overlay is changed, and stays when the machine is gone; an image is only read, for writes go
    into an overlay of the machine's own."""

    def __init__(self, disk: Disk, overlays: Overlays) -> None:
        self._disk, self._overlays = disk, overlays

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        disk = self._disk
        path = disk if isinstance(disk, Path) else life.attach(FOREIGN, FOREIGN)
        if not isinstance(disk, Path):
            self._overlays.create(path, disk, None)
        extra = ExtraDisk(FOREIGN, path, "qcow2", readonly=False, chained=True)
        return there.with_disk(extra, outlasts=isinstance(disk, Path))


class Workshop:
    """Each call runs one machine. All raise ImageError, with the reason."""

    def __init__(self, keep: Keep, overlays: Overlays, image: str) -> None:
        self._keep, self._overlays, self._image = keep, overlays, image

    async def extract(self, disk: Image, paths: Sequence[str], folder: Path) -> None:
        """Copy these paths of the disk, links in their middle followed within it, into a folder of the host."""
        outputs = tuple(Transfer(str(folder / _leaf(path)), f"{OUT}/{at}/it") for at, path in enumerate(paths))
        await self._work(disk, {"do": "expose", "paths": list(paths)}, outputs=outputs)

    async def archive(self, disk: Image, paths: Sequence[str], sink: Sink) -> None:
        """Write these paths of the disk as a tar archive, with owners and modes."""
        await self._work(disk, {"do": "archive", "paths": list(paths)}, stdout=sink)

    async def survey(self, disk: Image, names: Mapping[str, Sequence[str]], sink: Sink) -> None:
        """Write the files, names and kernel modules of *names* for a direct boot of the disk's system: see
        `belljar.image.intake.survey`."""
        await self._work(disk, {"do": "survey", **names}, stdout=sink)

    async def insert(self, overlay: Path, items: Sequence[Item]) -> None:
        """Put files of the host into the disk *overlay*, a qcow2 on top of others."""
        inputs = tuple(Transfer(item.source, f"{IN}/{number}/it") for number, item in enumerate(items))
        places = [{**to_json(item), "name": _leaf(item.source)} for item in items]
        await self._work(overlay, {"do": "insert", "items": places}, inputs)

    async def inject(self, overlay: Path, agent: tuple[str, Path], unit: tuple[str, str]) -> None:
        """Put the agent, a folder and the archive for it, and a unit, a path and its text, into the disk *overlay*, and have its
        systemd start them."""
        task = {"do": "inject", "agent": agent[0], "unit": unit[0], "text": unit[1]}
        await self._work(overlay, task, (Transfer(str(agent[1]), f"{IN}/0/it"),))

    async def _work(
        self, disk: Disk, task: Task, inputs: Transfers = (), outputs: Transfers = (), stdout: Sink | None = None
    ) -> None:
        names = (f"{IN}/{number}".encode() for number in range(len(inputs)))
        words = PlainFile(TASK, json.dumps({"disk": FOREIGN, **task}).encode("ascii"), 0o600, is_users=False)
        payload = Payload(
            argv=(b"foreign",), script=SCRIPT.read_bytes(), account=ROOT, cwd=b"/",
            env=((b"PATH", b"/usr/sbin:/usr/bin:/sbin:/bin"), (b"LC_ALL", b"C.UTF-8")),
            stdin=StdinKind.NULL, stdout=StdinKind.STREAM if stdout else StdinKind.NULL,
            files=(words, *(PlainFile(name, None, 0o700, is_users=False) for name in names)), inputs=inputs, outputs=outputs,
        )  # fmt: skip
        id, spec, work = os.urandom(6).hex(), MachineSpec(self._image, cpus=1, memory=MEMORY), RunPayload(payload)
        request = Request(id, spec, work, requester="workshop", created=time.time(), timeout=PATIENCE)
        stderr = BytesSink(MOST_WORDS)
        outcome = await self._keep(
            request, Streams(None, stdout, stderr), Orders(), [ForeignDisk(disk, self._overlays)]
        )
        if outcome.exit_code == 0 and not outcome.error and DISK_NOT_WHOLE not in outcome.troubles:
            return
        has_failed = outcome.exit_code and not outcome.error
        lines = stderr.data.decode(errors="replace").strip().splitlines() if has_failed else []
        reason = lines[-1][:500] if lines else f"machine {id}: {'; '.join((outcome.reason, *outcome.troubles))}"
        kind = OutputMissing if outcome.error == OutputMissing.__name__ else ImageError
        raise kind(reason, hint=outcome.hint or FAILED)


def kept_disk(overlay: Path, size: int) -> Image:
    """The disk that a machine has left, as an image to work on."""
    return Image("", (), overlay, size, None, None, "", "a kept machine", 0.0)


def _leaf(path: str) -> str:
    """Its name in a folder."""
    return os.path.basename(os.path.normpath(path)).strip("/") or "root"
