"""`belljar image extract`, `insert`, `archive`: files out of and into disks, without this host opening their file systems."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import acts
from belljar.errors import BadOption, ImageUnknown, InputMissing, MachineBusy, NoSuchMachine, OutputUnwritable
from belljar.host.files import named_when_whole

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.image import Image
    from belljar.machine.workshop.workshop import Item

LOGS = ("/var/log",)
OWNER = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")
KEPT_FACTS = ("context", "ssh_user", "suite", "added")
TAR, TAR_GZ = (".tar",), (".tar.gz", ".tgz")


def extract(args: argparse.Namespace, house: House) -> int:
    """Copy paths of a disk to here."""
    if is_archive(args.output):
        return _archive(house, args.disk, args.paths, args.output)
    names = [os.path.basename(os.path.normpath(path)) for path in args.paths]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise BadOption(f"two paths would be called {doubled[0]}", hint="Extract them one by one, or into an archive.")
    if not args.output.is_dir():
        raise OutputUnwritable(f"{args.output}: no such folder", hint="Make it, or name an archive: FILE.tar.")
    with ExitStack() as held:
        disk = _found(house, args.disk, held)
        _run(house.workshop().extract(disk, args.paths, args.output.absolute()))
    return 0


def archive(args: argparse.Namespace, house: House) -> int:
    """Put paths of a disk into an archive."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", args.disk)
    output = args.output or Path(f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if not is_archive(output):
        raise BadOption(f"{output}: not the name of an archive", hint="Let it end with .tar or .tar.gz.")
    _archive(house, args.disk, args.paths or list(LOGS), output)
    print(output)
    return 0


def insert(args: argparse.Namespace, house: House) -> int:
    """Make a new image of one, with files of this host."""
    from belljar.image.store.store import check_name

    check_name(args.name)
    items = [_item(text, _mode(args.mode), _owner(args.owner)) for text in args.items]
    image = house.images.resolve(args.image)
    with house.images.hold(image, "insert"):
        print(_inserted(house, image, items, args.name).digest)
    return 0


def survey(house: House, disk: Path, size: int, target: Path) -> None:
    """Have a machine of the default image look into a disk, and write what it saw to *target*. Raises ImageUnknown where that
    image is not here: none is built for it."""
    from belljar.image.intake.survey import WANTED
    from belljar.machine.workshop.workshop import kept_disk

    house.images.resolve(house.settings.image.default)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        sink = ArchiveSink(descriptor, is_packed=False, largest=house.settings.image.max_size)
        _run(house.workshop().survey(kept_disk(disk, size), WANTED, sink))
        sink.finish()
    finally:
        os.close(descriptor)


def is_archive(path: Path) -> bool:
    return path.name.endswith((*TAR, *TAR_GZ))


def _archive(house: House, disk: str, paths: list[str], output: Path) -> int:
    """The archive gets its name when it is whole."""
    with _named_when_whole(output) as descriptor, ExitStack() as held:
        sink = ArchiveSink(descriptor, is_packed=output.name.endswith(TAR_GZ), largest=house.settings.image.max_size)
        found = _found(house, disk, held)
        _run(house.workshop().archive(found, paths, sink))
        sink.finish()
    return 0


@contextmanager
def _named_when_whole(output: Path) -> Iterator[int]:
    """Raises OutputUnwritable."""
    if output.is_dir():
        raise OutputUnwritable(f"{output}: Is a directory")
    try:
        with named_when_whole(output) as descriptor:
            yield descriptor
    except OSError as exc:
        raise OutputUnwritable(f"{output}: {exc.strerror}") from exc


class ArchiveSink:
    """Writes what the machine sends into a file, packed or not, and not more than it may."""

    def __init__(self, descriptor: int, *, is_packed: bool, largest: int) -> None:
        import zlib

        self._descriptor, self._left = descriptor, largest
        self._packer = zlib.compressobj(6, wbits=31) if is_packed else None

    async def write(self, data: bytes) -> None:
        from belljar.host.threads import in_thread

        self._left -= len(data)
        if self._left < 0:
            raise BrokenPipeError  # the machine's tar ends by that
        await in_thread(lambda: self._put(self._packer.compress(data) if self._packer else data))

    async def close(self) -> None:
        pass

    def finish(self) -> None:
        """Everything is in the file. Raises OutputUnwritable when it is not."""
        if self._left < 0:
            raise OutputUnwritable("the archive is larger than `image.max_size`", hint="Name fewer paths.")
        self._put(self._packer.flush() if self._packer else b"")
        os.fsync(self._descriptor)

    def _put(self, data: bytes) -> None:
        from belljar.host.files import write_all

        write_all(self._descriptor, data)


def _found(house: House, reference: str, held: ExitStack) -> Image:
    """The image of this name, or the kept disk of this machine, held while it is worked on."""
    from belljar.image.store import qcow2
    from belljar.jobs.users import reach
    from belljar.machine import KEPT_DISK
    from belljar.machine.workshop.workshop import kept_disk

    try:
        image = house.images.resolve(reference)
        held.enter_context(house.images.hold(image, "extract"))
        return image
    except ImageUnknown:
        pass
    try:
        _, machine = reach(house, reference)
    except NoSuchMachine:
        raise ImageUnknown(f"{reference}: neither an image nor a machine", hint="See `belljar image list`.") from None
    if machine.alive:
        raise MachineBusy(f"{reference}: this machine is running", hint="Copy files out of it with `belljar cp`.")
    overlay = machine.folder / KEPT_DISK
    if not overlay.is_file():
        raise ImageUnknown(f"{reference}: the disk of this machine was not kept", hint="Run it with --keep.")
    return kept_disk(overlay, qcow2.virtual_size(overlay))


def _inserted(house: House, image: Image, items: list[Item], name: str) -> Image:
    """The new image, examined as any that comes in."""
    from belljar.host import commands
    from belljar.image.intake import intake
    from belljar.image.progress import shown

    store = house.images
    with shown() as progress, intake.alone(store, name, f"make the image {name}", progress):
        with intake.draft(store, name) as folder:
            overlay, raw = folder / "overlay.qcow2", folder / "disk.raw"
            house.overlays.create(overlay, image, None)
            progress.step("Putting the files in")
            _run(house.workshop().insert(overlay, items))
            progress.step("Writing the disk anew")
            argv = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(overlay), str(raw)]
            commands.run(argv, timeout=intake.CONVERT_TIMEOUT, bound=True)
            overlay.unlink()
            return intake.take(store, folder, raw, _origin(image, name), progress, lambda *told: survey(house, *told))


