"""How values are shown: aligned tables for people, JSON for programs, text of guests without control characters."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path

from belljar.findings import Finding
from belljar.hints import Any
from belljar.host.values import duration_text, moment_text, size_text
from belljar.jobs import plain
from belljar.model import to_json

TIMES = {"began", "created", "ended", "started", "time"}  # seconds since the epoch; JSON has them as RFC 3339, too


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned, numbers to the right. A column that is empty in every row is left out."""
    body = [["" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    lines: list[list[str]] = [[] for _ in range(len(body) + 1)]
    for at, head in enumerate(heads):
        cells = [head, *(row[at] for row in body)]
        if body and not any(cells[1:]):
            continue
        width, is_number = max(map(len, cells)), bool(rows) and not any(isinstance(row[at], str) for row in rows)
        for line, cell in zip(lines, cells, strict=True):
            line.append(cell.rjust(width) if is_number else cell.ljust(width))
    return "\n".join("  ".join(line).rstrip() for line in lines)


def as_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON of anything in belljar's words; paths are text, bytes latin-1. *indent* None: on one line."""
    return json.dumps(_jsonable(value), indent=indent, ensure_ascii=False)


def _jsonable(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    if isinstance(value, dict):
        made = {str(key): _jsonable(item) for key, item in value.items()}
        moments = {key: made[key] for key in TIMES & made.keys() if isinstance(made[key], float) and made[key] > 0}
        return made | {f"{key}_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)) for key, at in moments.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return to_json(value)


def show_findings(findings: Iterable[Finding], *, as_: str) -> int:
    """A line for each as soon as it is there, or all of them in JSON. Returns the exit code: 1 where one failed."""
    shown = []
    for finding in findings:
        shown.append(finding)
        if as_ != "json":
            first, *more = f"{finding.name}: {finding.text}".removesuffix(": ").splitlines()
            print(f"{finding.grade.value:<5} {plain(first)}", flush=True)
            remedies = (f"-> {line}" for line in finding.remedy.splitlines())
            print("".join(f"      {plain(line)}\n" for line in (*more, *remedies)), end="", flush=True)
    is_good = all(finding.is_good for finding in shown)
    if as_ == "json":
        print(as_json({"ok": is_good, "findings": shown}))
    return 0 if is_good else 1


def show(value: Any, heads: Sequence[str], rows: Sequence[Sequence[object]] | None = None, *, as_: str) -> None:
    """Print *value* as JSON, or as CSV if it is a list of objects, or *rows* as a table, by the verb's --format. Without *rows* they
    are the values of these objects."""
    rows = [list(item.values()) for item in value] if rows is None else rows
    if as_ == "csv":
        heads, rows = list(value[0]) if value else heads, [list(item.values()) for item in value]
        csv.writer(sys.stdout, lineterminator="\n").writerows([heads, *rows])
    else:
        print(as_json(value) if as_ == "json" else table(heads, rows))


def duration(seconds: float) -> str:
    """About so long, for people."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def moment(timestamp: float | None) -> str:
    """Local time of a moment since the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp)) if timestamp else ""


def setting(value: Any, metadata: Mapping[str, Any]) -> str:
    """A setting's value as one would write it in a file, without quotes. *metadata*: of its field."""
    if value is None:
        return ""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    units = {"bytes": size_text, "seconds": duration_text, "moment": moment_text}
    if as_text := units.get(str(metadata.get("unit"))):
        return as_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def utc(timestamp: float) -> str:
    """The same, in coordinated universal time."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(timestamp))
