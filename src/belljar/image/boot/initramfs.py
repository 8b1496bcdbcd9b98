"""Belljar's own initial ramdisk, in two archives: the image's (busybox, a handful of drivers) and belljar's (scripts, agent).

The first is made from the image's kernel modules when the image is stored, so nothing has to be installed in an image. The second
is of the belljar that starts the machine. What the two scripts do is written in `inside/`.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from belljar.agent import bundle
from belljar.hints import TYPE_CHECKING
from belljar.host.quick_imports import sha256
from belljar.image import UNIT, Image
from belljar.model import Context

if TYPE_CHECKING:
    from belljar.host.python.interpreter import Interpreter
    from belljar.image.boot.modules import Selection

INSIDE = Path(__file__).parent / "inside"
OUR_FILES = (
    ("init", INSIDE / "init", 0o755), ("belljar/init", INSIDE / "guest-init", 0o755),
    ("inject/belljar-agent.service", UNIT, 0o644),
)  # fmt: skip
DEFAULT_INIT = "/sbin/init"
OWN_INIT = (Context.CLOUD_INIT, Context.INJECT, Context.NONE)
APPLETS = (
    "sh", "mount", "insmod", "switch_root", "poweroff", "sleep", "mkdir", "cp", "ln", "ifconfig", "chroot",
)  # fmt: skip
FOLDERS = ("bin", "dev", "proc", "sys", "root", "modules", "belljar")


def image_part(busybox: bytes, selection: Selection) -> bytes:
    """The archive that belongs to the image: a shell and drivers, the same for every version of belljar."""
    from belljar.image.boot import cpio

    entries = [cpio.folder(name) for name in FOLDERS]
    entries.append(("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)))
    entries.append(cpio.file("bin/busybox", busybox, 0o755))
    entries += [(f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox", (0, 0)) for name in APPLETS]
    entries += [cpio.file(f"modules/{name}", data) for name, data in sorted(selection.files.items())]
    for group, names in sorted(selection.groups.items()):
        entries.append(cpio.file(f"modules/{group}", "".join(f"{name}\n" for name in names).encode()))
    return cpio.archive(entries)


def agent_part(python: Interpreter) -> bytes:
    """The archive that belongs to this version of belljar: /init, and what it copies to /run/belljar of the guest."""
    from belljar.image.boot import cpio

    files = [(f"belljar/agent/{name}", data, mode) for name, data, mode in python.files()]
    files += [(name, path.read_bytes(), mode) for name, path, mode in OUR_FILES]
    folders = {str(parent) for name, _, _ in files for parent in PurePosixPath(name).parents} - {"."}
    entries = [*map(cpio.folder, sorted(folders)), *(cpio.file(name, data, mode) for name, data, mode in files)]
    return cpio.archive(entries)


def boot_digest(image: Image) -> str:
    """A digest of everything that is booted: the image, and the current agent."""
    # With the time it was stored: an image that replaced a damaged one uses nothing that was made of that.
    digest = sha256(f"{image.digest} {image.created!r}".encode())
    for _, path, _ in OUR_FILES:
        digest.update(sha256(path.read_bytes()).digest())
    digest.update(bundle.key())
    return digest.hexdigest()


def is_static(program: bytes) -> bool:
    """Is this a 64-bit x86 ELF program that needs no loader?"""
    from belljar.host.python.elf import MAGIC, loader_of

    is_64_bit_x86 = program[:5] == MAGIC + b"\2" and program[18:20] == b"\x3e\0"
    return is_64_bit_x86 and len(program) >= 64 and not loader_of(program)
