"""One raw value (from TOML or from text) becomes the type a setting declares. Pure; mistakes are ValueError."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from belljar.config import units

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def convert(raw: object, kind: Any, facts: Mapping[str, Any], *, is_text: bool) -> Any:
    """The value of type *kind*. *facts* are the field's metadata (unit, minimum, maximum, choices).

    `is_text`: it comes from the environment, where everything is text; in a file a number is not written as text
    unless it carries a unit.
    """
    if get_origin(kind) in (Union, types.UnionType):
        if raw == "":
            return None
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        return _list(raw, get_args(kind)[0], facts, is_text)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice(raw, kind)
    value = _SCALARS[kind](raw, str(facts.get("unit", "")), is_text)
    _check_range(value, facts)
    return value


def _boolean(raw: object, unit: str, is_text: bool) -> bool:
    if isinstance(raw, bool):
        return raw
    if is_text and isinstance(raw, str) and raw.lower() in (*TRUE, *FALSE):
        return raw.lower() in TRUE
    raise ValueError(f"wants true or false, not {_show(raw)}")


def _whole(raw: object, unit: str, is_text: bool) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and unit == "bytes":
        return units.size(raw)
    if isinstance(raw, str) and is_text and raw.strip().removeprefix("-").isdecimal():
        return int(raw)
    raise ValueError(f"wants {'a size such as 2G' if unit == 'bytes' else 'a whole number'}, not {_show(raw)}")


def _number(raw: object, unit: str, is_text: bool) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        value = float(raw)
    elif isinstance(raw, str) and unit == "seconds":
        value = units.duration(raw)
    elif isinstance(raw, str) and is_text:
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(f"wants a number, not {_show(raw)}") from None
    else:
        raise ValueError(f"wants {'a duration such as 90s' if unit == 'seconds' else 'a number'}, not {_show(raw)}")
    if not math.isfinite(value):
        raise ValueError("must be a finite number: every wait has an end")
    return value


def _text(raw: object, unit: str, is_text: bool) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"wants text in quotes, not {_show(raw)}")
    if not raw.isprintable():
        raise ValueError("must be one line without control characters")
    return raw


def _path(raw: object, unit: str, is_text: bool) -> Path:
    path = Path(_text(raw, unit, is_text))
    if str(path).startswith("~"):
        try:
            path = path.expanduser()
        except RuntimeError as exc:
            raise ValueError(f"{_show(raw)}: no such user's home folder") from exc
    if not path.is_absolute():
        raise ValueError(f"wants a path from the root (/...) or from home (~/...), not {_show(raw)}")
    if ".." in path.parts:
        raise ValueError(f"must not contain .., which {_show(raw)} does")
    return path


_SCALARS: Mapping[Any, Any] = {bool: _boolean, int: _whole, float: _number, str: _text, Path: _path}


def _choice(raw: object, kind: type[Enum]) -> Enum:
    for member in kind:
        if raw == member.value:
            return member
    raise ValueError(f"wants one of {', '.join(str(member.value) for member in kind)}; not {_show(raw)}")


def _list(raw: object, kind: Any, facts: Mapping[str, Any], is_text: bool) -> tuple[Any, ...]:
    items = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) and is_text else raw
    if not isinstance(items, list):
        raise ValueError(f"wants a list, not {_show(raw)}")
    return tuple(convert(item, kind, facts, is_text=is_text) for item in items)


def _check_range(value: object, facts: Mapping[str, Any]) -> None:
    """Numbers are never negative here, unless a field says otherwise by its `minimum`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        lowest, highest = facts.get("minimum", 0), facts.get("maximum")
        if value < lowest:
            raise ValueError(f"must be at least {_number_text(lowest, facts)}, not {_number_text(value, facts)}")
        if highest is not None and value > highest:
            raise ValueError(f"must be at most {_number_text(highest, facts)}, not {_number_text(value, facts)}")
    if (choices := facts.get("choices")) and value not in choices:
        raise ValueError(f"wants one of {', '.join(map(str, choices))}; not {_show(value)}")


def _number_text(value: float, facts: Mapping[str, Any]) -> str:
    return units.size_text(int(value)) if facts.get("unit") == "bytes" and value > 0 else f"{value:g}"


def _show(raw: object) -> str:
    text = {True: "true", False: "false"}[raw] if isinstance(raw, bool) else repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."
