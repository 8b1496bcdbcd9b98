"""Sizes and durations as people write them: `2G`, `512MiB`, `90s`, `5m`. Nothing here knows a setting or an option."""

from __future__ import annotations

import re

# K, KB and KiB are all 1024: batch systems, QEMU and Docker read them so.
SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
DURATIONS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|)", re.ASCII)
_CLOCK = re.compile(r"(?:(\d+):(?=[0-5]?\d:))?(\d+):([0-5]\d)", re.ASCII)


def size(text: str) -> int:
    """Bytes in *text*. Raises ValueError with the forms that are understood."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write it as 512M, 2G, 2GiB or a number of bytes")
    number, unit = match.groups()
    return int(float(number) * SIZES[unit]) if "." in number else int(number) * SIZES[unit]


def duration(text: str) -> float:
    """Seconds in *text*. Raises ValueError with the forms that are understood."""
    if clock := _CLOCK.fullmatch(text.strip()):
        hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    match = _DURATION.fullmatch(text.strip())
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
