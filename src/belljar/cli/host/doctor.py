"""`belljar doctor`: what this host offers, what it lacks, and what to do about it; `belljar config`: the settings, shown and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import Args, acts
from belljar.cli.render import as_json, setting, show, show_findings
from belljar.config import DEFAULT_ORIGIN, Loaded, every_setting, inspect
from belljar.config.checking import all_mistakes, notes
from belljar.config.merge import ALWAYS_LOCKED, is_locked
from belljar.errors import BadSetting
from belljar.findings import Finding, examine, fail, ok
from belljar.host.toml import Mistake
from belljar.jobs import plain
from belljar.jobs.site.doctor import CHECKS as CHECKS_OF_HOST
from belljar.jobs.site.doctor import node as node_of_host


def doctor(args: Args, runtime: Runtime) -> int:
    runtime.is_lenient = (
        True  # a mistake in the settings is the first check's; the others look at what can be understood
    )
    checks = [look for look in CHECKS if not args.only or look.__name__ in args.only]
    return show_findings((examine(look.__name__, partial(look, runtime)) for look in checks), as_=args.format)


def settings(runtime: Any) -> Finding:
    loaded = inspect(runtime.config_file)
    if mistakes := all_mistakes(loaded):
        return fail("settings", "\n".join(map(str, mistakes)), "Correct them; `belljar config check` looks again.")
    return ok("settings", f"{len(loaded.origins)} set, the rest are defaults")


CHECKS: tuple[Callable[[Any], Finding], ...] = (settings, *CHECKS_OF_HOST)


def config(args: Args, runtime: Runtime) -> int:
    loaded = inspect(runtime.config_file)
    if args.what == "check":
        node = node_of_host(loaded)
        of_node = [] if node.is_good else [Mistake(loaded.origins["paths.node"], "paths.node", node.text, node.remedy)]
        mistakes = (*all_mistakes(loaded), *of_node)
        files = sorted({origin.rpartition(":")[0] or origin for origin in loaded.origins.values()})
        good = f"The settings are good ({', '.join(files) or 'defaults only'})."
        return report(mistakes, notes(loaded, inspect(runtime.config_file, in_job=True)), good, args.format)
    _show(loaded, args.origin, args.format)
    if loaded.mistakes:
        raise BadSetting.of(loaded.mistakes)
    return 0


def report(mistakes: Sequence[Mistake], notes: Sequence[str], good: str, form: str) -> int:
    """Print every mistake, or that all is *good*, and the notes; exit code 1 where there is a mistake."""
    lines = [*(map(str, mistakes) if mistakes else [good]), *(f"note: {note}" for note in notes)]
    value = {"ok": not mistakes, "mistakes": mistakes, "notes": notes}
    print(as_json(value) if form == "json" else "\n".join(map(plain, lines)))
    return 1 if mistakes else 0


def _show(loaded: Loaded, with_origin: bool, form: str) -> None:
    rows: list[tuple[str, ...]] = []
    sections: dict[str, dict[str, Any]] = {}
    for section, key, value, metadata in every_setting(loaded.settings):
        origin = loaded.origins.get(f"{section}.{key}", DEFAULT_ORIGIN)
        locked = _locked(f"{section}.{key}", loaded)
        rows.append((f"{section}.{key}", setting(value, metadata), *((origin, locked) if with_origin else ())))
        described = {"value": value, "origin": origin, "locked": locked}
        sections.setdefault(section, {})[key] = described if with_origin else value
    show(sections, ("SETTING", "VALUE", *(("ORIGIN", "LOCKED") if with_origin else ())), rows, as_=form)


def _locked(name: str, loaded: Loaded) -> str:
    """Where users cannot change it: "always", "in batch jobs", or nowhere."""
    lock = loaded.settings.site.lock
    always = (*ALWAYS_LOCKED, *(lock if "site.lock" in loaded.origins else ()))
    return "always" if is_locked(name, always) else "in batch jobs" if is_locked(name, lock) else ""


ROWS = f"""
# doctor +format | Check this host, and say what is missing and how to get it. Exits 1 if no machine can run.
--only {{{",".join(look.__name__ for look in CHECKS)}}} CHECK * | only this check (repeatable)
# config +format | Show the settings that are in force, or find every mistake in all settings files.
{{show,check}} @what | show: the settings in force; check: exits 1 if there are mistakes
--origin | with show: where each value comes from, and whether it is locked"""
VERBS = acts(ROWS, globals())
