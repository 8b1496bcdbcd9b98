"""`belljar vacuum config` and `check-config`: vacuum.toml, shown and checked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, acts
from belljar.cli.render import as_json, show
from belljar.jobs import plain
from belljar.records import fields

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.host.toml import Mistake
    from belljar.vacuum import Space
    from belljar.vacuum.settings.copies import Copy
    from belljar.vacuum.settings.settings import Loaded

LONGEST_CELL = 60


def config(args: argparse.Namespace, house: House) -> int:
    """The space as it is understood, pipes as they were last seen."""
    from belljar.errors import BadSetting
    from belljar.vacuum.settings.pipes import with_pipes
    from belljar.vacuum.settings.settings import REMEDY

    loaded, copies = _loaded(args, house, asks=False)
    space, _ = with_pipes(loaded.space, copies)
    ages = {name: copy.age(time.time()) if copy.document is not None else None for name, copy in copies.items()}
    facts = {"space": space, "origins": loaded.origins, "pipes": ages}
    show(facts, ("SETTING", "VALUE", "ORIGIN"), list(_rows(space, loaded)), as_=args.format)
    if loaded.mistakes:
        raise BadSetting.of(loaded.mistakes, hint=REMEDY)
    return 0


def check(args: argparse.Namespace, house: House) -> int:
    """Every mistake, and what does not fit this host; exit 1 where there is one."""
    from belljar.host.toml import Mistake
    from belljar.vacuum.settings.pipes import with_pipes
    from belljar.vacuum.settings.settings import wrong_here

    loaded, copies = _loaded(args, house, asks=args.pipes)
    space, notes = with_pipes(loaded.space, copies)
    mistakes: list[Mistake] = list(loaded.mistakes)
    if not mistakes:
        usual = str(loaded.files[0])
        wrongs = wrong_here(space, house.images.resolve)
        mistakes += (Mistake(loaded.origins.get(at, usual), at, what, hint) for at, what, hint in wrongs)
    now = time.time()
    silent = [line for name, copy in copies.items() if (line := copy.told(f"pipe {name}", now))]
    told = [*silent, *map(str, notes)]
    if args.format == "json":
        print(as_json({"ok": not mistakes, "mistakes": mistakes, "notes": told}))
    else:
        for line in map(str, mistakes):
            print(plain(line))
        names = [one.name for one in space.types]
        if not mistakes:
            print(
                f"The space {space.name} is good ({_count(len(names), 'machinetype')}: {', '.join(names) or 'none'})."
            )
        for line in told:
            print(plain(f"note: {line}"))
    return 1 if mistakes else 0


def _loaded(args: argparse.Namespace, house: House, *, asks: bool) -> tuple[Loaded, dict[str, Copy]]:
    """The settings, and the documents of their pipes: as they are kept, or asked for now."""
    from belljar.host.files import private_folder
    from belljar.vacuum.settings.copies import kept, refresh
    from belljar.vacuum.settings.pipes import FOLDER
    from belljar.vacuum.settings.settings import FILE, inspect

    loaded = inspect(args.file or FILE)
    folder = house.settings.paths.store / FOLDER
    if asks and loaded.space.pipes:
        private_folder(folder)
    return loaded, {
        one.name: refresh(one, folder, time.time()) if asks else kept(one, folder) for one in loaded.space.pipes
    }


def _rows(space: Space, loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """What holds in [space] and [factory], and what was set of the rest."""
    from belljar.config.reference import value_text
    from belljar.vacuum.settings.settings import keys

    def row(name: str, value: Any, metadata: Any) -> tuple[str, str, str]:
        is_table = isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)
        text = ", ".join(f"{key}={one}" for key, one in value) if is_table else value_text(value, metadata)
        return name, _short(text), loaded.origins.get(name, "default")

    for section in ("space", "factory"):
        for key, facts in keys(section).items():
            yield row(f"{section}.{key}", getattr(space, facts.field.name), facts.field.metadata)
    for one in space.types:
        usual = {each.name: each.default for each in fields(type(one))}
        for key, facts in keys("machinetype").items():
            value = getattr(one, key)
            if value != usual[key]:
                name, text, origin = row(f"machinetype.{one.name}.{key}", value, facts.field.metadata)
                yield name, text, f"pipe {one.pipe}" if one.pipe and origin == "default" else origin
    for pipe in space.pipes:
        yield row(f"pipe.{pipe.name}.url", pipe.url, {})
        yield row(f"pipe.{pipe.name}.share", pipe.share, {})


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


FILE = "FILE ? :path | the space's settings (default: /etc/belljar/vacuum.toml and vacuum.d beside it)"
ACTS = acts(
    f"""
    # config | show the space as it is understood; machinetypes of pipes as they were last seen
    {FILE}
    {FORMAT}
    # check-config | find every mistake at once; exit 1 when there is one
    {FILE}
    --pipes | ask the vacuum pipes now, too
    {FORMAT}""",
    {"config": config, "check-config": check},
)
