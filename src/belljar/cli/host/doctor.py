"""`belljar doctor`: what this host offers, what it lacks, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import add_format, add_repeatable

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.cli.host.checks import Check, Finding

HELP = "Check what this host offers and explain what it lacks. Exits 1 when something is missing without which no machine runs."


def arguments(parser: argparse.ArgumentParser) -> None:
    add_repeatable(parser, "--only", "CHECK", "only this check (repeatable)")
    add_format(parser)


def run(args: argparse.Namespace, house: House) -> int:
    from belljar.cli.host.checks import CHECKS, Grade

    results = []
    for check in _chosen(CHECKS, args.only):
        finding = examine(check, house)
        results.append((check, finding))
        if args.format == "table":
            _print(check, finding)
    if args.format == "json":
        _print_json(results)
    return 1 if any(finding.grade is Grade.FAIL for _, finding in results) else 0


def examine(check: Check, house: House) -> Finding:
    """Carry out one check. One that breaks is a failed one, and the others go on."""
    from belljar.cli.host.checks import Finding, Grade
    from belljar.errors import BelljarError

    try:
        return check.look(house)
    except BelljarError as exc:
        return Finding(Grade.FAIL, exc.message, exc.hint)
    except Exception as exc:
        return Finding(
            Grade.FAIL, f"the check broke: {type(exc).__name__}: {exc}", "This is a defect of belljar or of the host."
        )


def _chosen(checks: tuple[Check, ...], only: list[str] | None) -> tuple[Check, ...]:
    from belljar.errors import BadOption

    names = [check.name for check in checks]
    if unknown := [name for name in only or () if name not in names]:
        raise BadOption(f"{unknown[0]}: no such check", hint=f"There are {', '.join(names)}.")
    return tuple(check for check in checks if not only or check.name in only)


def _print(check: Check, finding: Finding) -> None:
    from belljar.jobs.words import plain

    first, *more = finding.text.splitlines() or [""]
    print(f"{finding.grade.value:<5} {check.name:<12} {plain(first)}", flush=True)
    for line in more:
        print(f"{'':18} {plain(line)}")
    if finding.remedy:
        print(f"{'':18} -> {plain(finding.remedy)}")


def _print_json(results: list[tuple[Check, Finding]]) -> None:
    from belljar.cli.render import as_json

    print(
        as_json(
            [
                {
                    "check": check.name,
                    "meaning": check.meaning,
                    "grade": finding.grade,
                    "text": finding.text,
                    "remedy": finding.remedy,
                }
                for check, finding in results
            ]
        )
    )
