"""EC2's shapes: parameters become values, and values an answer, both by botocore's service model. Nothing is typed by hand.

The model is data that comes with botocore, of the extra `belljar[lease]`; it is read once, when the first front end starts.
An answer has every list that its shape knows, empty ones too: clients take a missing one for a mistake. Whatever else is not
given is left out, for an empty number or moment is none to them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Any
from xml.sax.saxutils import escape

from belljar.errors import CommandMissing
from belljar.lease.ec2.query import UNSPEAKABLE
from belljar.lease.ec2.refusals import Refused

OLDEST_VERSION = "2008-05-05"
VERSION = re.compile(r"20[0-9]{2}-[0-1][0-9]-[0-3][0-9]")
INTEGER = re.compile(r"-?[0-9]{1,18}")
INDEX = re.compile(r"0*([1-9][0-9]{0,8})")
BOOLEANS = {"true": True, "false": False}
Shape = Any  # of botocore, which has no types


@cache
def model() -> Model:
    """EC2's. Raises CommandMissing without botocore."""
    try:
        from botocore.loaders import Loader  # type: ignore[import-untyped]
        from botocore.model import ServiceModel  # type: ignore[import-untyped]
    except ImportError as exc:
        raise CommandMissing(
            "lease: the EC2 front end needs the library botocore, for EC2's shapes", hint="`pip install belljar[lease]`"
        ) from exc
    return Model(ServiceModel(Loader().load_service_model("ec2", "service-2"), "ec2"))


class Model:
    """Reads and writes what one service says."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self.newest = str(service.api_version)
        self._input = cache(lambda action: service.operation_model(action).input_shape)
        self.output: Callable[[str], Shape] = cache(lambda action: service.operation_model(action).output_shape)
        self._tables: dict[int, tuple[tuple[str, str, Shape], ...]] = {}

    def check_version(self, version: str) -> None:
        if not VERSION.fullmatch(version) or not OLDEST_VERSION <= version <= self.newest:
            raise Refused(
                "NoSuchVersion",
                f"The requested version ({version[:20]}) is not known: {OLDEST_VERSION} to {self.newest}",
            )

    # -- parameters ----------------------------------------------------------------------------------------------------

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
        shape = self._input(action)
        if shape is None:
            return {}
        found: dict[str, Any] = _structure(shape, tree, "")
        return found

    # -- answers -------------------------------------------------------------------------------------------------------

    def write(self, action: str, version: str, request_id: str, answer: Mapping[str, Any]) -> bytes:
        """The answer's body. Raises KeyError for a value that the shape does not have: that is a mistake of ours."""
        shape, parts = self.output(action), list[str]()
        parts.append(
            f'<?xml version="1.0" encoding="UTF-8"?>\n<{action}Response xmlns="http://ec2.amazonaws.com/doc/{version}/">'
            f"<requestId>{request_id}</requestId>"
        )
        if shape is None:
            parts.append("<return>true</return>")
        else:
            self._write(shape, answer, parts.append)
        parts.append(f"</{action}Response>")
        return "".join(parts).encode()

    def _write(self, shape: Shape, value: Mapping[str, Any], put: Callable[[str], None]) -> None:
        known = self._table(shape)
        if not value.keys() <= {name for name, _, _ in known}:
            raise KeyError(f"{shape.name} has no {sorted(value.keys() - {name for name, _, _ in known})}")
        for name, tag, member in known:
            one, kind = value.get(name), member.type_name
            if kind == "list":
                put(f"<{tag}>")
                item = member.member
                for each in one or ():
                    self._write_one("item", item, each, put)
                put(f"</{tag}>")
            elif one is not None:
                self._write_one(tag, member, one, put)

    def _write_one(self, tag: str, shape: Shape, value: Any, put: Callable[[str], None]) -> None:
        if shape.type_name == "structure":
            put(f"<{tag}>")
            self._write(shape, value, put)
            put(f"</{tag}>")
        else:
            put(f"<{tag}>{_text(shape.type_name, value)}</{tag}>")

    def _table(self, shape: Shape) -> tuple[tuple[str, str, Shape], ...]:
        """(name, element, shape) of each member. A shape lives as long as the model, so it can be known by its identity."""
        found = self._tables.get(id(shape))
        if found is None:
            found = tuple((name, one.serialization.get("name", name), one) for name, one in shape.members.items())
            self._tables[id(shape)] = found
        return found


def _text(kind: str, value: Any) -> str:
    if kind == "boolean":
        return "true" if value else "false"
    if kind == "timestamp":
        return datetime.fromtimestamp(int(value), UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    if kind in ("integer", "long", "float", "double"):
        return str(value)
    return escape(UNSPEAKABLE.sub("?", str(value)))


# -- parameters: each raises Refused -----------------------------------------------------------------------------------


def _structure(shape: Shape, node: Mapping[str, Any], at: str) -> dict[str, Any]:
    names = {_wire_name(name, member): (name, member) for name, member in shape.members.items()}
    found = {}
    for wire, value in node.items():
        if wire not in names:
            raise Refused("UnknownParameter", f"The parameter {at}{wire} is not recognized")
        name, member = names[wire]
        found[name] = _value(member, value, f"{at}{wire}")
    missing = [name for name in shape.required_members if name not in found]
    if missing:
        wire = _wire_name(missing[0], shape.members[missing[0]])
        raise Refused("MissingParameter", f"The request must contain the parameter {at}{wire}")
    return found


def _wire_name(name: str, shape: Shape) -> str:
    stated = shape.serialization.get("queryName")
    name = stated or shape.serialization.get("name", name)
    return name if stated else f"{name[:1].upper()}{name[1:]}"


def _value(shape: Shape, node: Any, at: str) -> Any:
    kind = shape.type_name
    if kind in ("structure", "list"):
        if not isinstance(node, dict):
            raise Refused("InvalidParameterValue", f"{at} has parts, as in {at}.{'1' if kind == 'list' else 'NAME'}")
        return _structure(shape, node, f"{at}.") if kind == "structure" else list(_items(shape.member, node, at))
    if isinstance(node, dict):
        raise Refused("UnknownParameter", f"The parameter {at}.{next(iter(node))} is not recognized")
    try:
        return _scalar(kind, node)
    except ValueError:
        raise Refused("InvalidParameterValue", f"Invalid value '{node[:100]}' for {at}: no {kind}") from None


def _items(shape: Shape, node: Mapping[str, Any], at: str) -> Iterator[Any]:
    places = {key: INDEX.fullmatch(key) for key in node}
    wrong: Sequence[str] = [key for key, place in places.items() if place is None]
    if wrong:
        raise Refused("UnknownParameter", f"The parameter {at}.{wrong[0]} is not recognized")
    for key in sorted(node, key=lambda key: int(places[key][1])):  # type: ignore[index]
        yield _value(shape, node[key], f"{at}.{key}")


def _scalar(kind: str, text: str) -> Any:
    """Raises ValueError."""
    if kind == "boolean":
        if text not in BOOLEANS:
            raise ValueError(text)
        return BOOLEANS[text]
    if kind in ("integer", "long"):
        if not INTEGER.fullmatch(text):
            raise ValueError(text)
        return int(text)
    if kind in ("float", "double"):
        return float(text)
    if kind == "timestamp":
        moment = datetime.fromisoformat(text)
        return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=UTC).timestamp()
    if kind == "blob":
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as exc:
            raise ValueError(text) from exc
    return text
