"""`belljar batch ...`: what a site does with a batch system (install, check, uninstall, node), and what the system's own
hooks call (prolog, epilog, method, jsv, hook). Each act is a module of its own, imported when it is wanted."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from belljar import batch
from belljar.cli.parser import add_format, add_repeatable
from belljar.errors import BadOption, BelljarError, CommandFailed

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Put belljar into a batch system, so that jobs run in machines: install writes every file and setting (--dry-run and "
    "--print only show them), check tells what is wrong, uninstall takes all out; node looks after this node, ask asks the "
    "system. The other acts are called by the systems' own hooks."
)


def arguments(parser: argparse.ArgumentParser) -> None:
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    _site_acts(acts)
    _node_acts(acts)
    for act, help in (
        ("prolog", "before each job, as root: make the user's folder of this node"),
        ("epilog", "after each job, as root: end its machines that still live, count the node's faults"),
    ):
        hook = acts.add_parser(act, help=help)
        hook.add_argument("system", metavar="SYSTEM", help=batch.NAMED)
        hook.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARG", help="as the batch system gives them")
    ask = acts.add_parser(
        "ask", help="what a job's node asks the system: which jobs it knows; `check` calls it as a user"
    )
    _system(ask)
    method = acts.add_parser(
        "method", help="suspend, resume or terminate a job, where the system calls a program for it"
    )
    _named(method)
    jsv = acts.add_parser("jsv", help="verify jobs at submit, over standard input and output")
    _system(jsv)
    jsv.add_argument("--per-slot", default="", metavar="NAMES", help="complexes that this site counts for each slot")
    hook = acts.add_parser("hook", help="any other hook of a system")
    _named(hook)


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
    parser.add_argument("system", metavar="SYSTEM", choices=batch.SYSTEMS, help=batch.NAMED)


def _named(parser: argparse.ArgumentParser) -> None:
    _system(parser)
    parser.add_argument("name", metavar="NAME", help="of the method or hook")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARG", help="as the batch system gives them")


def run(args: argparse.Namespace, house: House) -> int:
    if args.act in ("install", "check", "uninstall"):
        from belljar.cli.batch import site as batch_site

        return {"install": batch_site.install, "check": batch_site.check, "uninstall": batch_site.uninstall}[args.act](
            args, house
        )
    if args.act in ("prolog", "epilog"):
        from belljar.cli.batch import hooks as batch_hooks

        return batch_hooks.run(args.act, args.system, args.rest, house)
    if args.act == "ask":
        return _ask(args, house)
    if args.act == "node":
        from belljar.cli.batch import node as batch_node

        return batch_node.run(args, house)
    return _of_system(args, house)


def _ask(args: argparse.Namespace, house: House) -> int:
    from belljar.batch.node.orphans import ask
    from belljar.cli.batch.client import runner

    answer = ask(batch.load(args.system), runner(house, args.system, house.settings.batch.ask_timeout))
    if answer.living is None:
        raise CommandFailed(answer.trouble)
    print(f"it knows of {len(answer.living)} running jobs")
    return 0


def _of_system(args: argparse.Namespace, house: House) -> int:
    """A hook that only this system has: its module's `run`."""
    from importlib import import_module
    from importlib.util import find_spec

    part = {"method": "methods", "jsv": "jsv", "hook": "hooks"}[args.act]
    name = f"belljar.batch.{batch.FOLDERS[args.system]}.{part}"
    if find_spec(name) is None:
        raise BadOption(
            f"{args.system}: has no {args.act}", hint="`belljar batch install` tells which hooks a system uses."
        )
    module = import_module(name)
    go_by_the_site(house)
    if args.act == "jsv":
        return int(module.run(house.settings, lambda: _known_images(house), args.per_slot))
    if args.act == "method":
        return int(module.run(args.name, tuple(args.rest), _settings_or_none(house)))
    if not hasattr(module, "run_for"):
        from belljar.cli.batch.client import client_of

        return int(module.run(args.name, tuple(args.rest), client_of(house, args.system)))
    from belljar.batch.job.policy import Asker
    from belljar.cli.machine.request import account_of

    account = account_of(None)
    asker = Asker(account.name, {account.group, *(group for _, group in account.groups)})
    return int(module.run_for(asker, args.name, tuple(args.rest), house.settings.batch, os.environ))


def _known_images(house: House) -> list[str] | None:
    """The names of the site's images; None where its store cannot be seen from here (a submit host)."""
    paths = house.settings.paths
    try:
        return os.listdir((paths.site_store or paths.store) / "images/names")
    except OSError:
        return None


def go_by_the_site(house: House) -> None:
    """Most of these run as a job's user. What that user has set and must not, or has set wrongly, is told to the job by
    `belljar wrap`; here it changes nothing."""
    from belljar.config import BadSettings

    try:
        house.settings  # noqa: B018 - to see whether they can be had
    except BadSettings as exc:
        if all(one.is_users for one in exc.mistakes):
            house.be_lenient()


def _settings_or_none(house: House) -> object:
    """A job is ended also where a mistake in the settings keeps it from being begun."""
    try:
        return house.settings
    except BelljarError:
        return None
