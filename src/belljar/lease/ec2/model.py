"""EC2's shapes: parameters become values, and values an answer, both by botocore's service model. Nothing is typed by hand.

The model is data that comes with botocore, of the extra `lease`; it is read once, when the first front end starts.
An answer has every list that its shape knows, empty ones too: clients take a missing one for a mistake. Whatever else is not
given is left out, for an empty number or moment is not valid for them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache, lru_cache, partial
from typing import Any
from xml.sax.saxutils import escape

from belljar.errors import LibraryMissing
from belljar.lease.ec2.refusals import UNSPEAKABLE, Refused

OLDEST_VERSION = "2008-05-05"
VERSION = re.compile(r"20[0-9]{2}-[0-1][0-9]-[0-3][0-9]")
INTEGER = re.compile(r"-?[0-9]{1,18}")
INDEX = re.compile(r"[0-9]{1,9}")  # from 0 on, as libcloud counts some
LATEST = 253402300799.0  # the last second of the year 9999
PLAIN = re.compile(r"[A-Za-z0-9 ._:/-]*")
Shape = Any  # of botocore, which has no types


@cache
def model() -> Model:
    """EC2's. Raises LibraryMissing without botocore."""
    try:
        from botocore.loaders import Loader  # type: ignore[import-untyped]
        from botocore.model import ServiceModel  # type: ignore[import-untyped]
    except ImportError as exc:
        what = "lease: the EC2 front end needs the library botocore, for EC2's shapes"
        raise LibraryMissing(what) from exc
    return Model(ServiceModel(Loader().load_service_model("ec2", "service-2"), "ec2"))


class Model:
    """Reads and writes what one service says."""

    def __init__(self, service: Any) -> None:
        self.newest = str(service.api_version)
        self.input: Callable[[str], Shape] = cache(lambda action: service.operation_model(action).input_shape)
        self.output: Callable[[str], Shape] = cache(lambda action: service.operation_model(action).output_shape)

    def check_version(self, version: str) -> None:
        if not VERSION.fullmatch(version) or not OLDEST_VERSION <= version <= self.newest:
            known = f"{OLDEST_VERSION} to {self.newest}"
            raise Refused("NoSuchVersion", f"The requested version ({version[:20]}) is not known: {known}")

    def read(self, action: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """The parameters of an action under the names of its shape. Raises Refused."""
        tree: dict[str, Any] = {}
        for name, text in fields.items():
            *path, last = name.split(".")
            node: Any = tree
            for part in path:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict) or last in node:
                raise Refused("InvalidParameterCombination", f"{name} is given both with and without parts")
            node[last] = text
        shape = self.input(action)
        return {} if shape is None else _structure(shape, tree, "")

    def write(self, action: str, version: str, request_id: str, answer: Mapping[str, Any]) -> bytes:
        """The answer's body. Raises KeyError for a value that the shape does not have: that is a mistake of ours."""
        head = f'<?xml version="1.0" encoding="UTF-8"?>\n<{action}Response xmlns="http://ec2.amazonaws.com/doc/{version}/">'
        shape = self.output(action)
        body = "<return>true</return>" if shape is None else writer(shape)(answer)
        return f"{head}<requestId>{request_id}</requestId>{body}</{action}Response>".encode()


@cache
def elements(shape: Shape) -> tuple[tuple[str, str, Shape], ...]:
    """(name, element, shape) of each member of a structure. Shapes are as lasting as the model."""
    return tuple((name, member.serialization.get("name", name), member) for name, member in shape.members.items())


