"""The reference page of the settings, made from the same fields that are obeyed."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from belljar.config import SECTIONS, units

HEAD = """\
# Settings

<!-- Made by scripts/reference from the sources. Edit those, not this page. -->

belljar works without any settings. Where a site wants others, it writes them to `/etc/belljar/belljar.toml` or to files
in `/etc/belljar/conf.d/`; a user writes them to `~/.config/belljar/belljar.toml`; `belljar --config FILE` and variables
such as `BELLJAR_MACHINE_MEMORY=2G` stand before both. `belljar config show --origin` tells what holds and where it comes
from and what is locked, `belljar config check` finds every mistake at once.

What the site keeps for itself users cannot change: `batch.*` and `site.*` never, and in batch jobs what `site.lock` names; a
list that the site writes there holds outside of batch jobs too. A locked key in a user's file, in a variable or in a FILE that
others than root can change is refused, with its place. A FILE counts as the site's where it belongs to root, all folders on
the way to it too, and nobody else can write to them.

Sizes may be written `512M`, `2G`, `2GiB` (all powers of 1024), durations `90s`, `5m`, `2h`, `1:30:00`.

```toml
[machine]
memory = "2G"
cpus = 2

[paths]
scratch = "/scratch/belljar"
```
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD]
    for section, kind in SECTIONS.items():
        parts.append(f"\n## [{section}]\n\n| key | kind | default | meaning |\n|---|---|---|---|\n")
        hints = get_type_hints(kind)
        for one in fields(kind):
            cells = (f"`{one.name}`", kind_text(hints[one.name], one.metadata), default_text(one), one.metadata["help"])
            parts.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(parts)


def kind_text(kind: Any, facts: Mapping[str, Any]) -> str:
    """What may be written for a setting of this type."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is tuple:
        return "list"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    by_unit = {"bytes": "size", "seconds": "duration", "days": "days"}
    return by_unit.get(
        str(facts.get("unit", "")),
        {bool: "true or false", int: "number", float: "number", str: "text", Path: "path"}[kind],
    )


def default_text(one: Field[Any]) -> str:
    """The default as one would write it in a file."""
    if "default" in one.metadata:
        return str(one.metadata["default"])
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return f"`{value_text(default, one.metadata)}`" if default not in ("", None, ()) else ""


def value_text(value: Any, facts: Mapping[str, Any]) -> str:
    """A value as one would write it in a file, without quotes."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if facts.get("unit") == "bytes":
        return units.size_text(value)
    if facts.get("unit") == "seconds":
        return units.duration_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
