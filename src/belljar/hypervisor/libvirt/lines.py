"""The folder of one running domain: the sockets QEMU connects to, and copies of what its user could not read.

A lock in it is held as long as the domain's supervisor lives: by it a domain without one is known.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from belljar.errors import HostError, ImageCorrupt, LibvirtRefused, NotPermitted
from belljar.host.files import no_space_as_error, private_folder, remove_tree
from belljar.host.locks import Lock, is_locked, try_lock
from belljar.model import MachineId

LONGEST = 107  # bytes of a socket's path: unix(7)
LOCK = "lock"
ACCEPTING = 5.0  # seconds between the start of a process and the connection it makes first of all


class Lines:
    """Made for one domain; `close` takes everything away, and libvirt's own log of the domain to the machine's."""

    def __init__(
        self, folder: Path, owner: tuple[int, int], names: tuple[str, ...] = ("channel", "console"),
        log: tuple[Path, Path] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self._owner, self.names, self._log = folder, owner, names, log
        self._listening: dict[str, socket.socket] = {}
        self._lock: Lock | None = None

    def open(self) -> None:
        """Raises HostError."""
        base = self.folder.parent
        if len(os.fsencode(self.folder / "channel")) > LONGEST:
            raise HostError(f"{base}: too long for the path of a socket", hint="Set `libvirt.folder` to a short path.")
        private_folder(base, mode=0o711)
        remove_tree(self.folder)
        with no_space_as_error(self.folder):
            self.folder.mkdir(mode=0o700)
            self._lock = try_lock(self.folder / LOCK)
            for name in self.names:
                self._listen(name)
            if self._is_foreign:
                os.chmod(self.folder, 0o711)

    @property
    def _is_foreign(self) -> bool:
        return self._owner[0] != os.geteuid()

    def path(self, name: str) -> Path:
        return self.folder / name

    def _listen(self, name: str) -> None:
        line = socket.socket(socket.AF_UNIX)
        self._listening[name] = line
        line.bind(str(self.folder / name))
        os.chmod(self.folder / name, 0o600)
        if self._is_foreign:
            os.chown(self.folder / name, *self._owner)
        line.listen(1)

    def accept(self, name: str) -> socket.socket:
        """The connection that the domain's process made. Raises LibvirtRefused."""
        listening = self._listening[name]
        listening.settimeout(ACCEPTING)
        try:
            line, _ = listening.accept()
        except OSError as exc:
            raise LibvirtRefused(f"QEMU runs and has not connected its {name} within {ACCEPTING:g} s") from exc
        line.setblocking(False)
        listening.close()
        (self.folder / name).unlink(missing_ok=True)
        return line

    def readable(self, path: Path, name: str) -> Path:
        """The file, or a copy of it where QEMU's user cannot reach it. Raises ImageCorrupt, NoSpace."""
        try:
            if can_reach(path, self._owner):
                return path
            with no_space_as_error(self.folder):
                shutil.copyfile(path, self.folder / name)
        except FileNotFoundError as exc:
            raise ImageCorrupt(f"{path}: missing") from exc
        os.chown(self.folder / name, *self._owner)
        os.chmod(self.folder / name, 0o400)
        return self.folder / name

    def reached(self, path: Path) -> Path:
        """The file, which QEMU's user must be able to open. Raises ImageCorrupt, NotPermitted."""
        if not path.exists():
            raise ImageCorrupt(f"{path}: missing")
        if not can_reach(path, self._owner):
            raise NotPermitted(
                f"{path}: by libvirt QEMU opens its disks itself, as uid {self._owner[0]}, who cannot reach this one",
                hint="Let that user enter the folders and read the file, or name another in `qemu.user`.",
            )
        return path

    def close(self, *, keep_log: bool = True) -> None:
        for line in self._listening.values():
            line.close()
        if self._lock is not None:
            self._lock.release()
        with suppress(OSError):
            remove_tree(self.folder)
        if self._log is not None and keep_log:
            with suppress(OSError):
                take_over(*self._log)


def has_keeper(base: Path, id: MachineId) -> bool:
    """Does somebody hold the lock of this domain's folder?"""
    try:
        return is_locked(base / id / LOCK)
    except OSError:
        return True  # somebody else's


def can_reach(path: Path, owner: tuple[int, int]) -> bool:
    """May this user, whose further groups are not known, walk there and read it?"""
    uid, gid = owner
    if uid == os.geteuid():
        return os.access(path, os.R_OK)
    above = all(_may(os.stat(folder), uid, gid, 0o1) for folder in path.resolve().parents)
    return above and _may(os.stat(path), uid, gid, 0o4)


def _may(facts: os.stat_result, uid: int, gid: int, right: int) -> bool:
    shift = 6 if facts.st_uid == uid else 3 if facts.st_gid == gid else 0
    return bool(facts.st_mode >> shift & right)


# -- libvirt's own log of a domain: a file for each, which libvirt keeps for ever -------------------------------------

LONGEST_LOG = 64 << 10  # bytes from the end of it that are read
# libvirt's own lines: the command with its variables, one word a line, and what begins with the time in this form.
LIBVIRTS = re.compile(rb"\\$|-msg timestamp=on$|\d{4}-\d\d-\d\d [\d:.]+\+0000: ")


def default_log_folder(uid: int) -> Path:
    """https://libvirt.org/kbase/debuglogs.html"""
    return Path("/var/log/libvirt/qemu") if uid == 0 else Path(os.path.expanduser("~/.cache/libvirt/qemu/log"))


def take_over(log: Path, into: Path) -> None:
    """Append what QEMU said to *into*, and remove the log. Raises OSError."""
    words = said_by_qemu(log)
    log.unlink()
    if words:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(into, flags, 0o600), "wb", buffering=0) as file:
            file.write(words)


def said_by_qemu(log: Path) -> bytes:
    with open(log, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - LONGEST_LOG, 0))
        lines = file.read(LONGEST_LOG).splitlines()
    return b"".join(line + b"\n" for line in lines if not LIBVIRTS.search(line))
