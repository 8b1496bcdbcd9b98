"""vacuum.toml becomes a `Space`: every mistake at once, as `file, key: what, hint`. What a key means stands in the fields of `Space`,
`MachineType` and `Pipe`.

Tables: [space], [factory], [machinetype.NAME], [pipe.NAME]. Files in vacuum.d beside vacuum.toml come after it, by name; a later
one stands before an earlier one, key by key. A [machinetype.PIPE-SUFFIX] without an image says how this site wants a machinetype
of that pipe; by itself it is not one."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from belljar.errors import BadSetting, ImageError
from belljar.host.room import meminfo
from belljar.host.toml import Mistake
from belljar.image import is_source
from belljar.records import dataclass, replace
from belljar.service.tables import Key, Wrong, blame, keys_of, read_values
from belljar.vacuum import LIKE_A_SPACE, LIKE_AN_IMAGE, Given, MachineType, Pipe, Space

FILE = Path("/etc/belljar/vacuum.toml")
KINDS: Mapping[str, tuple[Any, ...]] = {
    "space": (Space,), "factory": (Space,), "machinetype": (MachineType,), "pipe": (Pipe, MachineType),
}  # fmt: skip
NAMED = ("machinetype", "pipe")
TABLES = ("options", "option_files")  # inner tables of a machinetype
REMEDY = "Correct the file, then run `belljar vacuum check-config`."


@dataclass(frozen=True)
class Loaded:
    """A space as far as it can be understood: a wrong value is left out."""

    space: Space
    origins: Mapping[str, str]  # "machinetype.atlas.share" -> "/etc/belljar/vacuum.toml:12"
    mistakes: tuple[Mistake, ...]
    files: tuple[Path, ...]


def load(path: Path = FILE) -> Space:
    """The space that a file and those in the folder beside it describe. Raises BadSetting with every mistake there is."""
    loaded = inspect(path)
    if loaded.mistakes:
        raise BadSetting.of(loaded.mistakes, hint=REMEDY)
    return loaded.space


def inspect(path: Path = FILE) -> Loaded:
    """The space as far as it can be understood, where each value came from, and what is wrong."""
    mistakes: list[Mistake] = []
    files = (path, *sorted(path.with_suffix(".d").glob("*.toml")))
    tables, values = read_values(files, {kind: keys(kind) for kind in KINDS}, NAMED, mistakes)
    space = _space(values)
    blame(path, tables, _wrongs(space, values), mistakes)
    origins = {f"{name}.{key}": value.origin for name, table in tables.items() for key, value in table.items()}
    return Loaded(space, origins, tuple(mistakes), files)


def keys(table: str) -> dict[str, Key]:
    """What may stand in a table of this kind."""
    return keys_of(KINDS[table], table)


def _space(values: Mapping[str, Mapping[str, Any]]) -> Space:
    given: dict[str, Any] = {"name": "", "factory": os.uname().nodename, "processors": os.cpu_count() or 1}
    given["starting"] = 2 * given["processors"]
    given |= {**values["space"], **values["factory"]}
    names = given.get("factories", ()) or (given["factory"],)
    given["factories"] = tuple(given["factory"] if name == "." else name for name in names)
    given["site"] = given.get("site") or given["name"].partition(".")[2]
    space = Space(**given)
    named: dict[str, dict[str, Mapping[str, Any]]] = {kind: {} for kind in KINDS}
    for full, table in values.items():
        kind, _, name = full.partition(".")
        named[kind][name] = table
    types, own = [], dict[str, list[tuple[str, Given]]]()
    for name, table in named["machinetype"].items():
        if pipe := pipe_of(name, named["pipe"]):
            own.setdefault(pipe, []).append((name, tuple(table.items())))
        if table.get("image") or not pipe:
            types.append(machinetype(name, table, space))
    pipes = (_pipe(name, table, tuple(own.get(name, ()))) for name, table in named["pipe"].items())
    return replace(space, types=tuple(types), pipes=tuple(pipes))


def pipe_of(name: str, pipes: Iterable[str]) -> str:
    """The pipe that a machinetype of this name would be of; "" for none."""
    return max((pipe for pipe in pipes if name.startswith(f"{pipe}-")), key=len, default="")


def _pipe(name: str, table: Mapping[str, Any], own: tuple[tuple[str, Given], ...]) -> Pipe:
    mine = {key: value for key, value in table.items() if key in Pipe.__dataclass_fields__}
    return Pipe(name, **mine, given=tuple((key, value) for key, value in table.items() if key not in mine), own=own)


def machinetype(name: str, given: Mapping[str, Any], space: Space, pipe: str = "") -> MachineType:
    """A machinetype with these values, and with the options that the factory gives to all."""
    return MachineType(name, pipe=pipe, **overlaid({key: getattr(space, key) for key in TABLES}, given))


def overlaid(given: Mapping[str, Any], stronger: Mapping[str, Any]) -> dict[str, Any]:
    """*stronger* over *given*; of options, one by one."""
    both = {**given, **stronger}
    stronger_names = {name for key in TABLES for name, _ in stronger.get(key, ())}
    for key in TABLES:
        both[key] = (*(pair for pair in given.get(key, ()) if pair[0] not in stronger_names), *stronger.get(key, ()))
    return both


# What no type shows: the key, whether it is wrong, what is said, and the hint.
OF_SPACES: tuple[tuple[str, Callable[[Space], object], str, str], ...] = (
    ("name", lambda space: not space.name, "is missing", LIKE_A_SPACE),
    ("signed_only", lambda space: space.signed_only and not space.key_file, "without key_file", "name the file with the space's secret"),
    ("poll_limit", lambda space: space.poll_limit < space.poll_silence, "is less than poll_silence", "space round has to fit into it"),
)  # fmt: skip
OF_TYPES: tuple[tuple[str, Callable[[MachineType], object], str, str], ...] = (
    ("image", lambda kind: not kind.image, "is missing", LIKE_AN_IMAGE),
    ("min_wallclock", lambda kind: kind.least_wallclock > kind.max_wallclock, "is more than max_wallclock", "no machine would have the time"),
    ("heartbeat", lambda kind: kind.heartbeat and not kind.heartbeat_file, "without heartbeat_file", "name the file that a machine renews"),
    ("proxy", lambda kind: len(kind.proxy) > 2, "has more than two paths", "a certificate and its key"),
)  # fmt: skip


def _wrongs(space: Space, values: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Wrong]]:
    yield from (("space", (key, what, hint)) for key, is_wrong, what, hint in OF_SPACES if is_wrong(space))
    for name in sorted({name for name in space.factories if space.factories.count(name) > 1}):
        yield "space", ("factories", f"{name} is there twice", "name each factory once")
    for network in space.allow:
        try:
            ipaddress.ip_network(network)
        except ValueError as exc:
            yield "space", ("allow", str(exc), "as in 10.1.0.0/16")
    yield from (("factory", wrong) for wrong in _twice(space))
    for kind in space.types:
        yield from (
            (f"machinetype.{kind.name}", wrong) for wrong in wrong_type(kind, values[f"machinetype.{kind.name}"])
        )
    for pipe in space.pipes:
        if not pipe.url:
            yield f"pipe.{pipe.name}", ("url", "is missing", "an http(s) address")


def wrong_type(kind: MachineType, given: Mapping[str, Any] | None = None) -> Iterator[Wrong]:
    """What is wrong with a machinetype. *given*: what was said of it, for the key to blame."""
    yield from ((key, what, hint) for key, is_wrong, what, hint in OF_TYPES if is_wrong(kind))
    if kind.min_processors > kind.max_processors:
        key = "min_processors" if "min_processors" in (given or {}) else "max_processors"
        yield (
            key,
            f"min_processors {kind.min_processors} is more than max_processors {kind.max_processors}",
            "swap them",
        )
    yield from _twice(kind)


def _twice(given: Space | MachineType) -> Iterator[Wrong]:
    for option in sorted({name for name, _ in given.options} & {name for name, _ in given.option_files}):
        yield "options", f"{option} is in option_files, too", "keep one of them"


def wrong_here(space: Space, find: Callable[[str], object] = str) -> Iterator[tuple[str, str, str]]:
    """(section.key, what, hint) of what is well said and does not fit this host, or not now: names, sizes, files that are not there.
    *find* raises ImageError for an image that is not here."""
    if space.shutdown_time is not None and space.shutdown_time <= time.time():
        yield "factory.shutdown_time", "has passed", "nothing is started: name a later moment, or none"
    if not any(offer.share > 0 for offer in space.types) and not any(offer.share > 0 for offer in space.pipes):
        yield "space", "no machinetype and no pipe has a share", "nothing is started: give one a share"
    (memory,) = meminfo("MemTotal")
    if space.factory not in space.factories:
        what = f"this host, {space.factory}, is not among them"
        yield "space.factories", what, "add it (or `.`), or set factory.name"
    if "." not in space.factory:
        yield "factory.name", f"{space.factory} has no domain, which factories of Vac insist on", "set it in full"
    named = [("space.key_file", space.key_file)]
    for kind in space.types:
        at = f"machinetype.{kind.name}"
        if (least := kind.min_processors * (kind.memory or space.memory)) > memory:
            yield f"{at}.memory", f"a machine has {least >> 20} MiB, this host {memory >> 20} MiB", "give it less"
        bridge = kind.network.removeprefix("bridge:")
        if bridge != kind.network and not Path("/sys/class/net", bridge, "bridge").exists():
            yield f"{at}.network", f"{bridge} is not a bridge of this host", "make it, or name another"
        try:
            find(kind.image) if kind.image and not is_source(kind.image) else None
        except ImageError as exc:
            yield f"{at}.image", exc.message, exc.hint
        paths = (Path(text) if text.startswith("/") else None for text in (kind.user_data, kind.image))
        named += [*zip((f"{at}.user_data", f"{at}.image"), paths, strict=True), (f"{at}.token_file", kind.token_file)]
        named += [(f"{at}.option_files", path) for _, path in kind.option_files]
        named += [(f"{at}.proxy", path) for path in kind.proxy]
    for key, path in named:
        if path is not None and not os.access(path, os.R_OK):
            what = "cannot be read" if path.exists() else "is not there"
            yield key, f"{path} {what}", "a machine that needs it is not started before it can"
