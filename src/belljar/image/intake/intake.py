"""Turn a raw disk into an image of the store: find its kernel, make its ramdisk, write its qcow2, publish it.

Images that were built here and images from outside both come this way. The disk is not trusted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.errors import BelljarError, CommandFailed, HostError, ImageCorrupt, ImageTooLarge, ImageUnfit
from belljar.host import commands
from belljar.host.files import free_bytes, no_space_as_error, remove_tree, write_whole
from belljar.host.locks import Lock, locked, try_lock
from belljar.image import Image
from belljar.image.boot import initramfs, kernel, modules
from belljar.image.intake.disk import firmware_kinds, may_have_a_root
from belljar.image.intake.survey import BUSYBOXES, Survey, describe
from belljar.image.progress import Progress
from belljar.image.store import manifest
from belljar.records import dataclass, field, replace

if TYPE_CHECKING:
    from belljar.image.store.store import Store

# Measured in docs/decisions/0003-a-quick-start.md. panic=-1: a panic is a reset at once, and QEMU ends at a reset.
# no_timer_check: an emulated guest that waits for its processor longer than for four ticks takes that for a broken timer and
# panics; seen with Linux 6.1 on a host with ten processes per core. Under KVM the kernel leaves that check out by itself.
APPEND = "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests no_timer_check"
CONVERT_TIMEOUT = 3600
REMOVED = "removed-"  # prefix of folders that are being removed
MODULE_FOLDERS = ("/usr/lib/modules", "/lib/modules")
MOST_KERNELS = 20  # that are looked at, the newest first
VERSION = re.compile(r"[0-9][A-Za-z0-9._+~-]*")


# Looks into a qcow2 disk of so many bytes, and writes what it saw to a file: see `survey`.
Surveyor = Callable[[Path, int, Path], object]
# Called with the facts about an image, and whether its kernel is started directly; raises an error to refuse it.
Judge = Callable[[Mapping[str, Any], bool], object]


@dataclass(frozen=True)
class Origin:
    """Where a disk comes from, and how it should be started."""

    source: str
    name: str
    kernel: Path | None = None
    initrd: Path | None = None
    append: str | None = None
    firmware: str = "auto"  # auto, bios and uefi: boot by it in any case; none: only directly
    facts: dict[str, Any] = field(default_factory=dict)
    is_disc: bool | None = False  # a CD-ROM, which is only started; its files are not read. None: as the file is


@dataclass(frozen=True)
class Boot:
    """How a disk can be started. Without a kernel: by firmware."""

    kernel: bytes = b""
    initrd: bytes = b""
    words: str = ""  # of the command line that our ramdisk needs, whatever else is asked for
    os: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


@contextmanager
def draft(store: Store, word: str) -> Iterator[Path]:
    """A folder for an image in the making. Removed at the end, whatever happens; by `gc` when we die."""
    folder, lock = _begun(store, word)
    try:
        yield folder
    finally:
        drop(folder)
        lock.release()


def _begun(store: Store, word: str) -> tuple[Path, Lock]:
    """A new draft with its maker's lock. Until that is held, `gc` may take the folder for an abandoned one."""
    while True:
        folder = store.work_folder("drafts") / f"{word}-{os.getpid()}-{time.monotonic_ns():x}"
        folder.mkdir(mode=0o755 if store.shared else 0o700)
        with suppress(FileNotFoundError):
            if lock := try_lock(folder / "maker"):
                return folder, lock


def drop(folder: Path) -> None:
    """Remove a draft. Raises HostError when something is mounted in it: that may be the host's own /dev."""
    inside = f"{folder}/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounted = [point for point in (line.split(" ")[4] for line in file) if point.startswith(inside)]
    if mounted:
        raise HostError(
            f"{folder} is not removed: {mounted[0]} is mounted in it", hint="Unmount it, then `belljar image gc`."
        )
    if not folder.name.startswith(REMOVED):
        trash = folder.with_name(f"{REMOVED}{folder.name}")
        try:
            folder.rename(trash)  # in one step: no other process sees half of it
        except FileNotFoundError:
            return
        folder = trash
    remove_tree(folder)


@contextmanager
def alone(store: Store, word: str, what: str, progress: Progress, folder: str = "downloads") -> Iterator[bool]:
    """Be the only process that makes *word*; tell when another one is waited for. Yields whether there was another."""
    path = store.work_folder(folder) / f"{word}.lock"
    if lock := try_lock(path):
        try:
            yield False
        finally:
            lock.release()
        return
    progress.step(f"Waiting for another belljar that is about to {what}")
    with locked(path, timeout=store.settings.lock_timeout, what=what):
        yield True


