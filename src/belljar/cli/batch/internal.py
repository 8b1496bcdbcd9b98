"""`belljar internal`: what batch systems and programs call. No help for people: launchers, hooks and programs say it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from belljar.cli.parser import Parser, Verb, add

if TYPE_CHECKING:
    from belljar.assembly import House

ACTS = ("wrap", "prolog", "epilog", "hook", "ask", "keep")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("act", metavar="ACT", choices=ACTS, help=", ".join(ACTS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARG", help="the system's name, and what it gives")


def internal(args: argparse.Namespace, house: House) -> int:
    if args.act == "keep":
        return _keep(args.rest, house)
    system, *words = args.rest or [""]
    if args.act == "wrap":
        from belljar.jobs import wrap

        return wrap.run(system, words, house)
    from belljar.jobs import hooks

    if args.act == "hook":
        return hooks.own(system, words, house)
    if args.act == "ask":
        print(f"it knows of {hooks.ask(system, house)} running jobs")
        return 0
    return hooks.run(args.act, system, words, house)


def _keep(words: list[str], house: House) -> int:
    from belljar.cli.machine import keep

    parser = Parser(prog="belljar internal keep", description=keep.HELP)
    add(parser, keep.OPTIONS)
    return keep.run(parser.parse_args(words), house)


VERBS = {
    "internal": Verb(
        "What batch systems and programs call. wrap SYSTEM: in place of a job's script. prolog SYSTEM, epilog SYSTEM: around each "
        "job, as root. hook SYSTEM NAME: a program that only this system has. ask SYSTEM: which jobs the system knows, as a user's "
        "job would ask it. keep: keep the machine whose request is on standard input.",
        internal,
        _options,
        usage="belljar internal ACT [SYSTEM] [ARG ...]",
    )
}
