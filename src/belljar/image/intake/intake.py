"""Turn a raw disk into an image of the store: find its kernel, make its ramdisk, write its qcow2, publish it.

Images that were built here and images from outside both come this way. The disk is not trusted.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from belljar.errors import BelljarError, HostError, ImageCorrupt, ImageTooLarge, ImageUnfit
from belljar.host import commands
from belljar.host.files import remove_tree, write_whole
from belljar.host.locks import Lock, locked, try_lock
from belljar.image import Image, Surveyor
from belljar.image.boot import initramfs, kernel, modules
from belljar.image.intake import sandbox
from belljar.image.intake.disk import firmware_kinds, may_have_a_root
from belljar.image.intake.survey import BUSYBOXES, Survey, describe
from belljar.image.progress import Progress
from belljar.image.store import manifest
from belljar.image.store.store import Store
from belljar.records import dataclass, field, replace

# Measured in docs/develop/decisions/0003-a-quick-start.md. panic=-1: a panic is a reset at once, and QEMU ends at a reset.
# no_timer_check: an emulated guest that waits for its processor longer than for four ticks takes that for a broken timer and
# panics; seen with Linux 6.1 on a host with ten processes per core. Under KVM the kernel leaves that check out by itself.
APPEND = "console=ttyS0 quiet panic=-1 mitigations=off cryptomgr.notests no_timer_check"
SPARE = 1 << 20  # bytes of a small qcow2 file that are not its disk's
RAW, ARCHIVE = "disk.raw", "survey.tar"  # in a draft
REMOVED = "removed-"  # prefix of folders that are being removed
COPYING = 4 * 3600.0  # seconds for one file
MOST_KERNELS = 20  # that are looked at, the newest first


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
    is_disc: bool = False  # a CD-ROM, which is only started; its files are not read


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
    """A folder for an image in the making. Removed at the end, whatever happens, also when this process is told to end; when it is
    killed, by the next maker of a draft or by `gc`."""
    with suppress(BelljarError):  # of what cannot be removed, `gc` tells
        list(abandoned(store))
    while True:
        folder = store.work_folder("drafts") / f"{word}-{os.getpid()}-{time.monotonic_ns():x}"
        folder.mkdir(mode=0o755 if store.shared else 0o700)
        with suppress(FileNotFoundError):  # until its lock is held, `gc` may take it for an abandoned one
            if lock := try_lock(folder / "maker"):
                break
    with lock, _interruptible():
        try:
            yield folder
        finally:
            drop(folder)


@contextmanager
def _interruptible() -> Iterator[None]:
    """A signal that would end this process raises SystemExit or KeyboardInterrupt, once: what is begun is undone first. What somebody
    handles or ignores stays so; only the main thread can do this."""

    def end(number: int, _: object) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    numbers = sandbox.ENDING if threading.current_thread() is threading.main_thread() else ()
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) in usual}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def abandoned(store: Store, *, dry_run: bool = False) -> Iterator[Path]:
    """Drafts whose makers are dead, each as it was (or would be) removed."""
    folder = store.folder / "drafts"
    for draft in sorted(folder.iterdir()) if folder.is_dir() else ():
        with suppress(FileNotFoundError):  # another `gc` was quicker
            if lock := nullcontext() if draft.name.startswith(REMOVED) else try_lock(draft / "maker"):
                with lock:
                    if not dry_run:
                        drop(draft)
                    yield draft


def drop(folder: Path) -> None:
    """Remove a draft. Raises HostError when something is mounted in it: that may be the host's own /dev."""
    inside = f"{folder}/"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        mounted = [point for point in (line.split(" ")[4] for line in file) if point.startswith(inside)]
    if mounted:
        hint = "Unmount it, then `belljar image gc`."
        raise HostError(f"{folder} is not removed: {mounted[0]} is mounted in it", hint=hint)
    try:
        if not folder.name.startswith(REMOVED):  # in one step: no other process sees half of it
            folder = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
    except FileNotFoundError:
        return
    try:
        remove_tree(folder)
    except (OSError, RecursionError):  # an unpacked image: files of subordinate ids, or folders in folders without end
        sandbox.remove(folder)


def borrow(store: Store, image: Image, parts: Sequence[str], folder: Path) -> None:
    """Give a draft the same files as an image has: other names of them, where it is in the same store; else copies, which take no room
    where the file system has reflinks."""
    for path in (image.disk.parent / part for part in parts):
        if path.exists() and image.store == store.folder:
            os.link(path, folder / path.name)
        elif path.exists():
            commands.run(["cp", "--reflink=auto", "--", str(path), str(folder)], timeout=COPYING, bound=True)


def alone(store: Store, word: str, what: str, progress: Progress, folder: str = "downloads") -> Lock:
    """Held, no other process makes *word*. Says when another one is waited for."""
    path = store.work_folder(folder) / f"{word}.lock"
    if lock := try_lock(path):
        return lock
    progress.step(f"Waiting for another belljar that is about to {what}")
    return locked(path, timeout=store.settings.lock_timeout, what=what)