def take(
    store: Store,
    folder: Path,
    raw: Path,
    origin: Origin,
    progress: Progress,
    surveyor: Surveyor | None = None,
    judge: Judge | None = None,
) -> Image:
    """Make the image of the raw disk *raw*, which lies in the draft *folder*, and publish it. Uses up *raw*."""
    progress.step("Writing the disk")
    size = _whole_sectors(raw, store.settings.max_size)
    if _is_blank(raw):
        raise ImageUnfit(f"{origin.source}: a disk of zeros only", hint="Give the disk of a system that was installed.")
    _convert(raw, folder / manifest.DISK)
    boot = Boot(facts={"boots_by": "disc"}) if origin.is_disc else _look(folder, raw, size, origin, progress, surveyor)
    if boot.kernel and (least := kernel.least_memory(boot.kernel, boot.initrd)):
        boot = replace(boot, facts={**boot.facts, "least_memory": least})
    if judge is not None:
        judge({**boot.facts, **origin.facts}, bool(boot.kernel))
    raw.unlink()
    for name, data in ((manifest.KERNEL, boot.kernel), (manifest.INITRD, boot.initrd)):
        if data:
            with no_space_as_error(folder):
                write_whole(folder / name, data)
    progress.step("Taking its digest")
    what = manifest.Facts(
        source=origin.source, append=_command_line(origin.append, boot), created=time.time(), os=boot.os, virtual_size=size,
        facts={**boot.facts, **origin.facts},
    )  # fmt: skip
    return store.publish(folder, what, origin.name)


def _look(folder: Path, raw: Path, size: int, origin: Origin, progress: Progress, surveyor: Surveyor | None) -> Boot:
    """How the disk can be started, as its importer wants it."""
    archive = folder / "survey.tar"
    try:
        root = None
        if surveyor and may_have_a_root(raw):
            root = _surveyed(folder, size, surveyor, origin, progress)
        boot = _given(origin.kernel, origin.initrd, root) if origin.kernel else _newest(root, progress)
    finally:
        archive.unlink(missing_ok=True)
    return _chosen(raw, boot, origin)


def _surveyed(folder: Path, size: int, surveyor: Surveyor, origin: Origin, progress: Progress) -> Survey | None:
    """Its root file system; None where it cannot be read."""
    progress.step("Looking for a kernel in the disk")
    try:
        surveyor(folder / manifest.DISK, size, folder / "survey.tar")
        return Survey(folder / "survey.tar", size)
    except BelljarError as exc:
        progress.step(f"Its file systems could not be looked into: {exc.message}")
        return None


def _chosen(disk: Path, boot: Boot, origin: Origin) -> Boot:
    """How its importer wants it started. Raises ImageUnfit when the disk does not have what that takes."""
    kinds = firmware_kinds(disk)
    boot = replace(boot, facts={**boot.facts, "firmware": kinds})
    if origin.firmware == "none" and not boot.kernel:
        raise ImageUnfit("no kernel belljar can start was found in the disk, and it may not boot by firmware")
    if origin.firmware in ("auto", "none"):
        return boot
    if origin.firmware not in kinds:
        has = f"only one for {' and '.join(kinds)}" if kinds else "none at all"
        raise ImageUnfit(f"--firmware {origin.firmware}: the disk has no boot loader for it, {has}")
    return Boot(os=boot.os, facts={**_without_kernel(boot.facts), "use_firmware": origin.firmware})


def _without_kernel(facts: dict[str, Any]) -> dict[str, Any]:
    of_kernel = ("release", "agent_in_initrd", "kernel_form")
    return {**{name: fact for name, fact in facts.items() if name not in of_kernel}, "boots_by": "firmware"}


def _newest(root: Survey | None, progress: Progress) -> Boot:
    """The newest kernel of the disk with its modules, and a ramdisk of belljar's. Firmware, where there is no such kernel."""
    if root is None or not _modules_folder(root):
        return Boot(facts={"boots_by": "firmware"})
    os_name, facts = _described(root)
    try:
        for version, path in _kernels(root):
            with suppress(ImageCorrupt):
                return _direct(root, version, root.read(path), os_name, facts)
    except BelljarError as exc:
        progress.step(f"Its kernel cannot be started directly: {exc.message}")
    return Boot(os=os_name, facts={**facts, "boots_by": "firmware"})


def _described(root: Survey) -> tuple[str, dict[str, Any]]:
    """The system's name and facts, and what its kernels can mount: any of them, since the disk decides which one a firmware starts."""
    os_name, facts = describe(root)
    folder = _modules_folder(root)
    with suppress(ImageCorrupt):
        versions = filter(VERSION.fullmatch, root.names(folder))
        facts["mounts"] = modules.mounts(root.read, [f"{folder}/{version}" for version in versions])
    return os_name, facts


