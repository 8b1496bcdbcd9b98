"""What a store knows of one image: `manifest.json` in its folder, and the cheap check that its files are still the same.

The manifest is written last, into a folder that gets its name by one rename. It records of each file the sha256, and
size, time and inode, which change whenever somebody replaces, truncates or rewrites it. What a verification found wrong
is written there too, until a later one finds the files right or the image is stored again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from belljar.errors import ImageCorrupt, ImageMismatch, ImageUnfit, NoStore
from belljar.hints import Any
from belljar.host.files import check_ours, read_json, write_whole
from belljar.image import Image
from belljar.image.store import qcow2
from belljar.records import dataclass

FORMAT = 1
FILE = "manifest.json"
DISK, KERNEL, INITRD = "disk.qcow2", "kernel", "initrd"
LARGEST_MANIFEST = 4 << 20
CHUNK = 1 << 20


@dataclass(frozen=True)
class Facts:
    """Where an image comes from and what is in it, as far as its files do not show it."""

    source: str
    append: str
    created: float
    os: str
    virtual_size: int
    facts: dict[str, Any]


def sha256_of(path: Path) -> str:
    """Hexadecimal digest of a whole file."""
    from hashlib import file_digest

    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def write(folder: Path, what: Facts, *, mode: int, ordered: Mapping[str, str] | None = None) -> str:
    """Digest the files in *folder*, write its manifest, return the image's digest. Raises ImageMismatch when digests were
    *ordered* (by file name) and are others."""
    files = {name: _record(folder / name) for name in (DISK, KERNEL, INITRD) if (folder / name).exists()}
    for name, digest in (ordered or {}).items():
        if (found := files.get(name, {}).get("sha256", "")) != digest:
            raise ImageMismatch(f"{name}: ordered sha256 {digest}, got {found or 'nothing'}")
    boot = [files[name]["sha256"] for name in (KERNEL, INITRD) if name in files]
    value = {
        "format": FORMAT,
        "digest": files[DISK]["sha256"],
        "boot_digest": boot_digest(boot, what.append),
        "files": files,
        **vars(what),
    }
    _save(folder, value, mode)
    return str(value["digest"])


def boot_digest(files: Sequence[str], append: str) -> str:
    """A digest of how an image starts: of its kernel and ramdisk, where it has them, and of the command line."""
    from belljar.host.quick_imports import sha256

    return sha256("\n".join([*files, append]).encode()).hexdigest()


def read(folder: Path, names: tuple[str, ...] = ()) -> Image:
    """The image in *folder*, after the cheap check. Raises ImageCorrupt, UnsafeFolder."""
    value = _load(folder)
    image = _image(folder, value, names)
    if image.wrong:
        raise ImageCorrupt(f"image {image.called}: {'; '.join(image.wrong)} (found by `belljar image verify`)")
    files = value["files"]
    for name in files:
        if (found := _stamp(folder / name)) != {key: files[name].get(key) for key in found}:
            what = "is gone" if found["size"] < 0 else "was written to or replaced"
            raise ImageCorrupt(f"{folder / name}: {what} since it was stored")
    disk = folder / DISK
    if qcow2.virtual_size(disk) != value["virtual_size"]:
        raise ImageCorrupt(f"{disk}: its header is not the one that was stored")
    return image


def read_unchecked(folder: Path, names: tuple[str, ...] = ()) -> Image:
    """The image as its manifest describes it, whatever its files are now: to show, verify or remove it."""
    return _image(folder, _load(folder), names)


def unreadable(folder: Path, names: tuple[str, ...]) -> Image:
    """An image of which only the folder is known, good enough to be removed."""
    digest = folder.name.rpartition("-")[2]
    return Image(digest, names, folder / DISK, 0, None, None, "", "", "", 0.0, store=folder.parent)


def verify(folder: Path, *, mode: int | None) -> list[str]:
    """What is wrong with the files, by their full digests. With a *mode* (the store is ours) that is recorded; and files
    that are right but have another time or inode, as after a restore, are recorded anew."""
    before = _load(folder)["files"]
    wrong, found = [], {}
    for name, stored in before.items():
        try:
            found[name] = _record(folder / name)
        except OSError as exc:
            wrong.append(f"{name}: {exc.strerror}")
            continue
        if (digest := found[name]["sha256"]) != stored["sha256"]:
            wrong.append(f"{name}: sha256 is {digest:.12}..., stored was {stored['sha256']:.12}...")
    if mode is not None:
        _note(folder, before, found, wrong, mode)
    return wrong


def _note(folder: Path, before: dict[str, Any], found: dict[str, dict[str, Any]], wrong: list[str], mode: int) -> None:
    """Record what a verification found, unless the image was replaced meanwhile."""
    value = _load(folder)
    known = value.pop("wrong", [])
    if value["files"] != before or (known == wrong and (wrong or found == before)):
        return
    if wrong:
        value["wrong"] = wrong
    else:
        value["files"] = found
        if known:
            value["created"] = time.time()  # its bytes differ from what machines may have read lately
    _save(folder, value, mode)


def set_facts(folder: Path, changes: dict[str, Any], *, mode: int) -> None:
    """Record these facts beside the others; None removes a fact."""
    value = _load(folder)
    together = {**value["facts"], **changes}
    value["facts"] = {name: fact for name, fact in together.items() if fact is not None}
    _save(folder, value, mode)


def origin_command(image: Image) -> str:
    """The command that brings this image, or the present one of its name, again."""
    if published := image.facts.get("published"):
        return f"belljar image sync {published[0].partition(' ')[0]}"
    name = image.names[0] if image.names else "NAME"
    kind, _, suite = image.source.rpartition(" ")
    if kind == "build debian":
        return f"belljar image build debian --suite {suite} --name {name}"
    return f"belljar image import {image.source} --name {name}"


def same_start(stored: Image, again: Image) -> None:
    """Raise ImageUnfit when the same disk was asked to start in another way than the one that is stored."""
    if stored.boot_digest != again.boot_digest:
        raise ImageUnfit(
            f"the same disk is stored already, as image {stored.called}, with another kernel, ramdisk or command line",
            hint="Remove that image first, with `belljar image remove --force`; a store has each disk once.",
        )
    for fact in ("boots_by", "use_firmware", "context", "agent_in_initrd", "init"):
        has, wanted = stored.facts.get(fact), again.facts.get(fact)
        if has != wanted:
            raise ImageUnfit(
                f"the same disk is stored already, as image {stored.called}, with {fact} = {has or 'auto'}, not {wanted or 'auto'}",
                hint="Change that image with `belljar image set`, or remove it first.",
            )


def _load(folder: Path) -> dict[str, Any]:
    try:
        check_ours(folder)
        value = read_json(folder / FILE, LARGEST_MANIFEST)
    except PermissionError as exc:
        raise NoStore(f"{exc.filename}: {exc.strerror}") from exc
    except (OSError, ValueError) as exc:
        raise ImageCorrupt(f"{folder}: no readable manifest: {exc}") from exc
    if value.get("format") != FORMAT:
        raise ImageCorrupt(f"{folder}: written by another version of belljar (format {value.get('format')})")
    if not _well_formed(value):
        raise ImageCorrupt(f"{folder / FILE}: not a manifest belljar has written")
    return value


def _well_formed(value: dict[str, Any]) -> bool:
    texts = all(isinstance(value.get(key), str) for key in ("digest", "boot_digest", "source", "append", "os"))
    numbers = isinstance(value.get("virtual_size"), int) and isinstance(value.get("created"), (int, float))
    files, facts = value.get("files"), value.get("facts")
    if not (texts and numbers and isinstance(files, dict) and isinstance(facts, dict)):
        return False
    known = set(files) <= {DISK, KERNEL, INITRD} and DISK in files and isinstance(value.get("wrong", []), list)
    return known and all(isinstance(one, dict) and isinstance(one.get("sha256"), str) for one in files.values())


def _save(folder: Path, value: dict[str, Any], mode: int) -> None:
    import json

    write_whole(folder / FILE, json.dumps(value, indent=1).encode() + b"\n", mode=mode, durable=True)


def _image(folder: Path, value: dict[str, Any], names: tuple[str, ...]) -> Image:
    files = value["files"]
    return Image(
        digest=value["digest"],
        names=names,
        disk=folder / DISK,
        virtual_size=value["virtual_size"],
        kernel=folder / KERNEL if KERNEL in files else None,
        initrd=folder / INITRD if INITRD in files else None,
        append=value["append"],
        boot_digest=value["boot_digest"],
        source=value["source"],
        created=float(value["created"]),
        os=value["os"],
        store=folder.parent,
        facts=value["facts"],
        wrong=tuple(map(str, value.get("wrong", ()))),
    )


def _record(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_of(path), **_stamp(path)}


def _stamp(path: Path) -> dict[str, int]:
    try:
        facts = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return {"size": -1}
    except OSError as exc:
        raise NoStore(f"{path}: {exc.strerror}") from exc
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "ino": facts.st_ino}
