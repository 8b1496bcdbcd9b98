"""Disks that nobody trusts: files go out of and into them through a machine, so this host never opens their file systems."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from gzip import GzipFile
from pathlib import Path
from typing import Any

from belljar.context import choose
from belljar.errors import BadOption, ImageUnknown, MachineBusy, NoSuchMachine
from belljar.host import commands
from belljar.host.files import named_when_whole, private
from belljar.image import Image
from belljar.image.intake import intake, sandbox
from belljar.image.intake.survey import WANTED
from belljar.image.progress import shown
from belljar.image.store import qcow2
from belljar.jobs import Runtime
from belljar.jobs.users import reach
from belljar.machine import KEPT_DISK
from belljar.machine.life.output import CappedSink
from belljar.machine.planning.contexts import means_of
from belljar.machine.workshop.workshop import Item, kept_disk
from belljar.model import Context
from belljar.records import replace

KEPT_FACTS = ("context", "suite", "added")
ARCHIVE = "Name an archive, FILE.tar or FILE.tar.gz, in a folder you may write to."
TAR, TAR_GZ = (".tar",), (".tar.gz", ".tgz")
NOT_LOOKED_INTO = (
    "its file systems were not looked into, which takes a machine of `image.default`: import it again when that image is here,"
    " or with `--context`; or install it (`belljar image agent --help`)"
)


def is_archive(path: Path) -> bool:
    return path.name.endswith((*TAR, *TAR_GZ))


def extract(runtime: Runtime, disk: str, paths: Sequence[str], target: Path) -> None:
    """Copy these paths of an image or a kept machine's disk into a folder or a new archive. Raises BadOption,
    ImageUnknown, MachineBusy."""
    with ExitStack() as held:
        if not is_archive(target):
            return asyncio.run(runtime.workshop().extract(_held(runtime, disk, held), paths, target.absolute()))
        if target.is_dir():
            raise BadOption(f"{target}: Is a directory", hint=ARCHIVE)
        try:
            with (
                named_when_whole(target) as file,
                _archive(runtime, file, is_packed=target.name.endswith(TAR_GZ)) as sink,
            ):
                asyncio.run(runtime.workshop().archive(_held(runtime, disk, held), paths, sink))
        except OSError as exc:
            raise BadOption(f"{target}: {exc.strerror}", hint=ARCHIVE) from exc


def survey(runtime: Runtime, disk: Path, size: int, target: Path) -> None:
    """Have a machine of the default image look into a disk; write what it saw to *target*. Raises ImageUnknown without
    that image."""
    runtime.images.resolve(runtime.settings.image.default)
    with open(target, "xb", opener=private) as file, _archive(runtime, file.fileno()) as sink:
        asyncio.run(runtime.workshop().survey(kept_disk(disk, size), WANTED, sink))


def told_of(image: Image) -> str:
    """What its importer has to know, or do: how it boots, and how its guests get the agent. "" where all is as usual."""
    means = means_of(image.facts, image.kernel is not None)
    chosen = choose(Context.AUTO, means, image.called).context
    if image.is_disc or (image.kernel is not None and chosen is not Context.NONE):
        return ""
    agent = NOT_LOOKED_INTO
    if chosen is not Context.NONE:
        agent = f"its guests get the agent by {chosen.value}"
    elif means.agent:
        agent = "it starts the agent itself"
    elif means.is_known:
        agent = "nothing in it is known to start the agent: install that (`belljar image agent --help`)"
    start = "it boots by firmware" if image.kernel is None else "a kernel starts it directly"
    return f"image {image.called}: {start}; {agent}"


def insert(runtime: Runtime, reference: str, items: Sequence[Item], name: str) -> Image:
    """A new image: this one with files of the host put in, examined like any image that comes in."""
    store, image = runtime.images, runtime.images.resolve(reference)
    if image.container:  # its kernel is not in its disk
        hint = "Copy them in with `COPY` of a Dockerfile, or at each run with --in; then import that image."
        raise BadOption(f"image {reference} is a container image: no files are put into it", hint=hint)
    # What somebody decided about the old one holds for the new one too.
    kept: dict[str, Any] = {key: image.facts[key] for key in KEPT_FACTS if key in image.facts}
    source, firmware = f"image {image.digest} with files put in", str(image.facts.get("use_firmware") or "auto")
    origin = intake.Origin(source, name, firmware=firmware, facts=kept)
    if image.kernel and not image.facts.get("agent_in_initrd"):  # its importer gave them
        origin = replace(origin, kernel=image.kernel, initrd=image.initrd, append=image.append)
    with (
        store.hold(image, "insert"),
        shown() as progress,
        intake.alone(store, name, f"make the image {name}", progress),
        intake.draft(store, name) as folder,
    ):
        overlay, raw = folder / "overlay.qcow2", folder / intake.RAW
        runtime.overlays.create(overlay, image, None)
        progress.step("Putting the files in")
        asyncio.run(runtime.workshop().insert(overlay, items))
        progress.step("Writing the disk anew")
        argv = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(overlay), str(raw)]
        commands.run(argv, timeout=sandbox.CONVERSION, bound=True)
        overlay.unlink()
        return intake.take(store, folder, origin, progress)


@contextmanager
def _archive(runtime: Runtime, descriptor: int, *, is_packed: bool = False) -> Iterator[CappedSink]:
    """Everything is in the file at the end. Raises BadOption when it is not."""
    with ExitStack() as closing:
        file = closing.enter_context(open(descriptor, "wb", closefd=False))
        write = closing.enter_context(GzipFile("", "wb", 6, file)).write if is_packed else file.write
        sink = CappedSink(write, runtime.settings.image.max_size)  # the machine's tar ends where that is reached
        yield sink
    if sink.is_cut:
        raise BadOption("the archive is larger than `image.max_size`", hint="Name fewer paths.")
    os.fsync(descriptor)


def _held(runtime: Runtime, reference: str, held: ExitStack) -> Image:
    """The image of this name, or the kept disk of this machine, held while it is worked on."""
    with suppress(ImageUnknown):
        image = runtime.images.resolve(reference)
        held.enter_context(runtime.images.hold(image, "extract"))
        return image
    try:
        _, machine = reach(runtime, reference)
    except NoSuchMachine:
        raise ImageUnknown(f"{reference}: neither an image nor a machine", hint="See `belljar image list`.") from None
    if machine.alive:
        raise MachineBusy(f"{reference}: this machine is running", hint="Copy files out of it with `belljar cp`.")
    overlay = machine.folder / KEPT_DISK
    if not overlay.is_file():
        raise ImageUnknown(f"{reference}: the disk of this machine was not kept", hint="Run it with --keep.")
    return kept_disk(overlay, qcow2.virtual_size(overlay))
