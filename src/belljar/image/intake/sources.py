"""Bring an image from outside into the store: a file or an address, qcow2 or raw, packed or not. Nothing of it is trusted.

The first bytes of a file tell what it is, not its name. Every step that parses its content runs in the sandbox.
"""

from __future__ import annotations

import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

from belljar.errors import BadOption, CommandFailed, ImageCorrupt, ImageMismatch, ImageTooLarge, InputMissing, NoSpace
from belljar.host import commands
from belljar.host.files import sha256_of
from belljar.image import Image, is_container
from belljar.image.intake import fetch, intake
from belljar.image.intake.disk import FILE_SYSTEMS
from belljar.image.intake.sandbox import CONVERSION, PACKED, check_qcow2, convert, run
from belljar.image.progress import Progress, shown
from belljar.image.store import qcow2
from belljar.image.store.store import Store, check_name
from belljar.model import Context
from belljar.records import dataclass, replace

DIGEST = re.compile(r"[0-9a-f]{64}")
# What a disk has at the least: a partition table, or a file system without one.
DISK_MARKS = ((510, b"\x55\xaa"), (512, b"EFI PART"), *FILE_SYSTEMS)
DISC_AT, DISC = 0x8001, b"CD001"
BOOT_RECORD_AT, BOOT_RECORD = 0x8800, b"\0CD001\x01EL TORITO SPECIFICATION"  # the 17th sector
HEAD = 0x11000
FORMS = "Give a qcow2 or raw disk, as it is or packed once by xz, gzip or zstd; `qemu-img convert` makes one of most others."


@dataclass(frozen=True)
class Order(intake.Origin):
    """What is asked of an import. Its source is a path, or an address: file, http, https."""

    sha256: str = ""  # of the file as it arrives, packed or not
    context: Context = Context.AUTO
    signer: str = ""  # who must have signed it, by a signature within the file: x509:FOLDER:DN
    public_only: bool = False  # from no address of this host or of a private network


def bring(store: Store, order: Order, judge: intake.Judge | None = None) -> Image:
    """Import the image and give it its name. One import of a source at a time: others wait for it, and go on where it
    stopped if it died. *judge* may refuse what was found."""
    if is_container(order.source):
        return _bring_container(store, order)
    address = without_password(order.source)
    check(order)
    with shown() as progress, intake.alone(store, fetch.key(order.source), f"import {address}", progress):
        with intake.draft(store, order.name) as folder:
            blob = _obtain(store, order, folder, progress)
            properties = {
                "context": "" if order.context is Context.AUTO else order.context.value,
                "source_sha256": _checked_digest(blob, order, progress),
            }
            if order.signer:  # before anything else reads the file
                from belljar.image.intake import signature

                progress.step("Checking its signature")
                now = datetime.fromtimestamp(time.time(), UTC).replace(tzinfo=None)
                properties["signer"] = signature.verify(blob, order.signer, now)
            is_disc = to_raw(blob, folder, store.settings.max_size, progress)
            is_special = order.kernel or order.firmware not in ("auto", "bios") or order.context is not Context.AUTO
            if is_disc and is_special:
                hint = "A disc is booted by the BIOS, and its guest knows its own work."
                raise BadOption("a boot disc with --kernel, --context, or another firmware than bios", hint=hint)
            properties = {name: value for name, value in properties.items() if value}
            origin = replace(order, source=address, is_disc=is_disc, facts=properties)
            return intake.take(store, folder, origin, progress, judge)


def _bring_container(store: Store, order: Order) -> Image:
    """Raises BadOption for what holds for disks alone, and for a stranger's address: skopeo follows a registry's redirects to wherever
    they lead."""
    from belljar.image.container import disk

    if order.public_only:
        hint = "Have the site import the image, and ask for it by its name."
        raise BadOption(f"{order.source}: container images are not fetched for strangers", hint=hint)
    if order != Order(order.source, order.name):
        raise BadOption(f"{order.source}: options of a disk's import mean nothing for a container image")
    return disk.bring(store, order.source, order.name)


