"""The templates on disk: one folder each, made under a draft name, trusted only while nothing in it has changed.

    templates/<key>/ram          guest memory; belongs to QEMU's user where QEMU must be able to open it read-write
    templates/<key>/more0 ...    a fork's: the memory that was plugged into its parent
    templates/<key>/state        device state
    templates/<key>/disk.qcow2   what the guest wrote while it booted, on top of the image
    templates/<key>/clone.qcow2  an empty overlay on disk.qcow2, copied for each clone
    templates/<key>/seed.iso     the disc its guest has in a drive; most have none
    templates/<key>/manifest.json
    templates/<key>.draft/       one in the making; templates/<key>.lock says by whom

A fork is the template of one running machine: it is nobody's once no process holds its lock, and is made for no later start of the
host.

Nothing here knows QEMU's protocol or runs a domain. A clone opens all files before it starts, so that removing a
template never harms a machine.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from belljar.errors import BelljarError, NoSpace, TemplateError, UnsafeFolder
from belljar.hints import Any
from belljar.host.files import (
    check_ours,
    free_bytes,
    no_space_as_error,
    private,
    private_folder,
    read_capped,
    read_json,
    remove_tree,
    sync,
    write_all,
    write_whole,
)
from belljar.host.locks import try_lock
from belljar.host.quick_imports import sha256
from belljar.hypervisor import Template
from belljar.model import MIB, SEED, dumps

FORMAT = 2  # of the folder; part of every key
KEY = "[0-9a-f]" * 20  # what the name of a folder looks like
RAM, MORE, STATE, DISK, CLONE, MANIFEST = "ram", "more", "state", "disk.qcow2", "clone.qcow2", "manifest.json"
DRAFT, LOCK = ".draft", ".lock"
LARGEST_SEED = 1 << 30
LARGEST_OVERLAY = 64 * MIB  # an empty overlay on the largest disk
ROOM = 256 * MIB  # what a boot writes to its disk, and the device state
DAY = 86400.0
UNREADABLE = (BelljarError, ValueError, KeyError, TypeError, OSError)  # what a manifest that makes no sense raises


def key_of(properties: Mapping[str, Any]) -> str:
    """The name of the template that has exactly these properties."""
    text = json.dumps({"format": FORMAT, **properties}, sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()[:20]


class TemplateStore:
    """Templates of one user, in one private folder."""

    def __init__(self, folder: Path, *, days: float) -> None:
        self.folder, self._days = folder, days

    def path(self, key: str) -> Path:
        return self.folder / key

    def draft(self, key: str) -> Path:
        return self.folder / f"{key}{DRAFT}"

    def lock(self, key: str) -> Path:
        private_folder(self.folder)
        return self.folder / f"{key}{LOCK}"

    def find(self, key: str) -> Template | None:
        """The template, if it is there and as it was made. Raises UnsafeFolder when the whole store cannot be trusted."""
        if not self.folder.exists():
            return None
        check_ours(self.folder)
        with suppress(*UNREADABLE):
            template = self.read(key)
            return None if template is None or self.changes(template) else template
        return None

    def read(self, key: str) -> Template | None:
        """What its manifest says, if that makes sense."""
        folder = self.path(key)
        with suppress(*UNREADABLE):
            check_ours(folder)
            manifest = read_json(folder / MANIFEST)
            if manifest["key"] == key == key_of(properties := manifest["facts"]):
                size = sum(os.lstat(folder / name).st_blocks * 512 for name in manifest["files"])
                return Template(key, folder, size, float(manifest["created"]), properties, frozenset(manifest["grows"]))
        return None

    def changes(self, template: Template) -> list[str]:
        """Which of its files are no longer as they were when it was made: by size, times, inode, owner, mode."""
        wrong = []
        for name, then in read_json(template.folder / MANIFEST)["files"].items():
            try:
                is_same = dict(then).items() <= identity(os.lstat(template.folder / name)).items()
            except FileNotFoundError:
                wrong.append(f"{name} is missing")
            else:
                wrong += [] if is_same else [f"{name} has changed since it was made"]
        return wrong

    def all(self) -> list[Template]:
        """Every template that can be read, the youngest first."""
        templates = [template for path in self.folder.glob(KEY) if (template := self.read(path.name))]
        return sorted(templates, key=lambda template: template.created, reverse=True)

    # -- making ------------------------------------------------------------------------------------------------------

    def begin(
        self, key: str, memory: int, owner: tuple[int, int], more: Sequence[int] = (), seed: Path | None = None
    ) -> Path:
        """A draft with files of memory for QEMU's user and a copy of the disc. Raises NoSpace before anything is written."""
        private_folder(self.folder)
        sizes = {RAM: memory, **{f"{MORE}{number}": size for number, size in enumerate(more)}}
        free, memory = free_bytes(self.folder), sum(sizes.values())
        if free < memory + ROOM:
            raise NoSpace(f"{self.folder}: {free // MIB} MiB free, a template needs {(memory + ROOM) // MIB}")
        draft = self.draft(key)
        remove_tree(draft)
        with no_space_as_error(draft):
            draft.mkdir(mode=0o700)
            for name, size in sizes.items():
                with open(draft / name, "xb", opener=private) as file:
                    file.truncate(size)
                    give(file.fileno(), owner)
            if seed is not None and seed.exists():  # else a QEMU that is given it says so
                write_whole(draft / SEED, read_capped(seed, LARGEST_SEED))
        return draft

    def publish(
        self, key: str, properties: Mapping[str, Any], created: float, *, grows: Set[str] = frozenset(), ram_is_read: bool,
        is_open: bool = False,
    ) -> Template:  # fmt: skip
        """The draft becomes the template. *is_open*: other users may read it."""
        draft = self.draft(key)
        with no_space_as_error(draft):
            files = {}
            for name in sorted(os.listdir(draft)):
                with open(draft / name, "rb", opener=private) as file:
                    if ram_is_read or not name.startswith((RAM, MORE)):
                        give(file.fileno(), (os.geteuid(), os.getegid()))
                        os.fchmod(file.fileno(), 0o444)  # its folder is closed to others, as a rule
                    elif is_open:
                        os.fchmod(file.fileno(), 0o644)
                    if "fork" not in properties:
                        os.fsync(file.fileno())
                    files[name] = identity(os.fstat(file.fileno()))
            manifest = {"key": key, "created": created, "facts": properties, "files": files, "grows": sorted(grows)}
            write_whole(draft / MANIFEST, dumps(manifest), mode=0o644 if is_open else 0o600, durable=True)
            if is_open:
                self.folder.chmod(0o755)
                draft.chmod(0o755)
            remove_tree(self.path(key))  # one that could not be used any more
            draft.rename(self.path(key))
            sync(self.folder)
        if (template := self.read(key)) is None:
            raise TemplateError(f"the template {key} is gone again")
        return template

    @staticmethod
    def more(folder: Path) -> list[str]:
        """The files of memory that was plugged in, the first one first."""
        return sorted(path.name for path in folder.glob(f"{MORE}[0-9]"))

    # -- unmaking ----------------------------------------------------------------------------------------------------

    def remove(self, key: str) -> None:
        """Remove a template. Machines that run on it keep their files open."""
        if is_key(key):
            remove_tree(self.path(key))

    def abandoned(self) -> list[Path]:
        """Drafts that nobody works on."""
        drafts = []
        for draft in sorted(self.folder.glob(f"{KEY}{DRAFT}")):
            if lock := try_lock(draft.with_suffix(LOCK)):  # a fork's may be held by several
                lock.release()
                drafts.append(draft)
        return drafts

    def expire(self, now: float) -> list[str]:
        """Remove templates past their age or without a readable manifest, forks that no machine has any more, and drafts that nobody
        works on."""
        removed = []
        for key in sorted({path.stem for path in self.folder.glob(f"{KEY}*")}):
            if (lock := try_lock(self.folder / f"{key}{LOCK}")) is None:
                continue  # somebody is making it
            with lock:
                remove_tree(self.draft(key))
                template, is_there = self.read(key), self.path(key).exists()
                is_old = template is None or "fork" in template.facts or now - template.created > self._days * DAY
                if is_there and is_old:
                    self.remove(key)
                    removed.append(key)
                if is_old:
                    (self.folder / f"{key}{LOCK}").unlink()
        return removed


