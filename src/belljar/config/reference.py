"""The reference page of the settings, made from the same fields that are obeyed."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from belljar import hypervisor, image, network
from belljar.config import DEFAULT_ORIGIN, SECTIONS, Loaded, Settings
from belljar.errors import BadSetting
from belljar.host.toml import Mistake
from belljar.host.values import duration_text, moment_text, size_text
from belljar.records import MISSING, Field, fields

HEAD = """\
# Settings

<!-- Made by scripts/reference from the sources. Edit those, not this page. -->

belljar works without any settings. Where a site wants others, it writes them to `/etc/belljar/belljar.toml` or to files
in `/etc/belljar/conf.d/`; a user writes them to `~/.config/belljar/belljar.toml`; `belljar --config FILE` and variables
such as `BELLJAR_MACHINE_MEMORY=2G` stand before both. `belljar config show --origin` tells what holds and where it comes
from and what is locked, `belljar config check` finds every mistake at once. A file of the site's that others than root may
write, or replace, is refused by all commands; `belljar doctor` and `belljar config check` say which.

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
        return "table" if get_origin(get_args(kind)[0]) is tuple else "list"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    by_unit = {"bytes": "size", "seconds": "duration", "days": "days", "moment": "date and time"}
    return by_unit.get(
        str(facts.get("unit", "")),
        {bool: "true or false", int: "number", float: "number", str: "text", Path: "path"}[kind],
    )


def default_text(one: Field[Any]) -> str:
    """The default as one would write it in a file."""
    if "default" in one.metadata:
        return str(one.metadata["default"])
    default = one.default_factory() if one.default_factory is not MISSING else one.default
    return f"`{value_text(default, one.metadata)}`" if default not in ("", None, (), MISSING) else ""


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
        return size_text(value)
    if facts.get("unit") == "seconds":
        return duration_text(value)
    if facts.get("unit") == "moment":
        return moment_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- mistakes that no type shows --------------------------------------------------------------------------------------

# What a room would refuse only when it comes to use a value: `belljar config check` and `belljar doctor` ask, no job waits.


def all_mistakes(loaded: Loaded) -> tuple[Mistake, ...]:
    """Those of the files and variables, and those of the values that hold."""
    return (*loaded.mistakes, *(_mistake(loaded, *found) for found in _wrong_values(loaded)))


def notes(loaded: Loaded, in_job: Loaded) -> tuple[str, ...]:
    """What is not a mistake but worth knowing: user settings that batch jobs are refused for, and settings obeyed only in
    part."""
    refused = tuple(f"a batch job is refused for it: {one}" for one in in_job.mistakes if one not in loaded.mistakes)
    return (*refused, *network.shortfalls(loaded.settings.network, is_root=os.geteuid() == 0))


def _wrong_values(loaded: Loaded) -> Iterator[tuple[str, str, BadSetting]]:
    settings = loaded.settings
    yield from hypervisor.wrong_values(settings.qemu, settings.machine.hypervisor)
    yield from (("network", *found) for found in network.mistakes(settings.network))
    yield from (("image", *found) for found in image.mistakes(settings.image))
    yield from _wrong_rules(settings)


def _wrong_rules(settings: Settings) -> Iterator[tuple[str, str, BadSetting]]:
    """Which images jobs may have and get. Whether these are here `belljar batch check` looks, on each node."""
    from belljar.batch.job.policy import queue_images, rules

    for key, look in (("queue_images", queue_images), ("allow", rules)):
        try:
            look(settings.batch)
        except BadSetting as exc:
            yield "batch", key, exc


def _mistake(loaded: Loaded, section: str, key: str, error: BadSetting) -> Mistake:
    """An error that names its key itself names it once here. One without a remedy of its own has the setting's help."""
    name = f"{section}.{key}"
    what = error.message.removeprefix(name).removeprefix(":").removeprefix(" =").strip()
    help = next(str(one.metadata["help"]) for one in fields(SECTIONS[section]) if one.name == key)
    remedy = help if error.hint == BadSetting.hint else error.hint
    return Mistake(loaded.origins.get(name, DEFAULT_ORIGIN), name, what, remedy)