def version(order: Order, store: Store) -> str:
    """What the source calls the version that it has now; "" where it does not say. Raises DownloadFailed, InputMissing."""
    settings = store.settings
    if is_container(order.source):
        from belljar.image.container import sources

        with intake.draft(store, order.name) as folder:
            return sources.version(order.source, settings, folder)
    if (path := fetch.local_path(order.source)) is None:
        return fetch.version(order.source, settings, public_only=order.public_only)
    try:
        file = path.stat()
    except OSError as exc:
        raise InputMissing(f"{order.source}: {exc.strerror}", hint="Correct the path.") from exc
    return f"{file.st_size} {file.st_mtime_ns}"


def check(order: Order) -> None:
    """Raise BadOption or InputMissing for an order that cannot be carried out."""
    check_name(order.name)
    if order.sha256 and not DIGEST.fullmatch(order.sha256):
        raise BadOption(f"{order.sha256!r} is not a sha256 digest", hint="Give 64 hexadecimal digits.")
    if order.kernel and order.firmware in ("bios", "uefi"):
        raise BadOption(f"--firmware {order.firmware} with a kernel", hint="Firmware starts the disk's own kernel.")
    if order.initrd and not order.kernel:
        raise BadOption("a ramdisk without its kernel", hint="Give --kernel too.")
    if order.signer:
        from belljar.image.intake import signature

        signature.signer_of(order.signer)
    for path in (order.kernel, order.initrd, fetch.local_path(order.source)):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise InputMissing(f"{path}: no readable file", hint="Correct the path.")


def to_raw(blob: Path, folder: Path, largest: int, progress: Progress) -> bool:
    """Make the raw disk of a draft of *blob*, unpacked and converted. Is it a CD-ROM? Uses up *blob*."""
    head = _head(blob)
    if program := next((argv for magic, argv in PACKED.items() if head.startswith(magic)), None):
        progress.step(f"Unpacking ({program[0]})")
        packed, blob = blob, folder / "unpacked"
        run(program, [], CONVERSION, largest, stdin=packed, stdout=blob)
        packed.unlink()
        head = _head(blob)
    raw = folder / intake.RAW
    if head.startswith(qcow2.MAGIC):
        progress.step("Reading the qcow2 disk")
        check_qcow2(blob, largest)
        convert(blob, "qcow2", raw, "raw", largest)
        blob.unlink()
        blob, head = raw, _head(raw)
    is_disc = head.startswith(DISC, DISC_AT)
    if is_disc and not head.startswith(BOOT_RECORD, BOOT_RECORD_AT):
        hint = "Give a disc that can be booted."
        raise ImageCorrupt("the disc has no boot loader (no El Torito boot record)", hint=hint)
    if not is_disc and not any(head.startswith(mark, at) for at, mark in DISK_MARKS):
        raise ImageCorrupt("neither a qcow2 file nor a disk: no partition table and no file system", hint=FORMS)
    blob.rename(raw)
    return is_disc


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEAD)


def without_password(source: str) -> str:
    """An address as it may be shown and stored: without a password. Raises DownloadFailed."""
    return fetch.shown(source) if "://" in source else Path(source).absolute().as_uri()


def _obtain(store: Store, order: Order, folder: Path, progress: Progress) -> Path:
    """The file itself, in *folder*."""
    blob, settings = folder / "blob", store.settings
    if path := fetch.local_path(order.source):
        if path.stat().st_size > settings.max_size:
            raise ImageTooLarge(f"{path}: {path.stat().st_size} bytes, the limit is {settings.max_size}")
        progress.step(f"Copying {path.name}")
        try:
            argv = ["cp", "--sparse=always", "--reflink=auto", "--", str(path), str(blob)]
            commands.run(argv, timeout=CONVERSION, bound=True)
        except CommandFailed as exc:
            raise (NoSpace if "No space left" in exc.message else CommandFailed)(exc.message) from exc
        blob.chmod(0o600)
        return blob
    downloads = store.work_folder("downloads")
    return fetch.download(order.source, downloads, settings, progress, public_only=order.public_only).rename(blob)


def _checked_digest(blob: Path, order: Order, progress: Progress) -> str:
    """The file's sha256, compared with what was ordered. Empty where nobody asks: a sparse local disk has gigabytes of
    zeros."""
    if not order.sha256 and fetch.local_path(order.source):
        return ""
    progress.step("Taking the file's digest")
    digest = sha256_of(blob)
    if order.sha256 and digest != order.sha256:
        raise ImageMismatch(f"{without_password(order.source)}: ordered sha256 {order.sha256}, got {digest}")
    return digest