def is_key(name: str) -> bool:
    return fnmatchcase(name, KEY)


def identity(status: os.stat_result) -> dict[str, int]:
    """What a file cannot change without our notice. Its change time can be set by nobody, root included; of a file with several
    names it changes with each of them."""
    changed = {"ctime": status.st_ctime_ns} if status.st_nlink == 1 else {}
    return changed | {
        "size": status.st_size, "mtime": status.st_mtime_ns, "inode": status.st_ino, "owner": status.st_uid,
        "mode": stat.S_IMODE(status.st_mode),
    }  # fmt: skip


def give(fd: int, owner: tuple[int, int]) -> None:
    """Make *owner* the file's owner; only root needs to, only root can."""
    if os.geteuid() == 0:
        os.fchown(fd, *owner)


def copy_overlay(template: Template, target: Path, owner: tuple[int, int]) -> None:
    """A fresh, empty overlay on the template's disk. Raises TemplateError when the template is gone."""
    with no_space_as_error(target):
        try:
            data = read_capped(template.folder / CLONE, LARGEST_OVERLAY)
        except (FileNotFoundError, UnsafeFolder) as exc:
            raise TemplateError(f"the template {template.key} cannot be used any more: {exc}") from exc
        with open(target, "xb", opener=private) as file:
            give(file.fileno(), owner)
            write_all(file.fileno(), data)
