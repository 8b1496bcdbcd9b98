"""`belljar config show` and `belljar config check`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, Verb
from belljar.cli.render import as_json, show
from belljar.jobs import plain
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.config import Loaded
    from belljar.host.toml import Mistake


def config(args: argparse.Namespace, house: House) -> int:
    from belljar.config import inspect
    from belljar.errors import BadSettings

    loaded = inspect(house.config_file)
    if args.what == "check":
        from belljar.config.reference import all_mistakes, notes

        told = notes(loaded, inspect(house.config_file, in_job=True))
        mistakes = (*all_mistakes(loaded), *_of_node(loaded))
        return _check(replace(loaded, mistakes=mistakes), told, args.format)
    _show(loaded, args.origin, args.format)
    if loaded.mistakes:
        raise BadSettings(loaded.mistakes)
    return 0


def _show(loaded: Loaded, with_origin: bool, form: str) -> None:
    from belljar.config import DEFAULT_ORIGIN, every_setting
    from belljar.config.reference import value_text

    rows: list[tuple[str, ...]] = []
    facts: dict[str, dict[str, Any]] = {}
    for section, key, value, metadata in every_setting(loaded.settings):
        origin = loaded.origins.get(f"{section}.{key}", DEFAULT_ORIGIN)
        locked = _locked(f"{section}.{key}", loaded)
        rows.append((f"{section}.{key}", value_text(value, metadata), *((origin, locked) if with_origin else ())))
        known = {"value": value, "origin": origin, "locked": locked}
        facts.setdefault(section, {})[key] = known if with_origin else value
    show(facts, ("SETTING", "VALUE", *(("ORIGIN", "LOCKED") if with_origin else ())), rows, as_=form)


def _locked(name: str, loaded: Loaded) -> str:
    """Where users cannot change it: "always", "in batch jobs", or nowhere."""
    from belljar.config.merge import ALWAYS_LOCKED, is_locked

    lock = loaded.settings.site.lock
    always = (*ALWAYS_LOCKED, *(lock if "site.lock" in loaded.origins else ()))
    return "always" if is_locked(name, always) else "in batch jobs" if is_locked(name, lock) else ""


def _of_node(loaded: Loaded) -> Iterator[Mistake]:
    """What doctor finds wrong with the folder that `paths.node` names."""
    from belljar.host.toml import Mistake
    from belljar.jobs.doctor import examine_node

    seen = examine_node(loaded.settings.paths.node)
    if not seen.is_good:
        yield Mistake(loaded.origins["paths.node"], "paths.node", seen.text, seen.remedy)


def _check(loaded: Loaded, told: tuple[str, ...], form: str) -> int:
    if form == "json":
        print(as_json({"ok": not loaded.mistakes, "mistakes": loaded.mistakes, "notes": told}))
    elif loaded.mistakes:
        for mistake in loaded.mistakes:
            print(plain(str(mistake)))
    else:
        given = sorted({origin.rpartition(":")[0] or origin for origin in loaded.origins.values()})
        print(f"The settings are good ({', '.join(given) if given else 'defaults only'}).")
        for note in told:
            print(plain(f"note: {note}"))
    return 1 if loaded.mistakes else 0


VERBS = {
    "config": Verb(
        "Show the settings that hold, where each comes from and which of them only the site sets (site.lock), or check them: every"
        " mistake in every file at once.",
        config,
        f"""
        {{show,check}} @what | show: the settings that hold; check: exit 1 when there are mistakes
        --origin | with show: the file and line, or variable, a value comes from, and whether only the site can set it
        {FORMAT}""",
    )
}
