"""What a store knows of one image: `manifest.json` in its folder, and the cheap check that its files are still the same.

The manifest is written last, into a folder that gets its name by one rename. It records of each file the sha256, and
size, time and inode, which change whenever somebody replaces, truncates or rewrites it. What a verification found wrong
is written there too, until a later one finds the files right or the image is stored again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from belljar.errors import ImageCorrupt, NoStore
from belljar.hints import Any
from belljar.host.files import check_ours, read_json, sha256_of, write_whole
from belljar.host.quick_imports import sha256
from belljar.image import Image
from belljar.image.store import qcow2
from belljar.records import dataclass

FORMAT = 1
FILE = "manifest.json"
DISK, KERNEL, INITRD, INPUTS = PARTS = ("disk.qcow2", "kernel", "initrd", "inputs.tar")  # the last of warm images
LARGEST_MANIFEST = 4 << 20
ORIGIN = ("published", "origins", "signer", "made_from", "source_sha256")  # facts: where it came from


@dataclass(frozen=True)
class Facts:
    """Where an image comes from and what is in it, as far as its files do not show it."""

    source: str
    append: str
    created: float
    os: str
    virtual_size: int
    facts: dict[str, Any]


def write(folder: Path, what: Facts, *, mode: int) -> str:
    """Digest the files in *folder*, write its manifest, return the image's digest."""
    files = {name: _record(folder / name) for name in PARTS if (folder / name).exists()}
    digest = image_digest({name: record["sha256"] for name, record in files.items()}, what.append, what.facts)
    _save(folder, {"format": FORMAT, "digest": digest, "files": files, **vars(what)}, mode)
    return digest


def image_digest(files: Mapping[str, str], append: str, properties: Mapping[str, Any]) -> str:
    """What an image is known by: a digest over its *files* (their digests by name) and all that is said of it, but where it came
    from."""
    digested = {name: fact for name, fact in properties.items() if name not in ORIGIN}
    return sha256(json.dumps([dict(files), append, digested], sort_keys=True).encode()).hexdigest()


def read(folder: Path, names: tuple[str, ...] = ()) -> Image:
    """The image in *folder*, after the cheap check. Raises ImageCorrupt, UnsafeFolder."""
    value = _load(folder)
    image = _image(folder, value, names)
    if image.wrong:
        raise ImageCorrupt(f"image {image.called}: {'; '.join(image.wrong)} (found by `belljar image verify`)")
    for name, stored in value["files"].items():
        if (present := _stamp(folder / name)) != {key: stored.get(key) for key in present}:
            what = "is gone" if present["size"] < 0 else "was written to or replaced"
            raise ImageCorrupt(f"{folder / name}: {what} since it was stored")
    if qcow2.virtual_size(image.disk) != image.virtual_size:
        raise ImageCorrupt(f"{image.disk}: its header is not the one that was stored")
    return image


def read_unchecked(folder: Path, names: tuple[str, ...] = ()) -> Image:
    """The image as its manifest describes it, whatever its files are now: to show, verify or remove it."""
    return _image(folder, _load(folder), names)


def unread(folder: Path, names: tuple[str, ...]) -> Image:
    """The image by its folder alone, good enough to be removed."""
    digest = folder.name.rpartition("-")[2]
    return Image(digest, names, folder / DISK, 0, None, None, "", "", 0.0, store=folder.parent)


def verify(folder: Path, *, mode: int | None) -> list[str]:
    """What is wrong with the files, by their full digests. With a *mode* (the store is ours) that is recorded, unless the image was
    replaced meanwhile; and files that are right but have another time or inode, as after a restore, are recorded anew."""
    before = _load(folder)["files"]
    wrong, present = [], {}
    for name, stored in before.items():
        try:
            present[name] = _record(folder / name)
        except OSError as exc:
            wrong.append(f"{name}: {exc.strerror}")
            continue
        if (digest := present[name]["sha256"]) != stored["sha256"]:
            wrong.append(f"{name}: sha256 is {digest:.12}..., stored was {stored['sha256']:.12}...")
    value = _load(folder)
    known = value.pop("wrong", [])
    if mode is None or value["files"] != before or (known == wrong and (wrong or present == before)):
        return wrong
    if wrong:
        value["wrong"] = wrong
    else:
        # Its bytes may differ from what machines have read lately: nothing that was made of those is used again.
        value |= {"files": present, "created": time.time() if known else value["created"]}
    _save(folder, value, mode)
    return wrong


def set_facts(folder: Path, changes: dict[str, Any], *, mode: int) -> None:
    """Record these facts beside the others; None removes a fact."""
    value = _load(folder)
    together = {**value["facts"], **changes}
    value["facts"] = {name: fact for name, fact in together.items() if fact is not None}
    _save(folder, value, mode)


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
    return value


def _save(folder: Path, value: dict[str, Any], mode: int) -> None:
    write_whole(folder / FILE, json.dumps(value, indent=1).encode() + b"\n", mode=mode, durable=True)


def _image(folder: Path, value: dict[str, Any], names: tuple[str, ...]) -> Image:
    try:
        files = {name: folder / name for name in PARTS if "sha256" in value["files"].get(name, {})}
        texts = {name: str(value[name]) for name in ("digest", "append", "source", "os")}
        return Image(
            names=names, disk=files[DISK], virtual_size=int(value["virtual_size"]), kernel=files.get(KERNEL),
            initrd=files.get(INITRD), created=float(value["created"]), store=folder.parent, facts={**value["facts"]},
            wrong=tuple(map(str, value.get("wrong", ()))), **texts,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise ImageCorrupt(f"{folder / FILE}: not a manifest belljar has written") from exc


def _record(path: Path) -> dict[str, Any]:
    return {"sha256": sha256_of(path), **_stamp(path)}


def _stamp(path: Path) -> dict[str, int]:
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return {"size": -1}
    except OSError as exc:
        raise NoStore(f"{path}: {exc.strerror}") from exc
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "ino": status.st_ino}
