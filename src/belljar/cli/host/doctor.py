"""`belljar doctor`: what this host offers, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, Verb
from belljar.cli.render import as_json
from belljar.config import inspect
from belljar.config.reference import all_mistakes
from belljar.errors import BadOption
from belljar.jobs import plain
from belljar.jobs.doctor import CHECKS as CHECKS_OF_HOST
from belljar.jobs.doctor import Check, Finding, Grade, fail, ok

if TYPE_CHECKING:
    from belljar.assembly import House


def doctor(args: argparse.Namespace, house: House) -> int:
    results = []
    house.be_lenient()  # a mistake in the settings is the first check's; the others look at what can be understood
    for check in _chosen(CHECKS, args.only):
        finding = check.examine(house)
        results.append((check, finding))
        if args.format == "table":
            _print(check, finding)
    if args.format == "json":
        print(as_json([{"check": one.name, "meaning": one.meaning, **vars(found)} for one, found in results]))
    return 1 if any(finding.grade is Grade.FAIL for _, finding in results) else 0


def settings(house: Any) -> Finding:
    loaded = inspect(house.config_file)
    if mistakes := all_mistakes(loaded):
        return fail("\n".join(map(str, mistakes)), "Correct them; `belljar config check` looks again.")
    return ok(f"{len(loaded.origins)} set, the rest are defaults")


CHECKS = (Check("settings", "the settings files can be understood", settings), *CHECKS_OF_HOST)


def _chosen(checks: tuple[Check, ...], only: list[str] | None) -> tuple[Check, ...]:
    names = [check.name for check in checks]
    if unknown := [name for name in only or () if name not in names]:
        raise BadOption(f"{unknown[0]}: no such check", hint=f"There are {', '.join(names)}.")
    return tuple(check for check in checks if not only or check.name in only)


def _print(check: Check, finding: Finding) -> None:
    first, *more = finding.text.splitlines() or [""]
    print(f"{finding.grade.value:<5} {check.name:<12} {plain(first)}", flush=True)
    for line in more:
        print(f"{'':18} {plain(line)}")
    if finding.remedy:
        print(f"{'':18} -> {plain(finding.remedy)}")


VERBS = {
    "doctor": Verb(
        "Check what this host offers and explain what it lacks. Exits 1 when something is missing without which no machine runs.",
        doctor,
        f"""
        --only CHECK * | only this check (repeatable)
        {FORMAT}""",
    ),
}