def _origin(image: Image, name: str) -> Any:
    """Where the new image comes from; what somebody decided about the old one holds for it too."""
    from belljar.image.intake import intake

    kept: dict[str, Any] = {key: image.facts[key] for key in KEPT_FACTS if key in image.facts}
    source, firmware = f"image {image.digest} with files put in", str(image.facts.get("use_firmware") or "auto")
    if image.kernel and not image.facts.get("agent_in_initrd"):  # its importer gave them
        return intake.Origin(source, name, image.kernel, image.initrd, image.append, firmware, kept)
    return intake.Origin(source, name, firmware=firmware, facts=kept)


def _item(text: str, mode: int | None, owner: tuple[int, int]) -> Item:
    from belljar.machine.workshop.workshop import Item

    source, colon, target = text.rpartition(":")
    if not colon or not source or not target.startswith("/"):
        raise BadOption(f"{text}: not of the form SRC:DST with an absolute DST")
    if not os.path.exists(source):
        raise InputMissing(f"{source}: does not exist", hint="Correct SRC:DST.")
    return Item(os.path.abspath(source), target, mode, owner)


def _mode(text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-7]{3,4}", text):
        raise BadOption(f"--mode {text}: not of the form 644 or 0755")
    return int(text, 8)


def _owner(text: str) -> tuple[int, int]:
    found = OWNER.fullmatch(text)
    if not found:
        raise BadOption(f"--owner {text}: not of the form UID or UID:GID, in numbers")
    return int(found[1]), int(found[2] or found[1])


def _run(work: Any) -> None:
    """Ctrl-C ends the machine, then us."""
    import asyncio

    asyncio.run(work)
    sys.stdout.flush()


DISK = "IMAGE|ID @disk | an image, or a machine that has ended and was run with --keep"
ACTS = acts(
    f"""
    # extract | copy files and folders out of an image, or out of a kept machine
    {DISK}
    PATH + @paths | a path in it
    -o --output DIR|FILE.tar[.gz] :path =. | the folder they are copied into, as your own files; or an archive, with owners and
    | modes (default: .)
    # archive | put log folders of a kept machine, or of an image, into an archive
    {DISK}
    PATH * @paths | a path in it (default: {" ".join(LOGS)})
    -o --output FILE.tar[.gz] :path | default: its name and the date, here
    # insert | make a new image of one, with files and folders put in
    IMAGE | name or digest; it stays as it is
    SRC:DST + @items | a path here and its absolute path in the image; a folder's / takes it in
    --name NAME ! | the new image's name
    --mode OCTAL | of what is put in (default: as it is here)
    --owner UID[:GID] =0:0 | of what is put in, in numbers (0:0)""",
    {"extract": extract, "archive": archive, "insert": insert},
)
