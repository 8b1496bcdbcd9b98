"""Bring an image from outside into the store: a file or an address, qcow2 or raw, packed or not. Nothing of it is trusted.

The first bytes of a file tell what it is, not its name. Every step that parses its content runs in the sandbox.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from belljar.errors import BadOption, ImageCorrupt, ImageMismatch, ImageTooLarge, InputMissing
from belljar.host import commands
from belljar.host.files import no_space_as_error
from belljar.image import Image
from belljar.image.intake import fetch, intake
from belljar.image.intake.disk import FILE_SYSTEMS
from belljar.image.intake.sandbox import check_qcow2, run
from belljar.image.progress import Progress, shown
from belljar.image.store import qcow2
from belljar.model import Context
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.image.store.store import Store

PATIENCE = 3600  # seconds for one program
MOST_LAYERS = 2  # packed, and packed again
DIGEST = re.compile(r"[0-9a-f]{64}")
PACKED = {
    b"\xfd7zXZ\0": ("xz", "-dc", "--memlimit-decompress=1GiB"),
    b"\x1f\x8b\x08": ("gzip", "-dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dcq", "--memory=1024MB"),
}
DISC_AT, DISC = 0x8001, b"CD001"
# (offset, bytes, what it is)
FOREIGN = (
    (0, b"KDMV", "a VMware disk"),
    (0, b"# Disk DescriptorFile", "a VMware disk"),
    (0x40, b"\x7f\x10\xda\xbe", "a VirtualBox disk"),
    (0, b"vhdxfile", "a Hyper-V disk"),
    (0, b"conectix", "a Virtual PC disk"),
    (0, b"QED\0", "a QED disk"),
    (0, b"LUKS\xba\xbe", "an encrypted disk"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"BZh", "packed with bzip2"),
    (257, b"ustar", "a tar archive"),
    (DISC_AT, DISC, "an installation disc (ISO 9660)"),
)
# What a disk has at the least: a partition table, or a file system without one.
DISK_MARKS = ((510, b"\x55\xaa"), (512, b"EFI PART"), *FILE_SYSTEMS)
HEAD = 0x11000
BOOT_RECORD, EL_TORITO = 0x8800, b"\0CD001\x01EL TORITO SPECIFICATION"  # the 17th sector


@dataclass(frozen=True)
class Order(intake.Origin):
    """What is asked of an import. Its source is a path, or an address: file, http, https."""

    sha256: str = ""  # of the file as it arrives, packed or not
    context: Context = Context.AUTO
    signer: str = ""  # who must have signed it, by a signature within the file: x509:FOLDER:DN
    public_only: bool = False  # from no address of this host or of a private network


def bring(
    store: Store, order: Order, surveyor: intake.Surveyor | None = None, judge: intake.Judge | None = None
) -> Image:
    """Import the image and give it its name. One import of a source at a time: others wait for it, and go on where it
    stopped if it died. Without a *surveyor* no file system is looked into; *judge* may refuse what was found."""
    check(order)
    address = without_password(order.source)
    with shown() as progress, intake.alone(store, fetch.key(order.source), f"import {address}", progress):
        with intake.draft(store, order.name) as folder, _nothing_stored():
            blob = _obtain(store, order, folder, progress)
            digest = _checked_digest(blob, order, progress)
            signer = _checked_signer(blob, order, progress)
            raw, is_disc = to_raw(blob, folder, store.settings.max_size, progress, is_disc=order.is_disc)
            said = {"context": "" if order.context is Context.AUTO else order.context.value}
            known = {**said, "source_sha256": digest, "signer": signer}
            origin = replace(
                order, source=address, is_disc=is_disc, facts={name: fact for name, fact in known.items() if fact}
            )
            image = intake.take(store, folder, raw, origin, progress, surveyor, judge)
        progress.step(f"Image {order.name} is ready ({image.digest:.12})")
        return image


@contextmanager
def _nothing_stored() -> Iterator[None]:
    """The hint about a stored image does not fit a file from outside."""
    try:
        yield
    except ImageCorrupt as exc:
        if exc.hint == ImageCorrupt.hint:
            exc.hint = "Nothing was stored. Get the file again, or give another one."
        raise


def check(order: Order) -> None:
    """Raise BadOption or InputMissing for an order that cannot be carried out."""
    from belljar.image.store.store import check_name

    check_name(order.name)
    without_password(order.source)
    if order.sha256 and not DIGEST.fullmatch(order.sha256):
        raise BadOption(f"{order.sha256!r} is not a sha256 digest", hint="Give 64 hexadecimal digits.")
    if order.kernel and order.firmware in ("bios", "uefi"):
        raise BadOption(f"--firmware {order.firmware} with a kernel", hint="Firmware starts the disk's own kernel.")
    if order.is_disc and (order.kernel or order.firmware not in ("auto", "bios") or order.context is not Context.AUTO):
        raise BadOption(
            "--kind iso with --kernel, --context, or another firmware than bios",
            hint="A disc is booted by the BIOS, and its guest knows its own work.",
        )
    if order.initrd and not order.kernel:
        raise BadOption("a ramdisk without its kernel", hint="Give --kernel too.")
    scheme = urlsplit(order.source).scheme if "://" in order.source else "file"
    if scheme not in ("file", "http", "https"):
        raise BadOption(f"{scheme}: images come from files, http and https")
    if order.signer:
        from belljar.image.intake import embedded

        embedded.signer_of(order.signer)
    for path in (order.kernel, order.initrd, _local(order.source)):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise InputMissing(f"{path}: no readable file", hint="Correct the path.")


def to_raw(
    blob: Path, folder: Path, largest: int, progress: Progress, *, is_disc: bool | None = False
) -> tuple[Path, bool]:
    """The raw disk in *blob*, unpacked and converted, as `disk.raw` in *folder*; and whether it is a CD-ROM, which None leaves to the
    file. Uses up *blob*."""
    for layer in range(MOST_LAYERS + 1):
        with open(blob, "rb") as file:
            head = file.read(HEAD)
        program = next((argv for magic, argv in PACKED.items() if head.startswith(magic)), None)
        if program is None:
            break
        if layer == MOST_LAYERS:
            raise ImageCorrupt("the file is packed more than twice", hint="Unpack it first.")
        progress.step(f"Unpacking ({program[0]})")
        packed, blob = blob, folder / f"unpacked-{layer}"
        run(program, [], PATIENCE, largest, stdin=packed, stdout=blob)
        packed.unlink()
    if is_disc is None:
        is_disc = head[DISC_AT : DISC_AT + len(DISC)] == DISC
    check_disc(head) if is_disc else refuse_foreign(head)
    raw = folder / "disk.raw"
    if head.startswith(qcow2.MAGIC):
        progress.step("Reading the qcow2 disk")
        _flatten(blob, raw, largest)
    else:
        if not is_disc and not any(head[at : at + len(mark)] == mark for at, mark in DISK_MARKS):
            raise ImageCorrupt(
                "neither a qcow2 file nor a disk: it has no partition table and no file system",
                hint="Give a qcow2 or raw disk, as it is or packed by xz, gzip or zstd.",
            )
        if blob.stat().st_size > largest:
            raise ImageTooLarge(f"a disk of {blob.stat().st_size} bytes, the limit is {largest}")
        blob.rename(raw)
    return raw, is_disc


def check_disc(head: bytes) -> None:
    """Raise ImageCorrupt for what is no ISO 9660 disc that a firmware finds a boot loader on (El Torito)."""
    if head[DISC_AT : DISC_AT + len(DISC)] != DISC:
        raise ImageCorrupt("the file is not a disc (ISO 9660)", hint="Leave `--kind iso` out for a disk.")
    if head[BOOT_RECORD : BOOT_RECORD + len(EL_TORITO)] != EL_TORITO:
        raise ImageCorrupt(
            "the disc has no boot loader (no El Torito boot record)", hint="Give a disc that can be booted."
        )


def refuse_foreign(head: bytes) -> None:
    """Raise ImageCorrupt for a file of a kind that belljar cannot use."""
    for at, mark, what in FOREIGN:
        if head[at : at + len(mark)] == mark:
            raise ImageCorrupt(
                f"the file is {what}", hint="Give a qcow2 or raw disk; `qemu-img convert` makes one of most others."
            )
    if head.lstrip()[:1] == b"<":
        raise ImageCorrupt("the file is a web page, not a disk", hint="Check the address in a browser.")


def without_password(source: str) -> str:
    """An address as it may be shown and stored: without a password. Raises BadOption."""
    if "://" not in source:
        return Path(source).absolute().as_uri()
    try:
        urlsplit(source).port  # noqa: B018 - it is checked when it is asked for
    except ValueError as exc:
        raise BadOption(f"{source!r} is not a valid address: {exc}") from exc
    return fetch.shown(source)


def _local(source: str) -> Path | None:
    if "://" not in source:
        return Path(source)
    parts = urlsplit(source)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _obtain(store: Store, order: Order, folder: Path, progress: Progress) -> Path:
    """The file itself, in *folder*."""
    blob = folder / "blob"
    if path := _local(order.source):
        if path.stat().st_size > store.settings.max_size:
            raise ImageTooLarge(f"{path}: {path.stat().st_size} bytes, the limit is {store.settings.max_size}")
        progress.step(f"Copying {path.name}")
        with no_space_as_error(blob):
            commands.run(
                ["cp", "--sparse=always", "--reflink=auto", "--", str(path), str(blob)], timeout=PATIENCE, bound=True
            )
        blob.chmod(0o600)
        return blob
    part = fetch.download(
        order.source, store.work_folder("downloads"), store.settings, progress,
        is_pinned=bool(order.sha256), public_only=order.public_only,
    )  # fmt: skip
    part.rename(blob)
    return blob


def _checked_digest(blob: Path, order: Order, progress: Progress) -> str:
    """The file's sha256, compared with what was ordered. Empty where nobody asks: a sparse local disk has gigabytes of
    zeros."""
    if not order.sha256 and _local(order.source):
        return ""
    from belljar.image.store.manifest import sha256_of

    progress.step("Taking the file's digest")
    found = sha256_of(blob)
    if order.sha256 and found != order.sha256:
        raise ImageMismatch(f"{without_password(order.source)}: ordered sha256 {order.sha256}, got {found}")
    return found


def _checked_signer(blob: Path, order: Order, progress: Progress) -> str:
    """Who signed the file, where a signer was asked for. Checked before anything else reads the file."""
    if not order.signer:
        return ""
    from datetime import UTC, datetime

    from belljar.image.intake import embedded

    progress.step("Checking its signature")
    now = datetime.fromtimestamp(time.time(), UTC).replace(tzinfo=None)
    return embedded.verify(blob, embedded.signer_of(order.signer), now)


def _flatten(blob: Path, raw: Path, largest: int) -> None:
    check_qcow2(blob, largest, PATIENCE)
    raw.touch(0o600)
    run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", "{0}", "{1}"], [blob], PATIENCE, largest, writable=[raw])
    blob.unlink()
