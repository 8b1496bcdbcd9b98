"""`belljar vacuum config` and `check-config`: vacuum.toml, shown and checked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.host.config import report
from belljar.cli.parser import Args, acts
from belljar.cli.render import setting, show
from belljar.errors import BadSetting
from belljar.host.files import private_folder
from belljar.host.toml import Mistake
from belljar.records import fields
from belljar.vacuum import Space
from belljar.vacuum.settings.copies import Copy, kept, refresh
from belljar.vacuum.settings.pipes import FOLDER, with_pipes
from belljar.vacuum.settings.settings import FILE, REMEDY, Loaded, inspect, keys, wrong_here

LONGEST_CELL = 60


def config(args: Args, runtime: Runtime) -> None:
    """The space as it is understood, pipes as they were last seen."""
    loaded, copies = _loaded(args, runtime, asks=False)
    space, _ = with_pipes(loaded.space, copies)
    ages = {name: copy.age(time.time()) if copy.document is not None else None for name, copy in copies.items()}
    value = {"space": space, "origins": loaded.origins, "pipes": ages}
    show(value, ("SETTING", "VALUE", "ORIGIN"), list(_rows(space, loaded)), as_=args.format)
    if loaded.mistakes:
        raise BadSetting.of(loaded.mistakes, hint=REMEDY)


def check_config(args: Args, runtime: Runtime) -> int:
    """Every mistake, and what does not fit this host; exit 1 where there is one."""
    loaded, copies = _loaded(args, runtime, asks=args.pipes)
    space, notes = with_pipes(loaded.space, copies)
    mistakes = loaded.mistakes or tuple(
        Mistake(loaded.origins.get(key, str(loaded.files[0])), key, what, hint)
        for key, what, hint in wrong_here(space, runtime.images.resolve)
    )
    now = time.time()
    told_of_pipes = [line for name, copy in copies.items() if (line := copy.told(f"pipe {name}", now))]
    types = ", ".join(kind.name for kind in space.types) or "none"
    good = f"The space {space.name} is good (machinetypes: {types})."
    return report(mistakes, [*told_of_pipes, *map(str, notes)], good, args.format)


def _loaded(args: Args, runtime: Runtime, *, asks: bool) -> tuple[Loaded, dict[str, Copy]]:
    """The settings, and the documents of their pipes: as they are kept, or asked for now."""
    loaded = inspect(args.file or FILE)
    folder = runtime.settings.paths.store / FOLDER
    if asks and loaded.space.pipes:
        private_folder(folder)
    now = time.time()
    copies = {pipe.name: refresh(pipe, folder, now) if asks else kept(pipe, folder) for pipe in loaded.space.pipes}
    return loaded, copies


def _rows(space: Space, loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """What holds in [space] and [factory], and what was set of the rest."""

    def row(name: str, value: Any, metadata: Any, origin: str = "default") -> tuple[str, str, str]:
        is_table = isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)
        text = ", ".join(f"{key}={item}" for key, item in value) if is_table else setting(value, metadata)
        short = text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."
        return name, short, loaded.origins.get(name, origin)

    for section in ("space", "factory"):
        for key, known in keys(section).items():
            yield row(f"{section}.{key}", getattr(space, known.field.name), known.field.metadata)
    for kind in space.types:
        usual = {field.name: field.default for field in fields(type(kind))}
        for key, known in keys("machinetype").items():
            if getattr(kind, key) != usual[key]:
                origin = f"pipe {kind.pipe}" if kind.pipe else "default"
                yield row(f"machinetype.{kind.name}.{key}", getattr(kind, key), known.field.metadata, origin)
    for pipe in space.pipes:
        yield row(f"pipe.{pipe.name}.url", pipe.url, {})
        yield row(f"pipe.{pipe.name}.share", pipe.share, {})


FILE_ROW = "FILE ? | settings file (default: /etc/belljar/vacuum.toml), with vacuum.d/*.toml beside it"
ROWS = f"""
# config +format | show the settings in force, and the machine types of vacuum pipes as last fetched
{FILE_ROW}
# check-config +format | find every mistake in the settings; exits 1 if there is one
{FILE_ROW}
--pipes | also fetch the vacuum pipes (experiments' documents of machine types)
"""
ACTS = acts(ROWS, globals())
