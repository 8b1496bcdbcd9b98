"""Records made of JSON, as their fields and types say. Not on the way of a job: only who is handed a request reads one."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from belljar.records import MISSING, RESERVED, Field, fields

T = TypeVar("T")
NONE = (MISSING, dataclasses.MISSING)
PLAIN = (str, int, bool)
hints_of = cache(get_type_hints)  # it compiles them anew each time
_parts: Any = cache(lambda kind: (get_origin(kind), get_args(kind)))
NAMED = {str: "text", int: "a whole number", bool: "true or false"}


def from_json(kind: type[T], value: Any, least: Mapping[str, float] | None = None) -> T:
    """The record of this type. *least*: the least numbers, by the names of fields. Raises ValueError with key, such as machine.cpus,
    and value."""
    made: T = _value(kind, value, "", least or {})
    return made


def strict_json(data: bytes) -> Any:
    """What JSON in UTF-8 says, in which each key stands once, each number is finite, each text is text. Raises ValueError."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=once, parse_constant=_finite, parse_float=_finite)
        if b"\\ud" in data.lower():  # a surrogate; two of them may be a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    except UnicodeEncodeError as exc:
        raise ValueError(f"{exc.object[exc.start : exc.end]!r} is half of a character, and no text") from exc


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a key stands twice."""
    if len(value := dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a number in JSON")
    return value


def bad(key: str, value: Any, problem: str) -> ValueError:
    text = repr(value)
    return ValueError(f"{key or 'the request'}: {text if len(text) <= 80 else text[:77] + '...'}: {problem}")


def _value(kind: Any, value: Any, key: str, least: Mapping[str, float]) -> Any:
    if type(value) is kind and kind in PLAIN:
        return value
    origin, inner = _parts(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        kinds = [member for member in inner if member is not type(None)]
        return _value(next((member for member in kinds if _has_all(member, value)), kinds[-1]), value, key, least)
    if origin is tuple:
        is_open = inner[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (is_open or len(value) == len(inner)):
            raise bad(key, value, "not a list" if is_open else f"not a list of {len(inner)}")
        kinds = [inner[0]] * len(value) if is_open else inner
        both = enumerate(zip(kinds, value, strict=True))
        return tuple(_value(member, item, f"{key}[{number}]", least) for number, (member, item) in both)
    if origin is dict:
        _must(isinstance(value, dict), key, value, "not an object")
        return {name: _value(inner[1], item, f"{key}.{name}", least) for name, item in value.items()}
    return _record(kind, value, key, least) if hasattr(kind, "__dataclass_fields__") else _plain(kind, value, key)


def _has_all(kind: Any, value: Any) -> bool:
    """Is all there that such a record must have?"""
    return isinstance(value, dict) and all(field.name in value for field in fields(kind) if _is_needed(field))


def _is_needed(field: Field[Any]) -> bool:
    """For the standard library's dataclasses, too."""
    return field.default in NONE and field.default_factory in NONE


def _record(kind: Any, value: Any, key: str, least: Mapping[str, float]) -> Any:
    _must(isinstance(value, dict), key, value, "not an object")
    hints, values, left = hints_of(kind), {}, dict(value)
    for field in fields(kind):
        name = RESERVED.get(field.name, field.name)
        place = f"{key}.{name}" if key else name
        if name in left:
            values[field.name] = _value(hints[field.name], left.pop(name), place, least)
        elif _is_needed(field):
            raise ValueError(f"{place}: is missing")
        lowest, number = least.get(field.name), values.get(field.name)
        if lowest is not None and number is not None and number < lowest:
            raise bad(place, value[name], f"less than {lowest}")
    for name in left:
        raise bad(f"{key}.{name}" if key else str(name), left[name], "no such key")
    return kind(**values)


def _plain(kind: Any, value: Any, key: str) -> Any:
    if issubclass(kind, Enum):
        with suppress(ValueError):
            return kind(value)
        raise bad(key, value, f"none of {', '.join(member.value for member in kind)}")
    if kind is bytes:
        _must(isinstance(value, str) and max(value, default="") <= "\xff", key, value, "not bytes as latin-1 text")
        return value.encode("latin-1")
    if kind is Path:
        return Path(_plain(str, value, key))
    if kind is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
        _must(is_number, key, value, "not a number")
        return float(value)
    _must(type(value) is kind, key, value, f"not {NAMED[kind]}")
    return value


def _must(is_so: bool, key: str, value: Any, problem: str) -> None:
    if not is_so:
        raise bad(key, value, problem)
