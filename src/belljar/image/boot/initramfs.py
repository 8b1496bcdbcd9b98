"""Belljar's own initial ramdisk, in two archives: the image's (busybox, a handful of drivers) and belljar's (scripts, agent).

The first is made from the image's kernel modules when the image is stored, so nothing has to be installed in an image but
python3. The second is of the belljar that starts the machine. What the two scripts do is written in `inside/`.
"""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath

from belljar.agent import bundle
from belljar.hints import TYPE_CHECKING
from belljar.image import Image, agent_unit
from belljar.model import Context

if TYPE_CHECKING:
    from belljar.host.python.interpreter import Interpreter
    from belljar.image.boot import cpio
    from belljar.image.boot.modules import Selection

INSIDE = Path(__file__).parent / "inside"
UNIT = INSIDE / "belljar-agent.service"
OUR_FILES = (("init", INSIDE / "init"), ("belljar/init", INSIDE / "guest-init"))  # in the ramdisk, besides the agent
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
    entries.append(cpio.character_device("dev/console", 5, 1))
    entries.append(cpio.file("bin/busybox", busybox, 0o755))
    entries += [cpio.link(f"bin/{name}", "busybox") for name in APPLETS]
    entries += [cpio.file(f"modules/{name}", data) for name, data in sorted(selection.files.items())]
    for group, names in sorted(selection.groups.items()):
        entries.append(cpio.file(f"modules/{group}", "".join(f"{name}\n" for name in names).encode()))
    return cpio.archive(entries)


def agent_part(image: Image, python: Interpreter | None = None) -> bytes:
    """The archive that belongs to this version of belljar: /init, and what it copies to /run/belljar of the guest. *python*: for
    an image that has none which fits."""
    from belljar.image.boot import cpio

    entries = [cpio.folder("belljar"), cpio.folder("inject")]
    entries += [cpio.file(name, path.read_bytes(), 0o755) for name, path in OUR_FILES]
    entries.append(cpio.file("inject/belljar-agent.service", agent_unit(is_carried=python is not None).encode()))
    entries.append(cpio.file("belljar/agent.py", bundle.source()))
    if python is not None:
        entries += _unpacked(python)
    if python is not None or _same_python(image):
        entries.append(cpio.file("belljar/agent.pyc", bundle.compiled()))
    return cpio.archive(entries)


def boot_digest(image: Image, python: Interpreter | None = None) -> str:
    """A digest of everything that is booted: the image's kernel, ramdisk and command line, and the current agent."""
    from belljar.host.quick_imports import sha256

    # With the time it was stored: an image that replaced a damaged one uses nothing that was made of that.
    digest = sha256(f"{image.boot_digest} {image.created!r}".encode())
    digest.update(sys.implementation.cache_tag.encode() if _same_python(image) else b"-")
    if python is not None:
        digest.update(python.digest.encode())
    for path in (*(path for _, path in OUR_FILES), UNIT):
        digest.update(sha256(path.read_bytes()).digest())
    digest.update(bundle.digest())
    return digest.hexdigest()


def fits(image: Image) -> bool:
    """Can the image's own Python run the agent? Yes, where its minor version is not known."""
    major, _, minor = str(image.facts.get("python", "3")).partition(".")
    return major == "3" and (not minor.isdigit() or int(minor) >= 6)


def _unpacked(python: Interpreter) -> list[cpio.Entry]:
    """Its files, each folder before what lies in it."""
    from belljar.image.boot import cpio

    files = [(f"belljar/python/{name}", data, mode) for name, data, mode in python.files()]
    folders = {str(parent) for name, _, _ in files for parent in PurePosixPath(name).parents} - {".", "belljar"}
    return [*map(cpio.folder, sorted(folders)), *(cpio.file(name, data, mode) for name, data, mode in files)]


def own_init(image: Image) -> str:
    """The path of the image's own init."""
    return str(image.facts.get("init") or DEFAULT_INIT)


def words_for(image: Image, context: Context) -> list[str]:
    """The words that tell /init of the ramdisk what a context needs; none for belljar's own init."""
    if context not in OWN_INIT:
        return []
    return [f"belljar.init={own_init(image)}", *(["belljar.inject"] if context is Context.INJECT else [])]


def digest_with(digest: str, words: list[str]) -> str:
    """The digest of a boot with further words on its command line."""
    from belljar.host.quick_imports import sha256

    return sha256("\n".join([digest, *words]).encode()).hexdigest()


def is_static(program: bytes) -> bool:
    """Is this a 64-bit x86 ELF program that needs no loader?"""
    from belljar.host.python.elf import MAGIC, loader_of

    return (
        program[:5] == MAGIC + b"\2" and program[18:20] == b"\x3e\0" and len(program) >= 64 and not loader_of(program)
    )


def _same_python(image: Image) -> bool:
    """Can the guest's Python run what this one compiles? Only the same minor version can."""
    return bool(image.facts.get("python") == f"{sys.version_info[0]}.{sys.version_info[1]}")
