"""One raw value (from TOML or from text) becomes the type a setting declares. Pure; mistakes are ValueError."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path

from belljar.hints import Any
from belljar.records import dataclass

LARGEST = 1e12  # amount of anything
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def convert(raw: object, kind: Any, metadata: Mapping[str, Any], *, is_text: bool) -> Any:
    """The value of type *kind*. *metadata*: of the field (unit, minimum, maximum, choices, form). *is_text*: from the
    environment, where everything is text; in a file only a value with a unit may be text."""
    if isinstance(kind, types.UnionType):
        if raw == "":
            return None
        (kind,) = (member for member in kind.__args__ if member is not type(None))
    if isinstance(kind, types.GenericAlias) and kind.__origin__ is tuple:
        return _list(raw, kind.__args__[0], metadata, is_text)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice(raw, kind)
    value = _SCALARS[kind](raw, str(metadata.get("unit", "")), is_text)
    _check_range(value, metadata)
    if value != "" and "form" in metadata:
        metadata["form"].check(value)
    return value


@dataclass(frozen=True)
class Form:
    """What a text must be like, as the `form` of a field."""

    pattern: str
    otherwise: str  # what is said of another text
    as_in: str  # the hint

    def check(self, text: str) -> None:
        """Raises ValueError."""
        if not re.fullmatch(self.pattern, text):
            raise ValueError(f"{text[:60]!r} {self.otherwise}")


HOSTS_NAME = r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?"
HTTP = r"https?://[^/\s]+\S*"
ADDRESS = Form(HTTP, "is not an address", "an http(s) address")
PLACE = Form(rf"(\[[0-9A-Fa-f:.]+\]|{HOSTS_NAME}):[0-9]+", "is not HOST:PORT", "as in mon.example.org:8884")
PLAIN_FILE = Form(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,254}", "is not a file's name", "letters, digits and _.+- only")


def number(text: str) -> float | int:
    """A number that is not negative. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text[:40]!r} is not a number that could be meant")
    return int(value) if value.is_integer() else value


def whole(text: str) -> int:
    """Raises ValueError."""
    value = number(text)
    if not isinstance(value, int):
        raise ValueError(f"{text[:40]!r} is not a whole number")
    return value


def amount(text: str | None) -> float:
    """What a label says that a program wrote: 0.0 where it says nothing, or no number that could be meant."""
    with suppress(ValueError):
        value = float(number(text or "0"))
        return value if value < LARGEST else 0.0
    return 0.0


def is_url(text: str) -> bool:
    """An http(s) address with a host, without blanks."""
    return text.isprintable() and re.fullmatch(HTTP, text) is not None


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
        return size(raw)
    if isinstance(raw, str) and is_text and raw.strip().removeprefix("-").isdecimal():
        return int(raw)
    raise ValueError(f"wants {'a size such as 2G' if unit == 'bytes' else 'a whole number'}, not {_show(raw)}")


def _number(raw: object, unit: str, is_text: bool) -> float:
    if isinstance(raw, (int, float)) and not isinstance(raw, bool):
        value = float(raw)
    elif unit == "moment":
        value = _moment(raw)
    elif isinstance(raw, str) and unit == "seconds":
        value = duration(raw)
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


def _moment(raw: object) -> float:
    """Seconds since the epoch of a date with time, as TOML or a person writes it; without a zone it is the host's."""
    from datetime import datetime

    with suppress(ValueError, OverflowError):
        return (raw if isinstance(raw, datetime) else datetime.fromisoformat(str(raw))).timestamp()
    raise ValueError(f"wants a date and time such as 2026-12-24T18:00:00, not {_show(raw)}")


def moment_text(moment: float) -> str:
    """In this host's time, with its zone."""
    from datetime import datetime

    return datetime.fromtimestamp(moment).astimezone().isoformat(timespec="seconds")


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


def _list(raw: object, kind: Any, metadata: Mapping[str, Any], is_text: bool) -> tuple[Any, ...]:
    items = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) and is_text else raw
    if not isinstance(items, list):
        raise ValueError(f"wants a list, not {_show(raw)}")
    return tuple(convert(item, kind, metadata, is_text=is_text) for item in items)


def _check_range(value: object, metadata: Mapping[str, Any]) -> None:
    """Numbers are never negative here, unless a field says otherwise by its `minimum`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        lowest, highest = metadata.get("minimum", 0), metadata.get("maximum")
        if value < lowest:
            raise ValueError(f"must be at least {_number_text(lowest, metadata)}, not {_number_text(value, metadata)}")
        if highest is not None and value > highest:
            raise ValueError(f"must be at most {_number_text(highest, metadata)}, not {_number_text(value, metadata)}")
    if (choices := metadata.get("choices")) and value not in choices:
        raise ValueError(f"wants one of {', '.join(map(str, choices))}; not {_show(value)}")


def _number_text(value: float, metadata: Mapping[str, Any]) -> str:
    return size_text(int(value)) if metadata.get("unit") == "bytes" and value > 0 else f"{value:g}"


def _show(raw: object) -> str:
    text = {True: "true", False: "false"}[raw] if isinstance(raw, bool) else repr(raw)
    return text if len(text) <= 60 else text[:57] + "..."


# K, KB and KiB are all 1024: batch systems, QEMU and Docker read them so.
# -- sizes and durations as people write them: `2G`, `512MiB`, `90s`, `5m` --------------------------------------------

SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DURATIONS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?"
_DURATION = r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)"
_CLOCK = r"(?:(\d+):(?=[0-5]?\d:))?(\d+):([0-5]\d)"


def size(text: str) -> int:
    """Bytes in *text*. Raises ValueError with the forms that are understood."""
    match = re.fullmatch(_SIZE, text.strip().upper(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 512M, 2G, 2GiB or a number of bytes")
    number, unit = match.groups()
    return int(float(number) * SIZES[unit]) if "." in number else int(number) * SIZES[unit]


def duration(text: str) -> float:
    """Seconds in *text*. Raises ValueError with the forms that are understood."""
    if clock := re.fullmatch(_CLOCK, text.strip(), re.ASCII):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    match = re.fullmatch(_DURATION, text.strip(), re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is not a duration; write it as 90s, 5m, 2h, 1:30:00 or a number of seconds")
    number, unit = match.groups()
    return float(number) * DURATIONS[unit]


def size_text(count: int) -> str:
    """The shortest exact way to write so many bytes."""
    for unit in ("T", "G", "M", "K"):
        if count and count % SIZES[unit] == 0:
            return f"{count // SIZES[unit]}{unit}"
    return str(count)


def duration_text(seconds: float) -> str:
    """The shortest exact way to write so many seconds."""
    for unit in ("d", "h", "m"):
        if seconds and seconds % DURATIONS[unit] == 0:
            return f"{seconds / DURATIONS[unit]:.0f}{unit}"
    return f"{seconds:g}s"
