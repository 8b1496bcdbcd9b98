"""The index of a master store: statements "this name is this image", as JSON in one canonical form.

    index.json               {"format", "version", "created", "expires", "images": {NAME: {"statement", "signatures"}}}
    signatures/<sha256>.json signatures over the index with this digest
    blobs/<sha256>           files of images, mostly packed with zstd

An index is replaced in one rename, and its signatures lie there before it. Addresses of files follow from digests alone;
nothing in an index is ever a path. Pure: reads and writes values, not files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from belljar.errors import NotAnIndex
from belljar.image.site import Signature
from belljar.image.store.manifest import boot_digest
from belljar.image.store.store import HEX, NAME
from belljar.model import Context, Firmware
from belljar.reading import once
from belljar.records import dataclass, field

FORMAT = 1
INDEX, SIGNATURES, BLOBS = "index.json", "signatures", "blobs"
LARGEST_INDEX, LARGEST_SIGNATURES = 8 << 20, 1 << 20
MOST_SIGNATURES, MOST_PREVIOUS = 8, 20
LARGEST_WORDS, LARGEST_FACT = 4096, 4096
LARGEST_NUMBER = 1 << 62
DIGEST = re.compile(r"[0-9a-f]{64}")
PLAIN, ZSTD = "plain", "zstd"
PARTS = ("disk.qcow2", "kernel", "initrd")


@dataclass(frozen=True)
class Part:
    """One file of an image: as it is used, and as it lies in the master store."""

    sha256: str
    size: int
    form: str  # PLAIN, ZSTD
    blob: str  # sha256 of the packed file, and its name
    blob_size: int


@dataclass(frozen=True)
class Statement:
    """This name is this image."""

    name: str
    version: int  # of the name; each is greater than the one before
    published: int
    digest: str
    virtual_size: int
    append: str
    os: str
    created: int
    made_from: str
    boot_digest: str
    facts: Mapping[str, Any]
    parts: Mapping[str, Part]  # of PARTS
    previous: tuple[str, ...] = ()  # digests the name had before, the last first


@dataclass(frozen=True)
class Entry:
    """A statement with its signatures, and the bytes they are over."""

    statement: Statement
    signatures: tuple[Signature, ...]
    data: bytes


@dataclass(frozen=True)
class Index:
    """All that a master store offers."""

    version: int
    created: int
    expires: int  # 0: never
    entries: Mapping[str, Entry] = field(default_factory=dict)


def canonical(value: Any) -> bytes:
    """The one form of a value of objects, lists, text, whole numbers and truths."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def statement_bytes(statement: Statement) -> bytes:
    """What a statement's signatures are over."""
    parts = {name: vars(part) for name, part in statement.parts.items()}
    values = {**vars(statement), "facts": dict(statement.facts), "parts": parts, "previous": list(statement.previous)}
    return canonical({"format": FORMAT, **values})


def index_bytes(index: Index) -> bytes:
    """What is in `index.json`."""
    from belljar.image.site.signing import as_json

    images = {
        name: {"statement": json.loads(entry.data), "signatures": as_json(entry.signatures)}
        for name, entry in index.entries.items()
    }
    head = {"format": FORMAT, "version": index.version, "created": index.created, "expires": index.expires}
    return canonical({**head, "images": images}) + b"\n"


def read(data: bytes, shown: str) -> Index:
    """The index in these bytes; *shown*: where they come from. Raises NotAnIndex."""
    value = _json(data, LARGEST_INDEX, shown)
    if not isinstance(value, dict) or "images" not in value:
        raise NotAnIndex(f"{shown}: not an index of images")
    if value.get("format") != FORMAT:
        raise NotAnIndex(
            f"{shown}: an index of another version of belljar (format {value.get('format')!s:.20})",
            hint="Use the same belljar here and where it is published.",
        )
    try:
        entries = {_name(name): _entry(name, one) for name, one in _object(value["images"]).items()}
        return Index(_number(value, "version"), _number(value, "created"), _number(value, "expires"), entries)
    except (_Wrong, KeyError, TypeError) as exc:
        raise NotAnIndex(f"{shown}: not an index belljar has written: {exc}") from exc


def read_signatures(data: bytes, shown: str) -> tuple[Signature, ...]:
    """The signatures in a file of them. Raises NotAnIndex."""
    try:
        return _signatures(_json(data, LARGEST_SIGNATURES, shown))
    except (_Wrong, KeyError, TypeError) as exc:
        raise NotAnIndex(f"{shown}: not a file of signatures: {exc}") from exc


class _Wrong(Exception):
    """Something in the JSON is not what it has to be."""


def _json(data: bytes, largest: int, shown: str) -> Any:
    if len(data) > largest:
        raise NotAnIndex(f"{shown}: larger than {largest} bytes")
    if data.lstrip()[:1] == b"<":
        raise NotAnIndex(f"{shown}: a web page, not an index of images", hint="Check the address in a browser.")
    try:
        return json.loads(data, parse_float=_no_float, parse_constant=_no_float, object_pairs_hook=once)
    except (ValueError, RecursionError, _Wrong) as exc:
        raise NotAnIndex(f"{shown}: not an index of images: {str(exc)[:200]}") from exc