@cache
def writer(shape: Shape) -> Callable[[Any], str]:
    """How a value of it is written, in the order of the shape, by which libcloud goes: worked out once."""
    if shape.type_name == "list":
        item = writer(shape.member)
        return lambda values: "".join([f"<item>{item(value)}</item>" for value in values])
    if shape.type_name != "structure":
        return partial(text_of, shape.type_name)

    @cache
    def plan(given: frozenset[str]) -> list[tuple[str, str, str, str, Callable[[Any], str]]]:
        """What is written where these are given: (name, begin, end, instead of None, writer)."""
        if unknown := given - shape.members.keys():
            raise KeyError(f"{shape.name} has no {sorted(unknown)}")
        return [
            (name, f"<{tag}>", f"</{tag}>", f"<{tag}></{tag}>" if member.type_name == "list" else "", writer(member))
            for name, tag, member in elements(shape)
            if name in given or member.type_name == "list"
        ]

    def write(value: Mapping[str, Any]) -> str:
        parts: list[str] = []
        for name, begin, end, empty, written in plan(frozenset(value)):
            field = value.get(name)
            parts += (empty,) if field is None else (begin, written(field), end)
        return "".join(parts)

    return write


def text_of(kind: str, value: Any) -> str:
    if kind == "boolean":
        return "true" if value else "false"
    if kind == "timestamp":
        return moment(int(value))
    text = str(value)
    return text if PLAIN.fullmatch(text) else escape(UNSPEAKABLE.sub("?", text), {"\r": "&#13;"})


@lru_cache(1024)  # machines of a lease have them in common
def moment(when: float) -> str:
    return datetime.fromtimestamp(int(when), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


# -- parameters: each raises Refused -----------------------------------------------------------------------------------


def _structure(shape: Shape, node: Mapping[str, Any], at: str) -> dict[str, Any]:
    names = {_wire_name(name, member): (name, member) for name, member in shape.members.items()}
    fields = {}
    for wire, value in node.items():
        if wire not in names:
            raise Refused("UnknownParameter", f"The parameter {at}{wire} is not recognized")
        name, member = names[wire]
        fields[name] = _value(member, value, f"{at}{wire}")
    if missing := [name for name in shape.required_members if name not in fields]:
        wire = _wire_name(missing[0], shape.members[missing[0]])
        raise Refused("MissingParameter", f"The request must contain the parameter {at}{wire}")
    return fields


def _wire_name(name: str, shape: Shape) -> str:
    name = shape.serialization.get("name", name)
    return str(shape.serialization.get("queryName") or f"{name[:1].upper()}{name[1:]}")


def _value(shape: Shape, node: Any, at: str) -> Any:
    kind = shape.type_name
    if kind in ("structure", "list"):
        if kind == "list" and not isinstance(node, dict):
            node = {"1": node}  # libcloud asks for KeyName=... where it means KeyName.1
        if not isinstance(node, dict):
            raise Refused("InvalidParameterValue", f"{at} has parts, as in {at}.NAME")
        return _structure(shape, node, f"{at}.") if kind == "structure" else list(_items(shape.member, node, at))
    if isinstance(node, dict):
        raise Refused("UnknownParameter", f"The parameter {at}.{next(iter(node))} is not recognized")
    try:
        return SCALARS.get(kind, str)(node)
    except (ValueError, KeyError):
        raise Refused("InvalidParameterValue", f"Invalid value '{node[:100]}' for {at}: no {kind}") from None


def _items(shape: Shape, node: Mapping[str, Any], at: str) -> Iterator[Any]:
    for key in node:
        if not INDEX.fullmatch(key):
            raise Refused("UnknownParameter", f"The parameter {at}.{key} is not recognized")
    for key in sorted(node, key=int):
        yield _value(shape, node[key], f"{at}.{key}")


def _integer(text: str) -> int:
    if not INTEGER.fullmatch(text):
        raise ValueError(text)
    return int(text)


def _moment(text: str) -> float:
    """What was before 1970, or is in no year that can be written in UTC, is as far away as can be said; 0 would say nothing."""
    when = datetime.fromisoformat(text)
    return min(max(1.0, when.replace(tzinfo=when.tzinfo or UTC).timestamp()), LATEST)


# Of text: each raises ValueError or KeyError.
SCALARS: dict[str, Callable[[str], Any]] = {
    "boolean": lambda text: {"true": True, "false": False}[text.lower()], "integer": _integer, "long": _integer, "float": float, "double": float,
    "timestamp": _moment, "blob": partial(base64.b64decode, validate=True),
}  # fmt: skip
