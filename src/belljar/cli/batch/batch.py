"""`belljar batch ...`: what a site does with a batch system. What the system itself calls is `belljar internal`."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import TYPE_CHECKING

from belljar import batch
from belljar.cli.parser import add_format, add_repeatable

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Put belljar into a batch system, so that jobs run in machines: install writes every file and setting (--dry-run and "
    "--print only show them), check tells what is wrong, uninstall takes all out; node looks after this node."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    _site_acts(acts)
    _node_acts(acts)


def _site_acts(acts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    install = acts.add_parser("install", help="put the files and settings of a system in place; twice is as once")
    check = acts.add_parser(
        "check", help="look at every file and setting; exit 1 when something is wrong, with remedies"
    )
    uninstall = acts.add_parser("uninstall", help="take out what install put in")
    for one in (install, check, uninstall):
        _system(one)
        one.add_argument("--folder", metavar="DIR", help="where the system's settings are (default: its usual place)")
        one.add_argument(
            "--prefix", metavar="DIR", help="the launchers go to DIR/libexec (default: beside belljar itself)"
        )
        add_repeatable(one, "--commands", "DIR", "where the system's own commands are (default: PATH); repeatable")
        add_repeatable(one, "--variable", "NAME=VALUE", "a variable that these commands need; repeatable")
        add_repeatable(one, "--queue", "Q", "queue to change, where a system needs to know; repeatable")
        add_repeatable(one, "--set", "KEY=VALUE", "another option of the system; see its guide")
    install.add_argument("-n", "--dry-run", action="store_true", help="show the differences and commands, do nothing")
    install.add_argument("--print", action="store_true", help="print every file whole and every command, do nothing")
    install.add_argument("--force", action="store_true", help="also replace files of ours that were changed by hand")
    uninstall.add_argument("--force", action="store_true", help="also remove files of ours that were changed by hand")
    add_format(install)
    add_format(check)


def _node_acts(acts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    node = acts.add_parser("node", help="this node: in service or not, and why; test it with a small machine")
    _system(node)
    node.add_argument(
        "what",
        choices=("status", "close", "open", "test"),
        help="status; close REASON; open; test: start a small machine, open a node that belljar closed after enough passes",
    )
    node.add_argument("reason", nargs="?", default="", metavar="REASON", help="with close: shown by the batch system")
    node.add_argument("--node", default="", metavar="NAME", help="the node's name (default: this host's)")
    add_format(node)


def _system(parser: argparse.ArgumentParser) -> None:
    known = [batch.load(name) for name in batch.names()]
    named = ", ".join(f"{one.name} (experimental)" if one.untried else one.name for one in known)
    parser.add_argument("system", metavar="SYSTEM", choices=[one.name for one in known], help=named)


def run(args: argparse.Namespace, house: House) -> int:
    if args.act == "node":
        from belljar.cli.batch import node

        return node.run(args, house)
    return int(getattr(import_module("belljar.cli.batch.site"), args.act)(args, house))
