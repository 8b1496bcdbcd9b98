"""Indexes: one form, read back as they were written, and refused when they are anything else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belljar.errors import NotAnIndex
from belljar.image.site import Signature, index
from belljar.image.site.index import Entry, Index, Part, Statement
from belljar.image.store.manifest import boot_digest

A, B = "a" * 64, "b" * 64
BOOT = boot_digest([B], "quiet")
STATEMENT = Statement(
    "debian12", 3, 1000, A, 1 << 30, "quiet", "Debian", 900, "build", BOOT, {"context": "auto", "python": "3.11", "packages": 5},
    {"disk.qcow2": Part(A, 100, index.ZSTD, B, 50), "kernel": Part(B, 10, index.PLAIN, B, 10)}, (B,),
)  # fmt: skip
ENTRY = Entry(
    STATEMENT, (Signature("key", (), "value"), Signature("", ("pem",), "v")), index.statement_bytes(STATEMENT)
)
WHOLE = Index(7, 1000, 0, {"debian12": ENTRY})


def test_an_index_is_read_as_it_was_written() -> None:
    data = index.index_bytes(WHOLE)
    assert index.read(data, "it") == WHOLE
    assert index.index_bytes(index.read(data, "it")) == data


def test_the_bytes_of_a_statement_are_those_that_were_signed_whatever_its_form() -> None:
    loose = json.dumps(json.loads(index.index_bytes(WHOLE)), indent=4).encode()
    assert index.read(loose, "it").entries["debian12"].data == ENTRY.data


def changed(change: Callable[[Any], Any]) -> bytes:
    value = json.loads(index.index_bytes(WHOLE))
    stated = value["images"]["debian12"]["statement"]
    change({"all": value, "one": stated, "entry": value["images"]["debian12"], "disk": stated["parts"]["disk.qcow2"]})
    return json.dumps(value).encode()


def put(where: str, key: str, value: object) -> Callable[[Any], None]:
    return lambda parts: parts[where].__setitem__(key, copy.deepcopy(value))


HOSTILE: dict[str, Callable[[Any], Any]] = {
    "another format": put("all", "format", 2),
    "a version that is text": put("all", "version", "7"),
    "a negative version": put("all", "version", -1),
    "a version that is true": put("all", "version", True),
    "a version without measure": put("all", "version", 1 << 80),
    "images in a list": put("all", "images", []),
    "a name that climbs": lambda parts: parts["all"]["images"].update({"../x": parts["entry"]}),
    "a name in another's place": lambda parts: parts["all"]["images"].update({"alma9": parts["entry"]}),
    "a name that is a digest": put("one", "name", "a" * 12),
    "a digest with a path": put("one", "digest", "../" + "a" * 61),
    "a digest in capitals": put("disk", "sha256", "A" * 64),
    "a blob with a path": put("disk", "blob", "../../etc/passwd"),
    "another disk than stated": put("disk", "sha256", B),
    "a form nobody knows": put("disk", "form", "exe"),
    "a size that is negative": put("disk", "size", -5),
    "a file of another name": lambda parts: parts["one"]["parts"].update({"../lock": parts["disk"]}),
    "no disk": lambda parts: parts["one"]["parts"].pop("disk.qcow2"),
    "a ramdisk without a kernel": lambda parts: parts["one"].update(parts={"disk.qcow2": parts["disk"], "initrd": parts["disk"]}),
    "words with a newline": put("one", "append", "quiet\nroot=/dev/sda"),
    "words without end": put("one", "append", "x" * 5000),
    "a fact that is an object": put("one", "facts", {"python": {"a": 1}}),
    "a context nobody knows": put("one", "facts", {"context": "magic"}),
    "firmware nobody knows": put("one", "facts", {"use_firmware": "coreboot"}),
    "firmware in a list in a list": put("one", "facts", {"firmware": [["bios"]]}),
    "history without end": put("one", "previous", [B] * 1000),
    "signatures without end": put("entry", "signatures", [{"key": "", "value": ""}] * 1000),
    "a signature that is text": put("entry", "signatures", ["x"]),
    "no signatures": lambda parts: parts["entry"].pop("signatures"),
    "no statement": lambda parts: parts["entry"].pop("statement"),
}  # fmt: skip


@pytest.mark.parametrize("trick", HOSTILE)
def test_what_belljar_has_not_written_is_refused(trick: str) -> None:
    with pytest.raises(NotAnIndex):
        index.read(changed(HOSTILE[trick]), "it")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"null", b"[]", b"{}", b'{"images": 1}', b"<!DOCTYPE html><html>404</html>", b"\xff\xfe", b"[" * 100000,
        b'{"images": {}, "format": 1, "version": 1.5, "created": 1, "expires": 0}',
        b'{"images": {}, "format": 1, "version": NaN, "created": 1, "expires": 0}',
        b'{"images": {}, "format": 1, "version": 1, "version": 2, "created": 1, "expires": 0}',
        b'{"images": {}, "format": 1, "version": ' + b"9" * 5000 + b', "created": 1, "expires": 0}',
        b" " * (index.LARGEST_INDEX + 1),
    ],
)  # fmt: skip
def test_what_is_no_index_is_refused(data: bytes) -> None:
    with pytest.raises(NotAnIndex):
        index.read(data, "it")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_change_of_an_index_makes_the_reader_do_anything_but_refuse(data: st.DataObject) -> None:
    """Any place in it gets any value; what is read then is still an index that can be written."""
    value = json.loads(index.index_bytes(WHOLE))
    place, key = value, data.draw(st.sampled_from(sorted(value)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    )
    place[key] = data.draw(junk)
    with suppress(NotAnIndex):
        index.index_bytes(index.read(json.dumps(value).encode(), "it"))


@pytest.mark.parametrize("data", [b"{}", b"[1]", b'[{"value": 1}]', b'[{"certificates": 1, "value": ""}]', b"<html>"])
def test_what_are_no_signatures_is_refused(data: bytes) -> None:
    with pytest.raises(NotAnIndex):
        index.read_signatures(data, "it")