def take(store: Store, folder: Path, origin: Origin, progress: Progress, judge: Judge | None = None) -> Image:
    """Make the image of the draft *folder* and publish it. Uses up the raw disk RAW in it, and ARCHIVE: of a system that was built
    here that is there already, else the store's surveyor makes it."""
    raw = folder / RAW
    progress.step("Writing the disk")
    size = -(-raw.stat().st_size // 512) * 512  # whole sectors
    if size > store.settings.max_size:
        raise ImageTooLarge(f"a disk of {size} bytes, the limit is {store.settings.max_size}")
    os.truncate(raw, size)
    sandbox.convert(raw, "raw", folder / manifest.DISK, "qcow2", size + size // 64 + SPARE)
    disc = Boot(facts={"boots_by": "disc"})
    boot = disc if origin.is_disc else _look(folder, raw, size, origin, progress, store.surveyor)
    properties = {**boot.facts, **origin.facts}
    if judge is not None:
        judge(properties, bool(boot.kernel))
    raw.unlink()
    (folder / ARCHIVE).unlink(missing_ok=True)
    for name, data in ((manifest.KERNEL, boot.kernel), (manifest.INITRD, boot.initrd)):
        if data:
            write_whole(folder / name, data)
    progress.step("Taking its digest")
    append = f"{APPEND if origin.append is None else origin.append} {boot.words}".strip() if boot.kernel else ""
    what = manifest.Facts(origin.source, append, time.time(), boot.os, size, properties)
    return store.publish(folder, what, origin.name)


def _look(folder: Path, raw: Path, size: int, origin: Origin, progress: Progress, surveyor: Surveyor | None) -> Boot:
    """How the disk is started, as its importer wants it, and what is in it."""
    archive, root = folder / ARCHIVE, None
    try:
        if surveyor and not archive.exists() and may_have_a_root(raw):
            progress.step("Looking for a kernel in the disk")
            surveyor(folder / manifest.DISK, size, archive)
        if archive.exists() and (survey := Survey(archive, size)).modules:
            root = survey
    except BelljarError as exc:
        progress.step(f"Its file systems could not be looked into: {exc.message}")
    os_name, properties = describe(root) if root else ("", {})
    kinds = firmware_kinds(raw)
    boot = _start(origin, root, kinds, progress)
    if boot.kernel and (least := kernel.least_memory(boot.kernel, boot.initrd)):
        properties["least_memory"] = least
    if origin.initrd:
        properties.pop("mounts", None)  # these are of the disk's kernels
    return replace(boot, os=os_name, facts={**properties, **boot.facts, "firmware": kinds})


def _start(origin: Origin, root: Survey | None, kinds: Sequence[str], progress: Progress) -> Boot:
    """The kernel that was given, the firmware that was asked for, or the newest kernel of the disk; firmware, where it has none that
    can be started. Raises ImageUnfit when the disk does not have what is asked for."""
    if origin.kernel:
        return _given(origin.kernel, origin.initrd, root)
    if origin.firmware not in ("auto", "none"):
        if origin.firmware not in kinds:
            has = f"only one for {' and '.join(kinds)}" if kinds else "none at all"
            raise ImageUnfit(f"--firmware {origin.firmware}: the disk has no boot loader for it, {has}")
        return Boot(facts={"boots_by": "firmware", "use_firmware": origin.firmware})
    try:
        if root:
            for version, path in _kernels(root):
                with suppress(ImageCorrupt):
                    return _direct(root, version, root.read(path))
    except BelljarError as exc:
        progress.step(f"Its kernel cannot be started directly: {exc.message}")
    if origin.firmware == "none":
        raise ImageUnfit("no kernel belljar can start was found in the disk, and it may not boot by firmware")
    return Boot(facts={"boots_by": "firmware"})


def _given(given: Path, initrd: Path | None, root: Survey | None) -> Boot:
    """A kernel that the importer gave. With its own ramdisk, that is used and must start an agent that the image has; without,
    belljar makes one from the modules in the disk."""
    data = given.read_bytes()
    version = kernel.release(data)
    if initrd:
        properties = {"boots_by": "kernel", "agent_in_initrd": False, "release": version}
        return Boot(data, initrd.read_bytes(), facts=properties)
    if root and version in root.names(root.modules):
        return _direct(root, version, data)
    hint = "Give its ramdisk too, with --initrd."
    raise ImageCorrupt(f"the disk has no modules for the kernel {given} ({version or 'of unknown version'})", hint=hint)


def _direct(root: Survey, version: str, data: bytes) -> Boot:
    """Direct boot of a kernel with our ramdisk. Raises ImageCorrupt when a part is missing."""
    if not kernel.is_bzimage(data):
        raise ImageCorrupt(f"kernel {version} is not a bzImage")
    selection = modules.select(root.read, f"{root.modules}/{version}", root.fstype)
    initrd = initramfs.image_part(_busybox(root), selection)
    elf = kernel.directly_bootable(data)
    properties = {
        "root": root.device, "fstype": root.fstype, "release": version, "boots_by": "kernel", "agent_in_initrd": True,
        "kernel_form": "elf" if elf else "bzimage",
    }  # fmt: skip
    return Boot(elf or data, initrd, root.words, facts=properties)


def _kernels(root: Survey) -> list[tuple[str, str]]:
    """(version, path) of each kernel that has its modules beside it, the newest first. Fedora keeps a copy among them."""
    versions = sorted(root.versions(), key=_version_key, reverse=True)
    return [
        (version, f"{folder}/{name}")
        for version in versions[:MOST_KERNELS]
        for folder, name in ((f"{root.modules}/{version}", "vmlinuz"), ("/boot", f"vmlinuz-{version}"))
        if root.has(f"{folder}/{name}")
    ]


def _version_key(version: str) -> list[tuple[int, int, str]]:
    """Numbers compare as numbers: 6.1.0-10 is newer than 6.1.0-9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.findall(r"\d+|[a-z]+", version)]


def _busybox(root: Survey) -> bytes:
    """A static busybox: the image's own, else this host's."""
    for path in BUSYBOXES:
        with suppress(ImageCorrupt):
            if initramfs.is_static(data := root.read(path)):
                return data
    if (host := commands.which("busybox")) and initramfs.is_static(data := Path(host).read_bytes()):
        return data
    raise BelljarError("no static busybox, in the image or on this host", hint="Install the package busybox-static.")