def _given(given: Path, initrd: Path | None, root: Survey | None) -> Boot:
    """A kernel that the importer gave. With its own ramdisk, that is used and must start an agent that the image has; without,
    belljar makes one from the modules in the disk."""
    data = given.read_bytes()
    version = kernel.release(data)
    os_name, facts = _described(root) if root and _modules_folder(root) else ("", {})
    if initrd:
        facts |= {"boots_by": "kernel", "agent_in_initrd": False, "release": version}
        facts.pop("mounts", None)  # these are of the disk's kernels
        return Boot(data, initrd.read_bytes(), "", os_name, facts)
    if root and version in root.names(_modules_folder(root)):
        return _direct(root, version, data, os_name, facts)
    raise ImageCorrupt(
        f"the disk has no modules for the kernel {given} ({version or 'of unknown version'})",
        hint="Give its ramdisk too, with --initrd.",
    )


def _direct(root: Survey, version: str, data: bytes, os_name: str, facts: dict[str, Any]) -> Boot:
    """Direct boot of a kernel with our ramdisk. Raises ImageCorrupt when a part is missing."""
    if not kernel.is_bzimage(data):
        raise ImageCorrupt(f"kernel {version} is not a bzImage")
    folder = f"{_modules_folder(root)}/{version}"
    selection = modules.select(root.read, folder, root.fstype)
    initrd = initramfs.image_part(_busybox(root), selection)
    elf = kernel.directly_bootable(data)
    facts = {
        **facts, "root": root.device, "fstype": root.fstype, "release": version, "boots_by": "kernel", "agent_in_initrd": True,
        "kernel_form": "elf" if elf else "bzimage",
    }  # fmt: skip
    return Boot(elf or data, initrd, root.words, os_name, facts)


def _command_line(asked: str | None, boot: Boot) -> str:
    if not boot.kernel:
        return ""
    return f"{APPEND if asked is None else asked} {boot.words}".strip()


def _kernels(root: Survey) -> list[tuple[str, str]]:
    """(version, path) of each kernel that has its modules beside it, the newest first. Fedora keeps a copy among them."""
    folder = _modules_folder(root)
    versions = sorted(filter(VERSION.fullmatch, root.names(folder)), key=_version_key, reverse=True)[:MOST_KERNELS]
    places = [(version, f"{folder}/{version}", "vmlinuz") for version in versions]
    places += [(version, "/boot", f"vmlinuz-{version}") for version in versions]
    found = [(version, f"{place}/{name}") for version, place, name in places if name in root.names(place)]
    return sorted(found, key=lambda one: _version_key(one[0]), reverse=True)


def _version_key(version: str) -> list[tuple[int, int, str]]:
    """Numbers compare as numbers: 6.1.0-10 is newer than 6.1.0-9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[a-z]+", version)]


def _modules_folder(root: Survey) -> str:
    for folder in MODULE_FOLDERS:
        if root.names(folder):
            return folder
    return ""


def _busybox(root: Survey) -> bytes:
    """A static busybox: the image's own, else this host's."""
    for path in BUSYBOXES:
        with suppress(ImageCorrupt):
            if initramfs.is_static(data := root.read(path)):
                return data
    if (host := commands.which("busybox")) and initramfs.is_static(data := Path(host).read_bytes()):
        return data
    raise BelljarError("no static busybox, in the image or on this host", hint="Install the package busybox-static.")


def _whole_sectors(raw: Path, largest: int) -> int:
    """The disk's size, filled up to whole sectors. Raises ImageTooLarge, ImageCorrupt."""
    size = -(-raw.stat().st_size // 512) * 512
    if size == 0:
        raise ImageCorrupt("the disk is empty")
    if size > largest:
        raise ImageTooLarge(f"a disk of {size} bytes, the limit is {largest}")
    os.truncate(raw, size)
    return size


def _is_blank(raw: Path) -> bool:
    """Is there no byte but zeros? Holes are not read."""
    with open(raw, "rb") as file:
        at = 0
        while True:
            try:
                file.seek(at := os.lseek(file.fileno(), at, os.SEEK_DATA))
            except OSError:
                return True  # nothing but a hole follows
            if file.read(manifest.CHUNK).strip(b"\0"):
                return False
            at += manifest.CHUNK


def _convert(raw: Path, disk: Path) -> None:
    """Holes stay holes. The source's format is given, so its bytes are never taken for a header."""
    used = raw.stat().st_blocks * 512
    with no_space_as_error(disk):
        if free_bytes(disk.parent) < used:
            raise OSError(28, os.strerror(28), str(disk))
    argv = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(raw), str(disk)]
    try:
        commands.run(argv, timeout=CONVERT_TIMEOUT, bound=True)
    except CommandFailed as exc:
        with no_space_as_error(disk):
            if "No space left" in exc.message:
                raise OSError(28, os.strerror(28), str(disk)) from exc
        raise