def _no_float(text: str) -> Any:
    raise _Wrong(f"{text[:20]}, which is not a whole number")


def _entry(name: str, value: Any) -> Entry:
    stated = _object(_object(value)["statement"])
    statement = _statement(stated)
    if statement.name != name:
        raise _Wrong(f"under {name!r} it tells of {statement.name!r}")
    return Entry(statement, _signatures(value["signatures"]), canonical(stated))


def _statement(value: dict[str, Any]) -> Statement:
    if value.get("format") != FORMAT:
        raise _Wrong("a statement of another version of belljar")
    parts = {name: _part(_object(one)) for name, one in _object(value["parts"]).items()}
    if PARTS[0] not in parts or not set(parts) <= set(PARTS) or (PARTS[2] in parts and PARTS[1] not in parts):
        raise _Wrong("an image without a disk, or with files of unknown names")
    digest = _digest(value, "digest")
    if parts[PARTS[0]].sha256 != digest:
        raise _Wrong("a disk that has not the image's digest")
    append = _text(value, "append")
    boot_files = [parts[name].sha256 for name in PARTS[1:] if name in parts]
    if boot_digest(boot_files, append) != _digest(value, "boot_digest"):
        raise _Wrong("a boot_digest that is not that of its kernel, ramdisk and command line")
    previous = value["previous"]
    if not isinstance(previous, list) or len(previous) > MOST_PREVIOUS:
        raise _Wrong("too many digests it had before")
    return Statement(
        name=_name(value["name"]), version=_number(value, "version"), published=_number(value, "published"), digest=digest,
        virtual_size=_number(value, "virtual_size"), append=append, os=_text(value, "os"),
        created=_number(value, "created"), made_from=_text(value, "made_from"), boot_digest=_digest(value, "boot_digest"),
        facts=_facts(_object(value["facts"])), parts=parts,
        previous=tuple(_digest({"previous": one}, "previous") for one in previous),
    )  # fmt: skip


def _part(value: dict[str, Any]) -> Part:
    if value["form"] not in (PLAIN, ZSTD):
        raise _Wrong(f"a file in the form {value['form']!s:.20}")
    sizes = _number(value, "size"), _number(value, "blob_size")
    return Part(_digest(value, "sha256"), sizes[0], value["form"], _digest(value, "blob"), sizes[1])


def _facts(value: dict[str, Any]) -> dict[str, Any]:
    """Facts decide how a machine starts: each has a plain type, and those with fixed values have one of them."""
    for name, fact in value.items():
        items = fact if isinstance(fact, list) else [fact]
        if not all(isinstance(one, (str, int)) for one in items) or len(canonical(fact)) > LARGEST_FACT:
            raise _Wrong(f"the fact {name[:40]!r}")
    _one_of(value, "context", [one.value for one in Context])
    _one_of(value, "use_firmware", [one.value for one in Firmware])
    kinds = value.get("firmware", [])
    if not isinstance(kinds, list) or not set(kinds) <= {one.value for one in Firmware}:
        raise _Wrong("kinds of firmware belljar does not know")
    return value


def _one_of(value: dict[str, Any], name: str, allowed: Sequence[str]) -> None:
    if name in value and value[name] not in allowed:
        raise _Wrong(f"{name} is {value[name]!s:.20}")


def _signatures(value: Any) -> tuple[Signature, ...]:
    if not isinstance(value, list) or len(value) > MOST_SIGNATURES:
        raise _Wrong("no list of signatures, or one that is too long")
    return tuple(_signature(_object(one)) for one in value)


def _signature(value: dict[str, Any]) -> Signature:
    chain = value.get("certificates", [])
    if not isinstance(chain, list) or not all(isinstance(one, str) for one in chain):
        raise _Wrong("certificates that are none")
    key = value.get("key", "")
    if not isinstance(key, str) or not isinstance(value["value"], str):
        raise _Wrong("a signature that is none")
    return Signature(key, tuple(chain), value["value"])


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong("something that is not an object")
    return value


def _name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name) or HEX.fullmatch(name):
        raise _Wrong(f"{str(name)[:40]!r} as the name of an image")
    return name


def _number(value: dict[str, Any], key: str) -> int:
    found = value[key]
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < LARGEST_NUMBER:
        raise _Wrong(f"{key} is {found!s:.20}")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    found = value[key]
    if not isinstance(found, str) or len(found) > LARGEST_WORDS or not found.isprintable():
        raise _Wrong(f"{key} is not a line of text")
    return found


def _digest(value: dict[str, Any], key: str) -> str:
    found = value[key]
    if not isinstance(found, str) or not DIGEST.fullmatch(found):
        raise _Wrong(f"{key} is not a digest")
    return found
