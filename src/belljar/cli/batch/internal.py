"""`belljar internal`: what batch systems call. No option of ours, and no help for people: launchers and hooks say it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from belljar import batch
from belljar.errors import CommandFailed

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.batch import Settings
    from belljar.batch.job.policy import Asker

HELP = (
    "What batch systems call. wrap: in place of a job's script. prolog, epilog: around each job, as root. hook SYSTEM NAME: a "
    "program that only this system has. ask: which jobs the system knows, as a user's job would ask it."
)
ACTS = ("wrap", "prolog", "epilog", "hook", "ask")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "belljar internal ACT SYSTEM [ARG ...]"
    parser.add_argument("act", metavar="ACT", choices=ACTS, help=", ".join(ACTS))
    parser.add_argument("system", metavar="SYSTEM", help="the batch system that calls")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARG", help="as the batch system gives them")


def run(args: argparse.Namespace, house: House) -> int:
    if args.act == "wrap":
        from belljar.jobs import wrap

        return wrap.run(args.system, args.rest, house)
    if args.act in ("prolog", "epilog"):
        from belljar.jobs import hooks

        return hooks.run(args.act, args.system, args.rest, house)
    return _ask(args.system, house) if args.act == "ask" else _hook(args.system, args.rest, house)


def _ask(system: str, house: House) -> int:
    from belljar.batch.node.orphans import ask
    from belljar.jobs.client import runner

    answer = ask(batch.load(system).dialect, runner(house, system, house.settings.batch.ask_timeout))
    if answer.living is None:
        raise CommandFailed(answer.trouble)
    print(f"it knows of {len(answer.living)} running jobs")
    return 0


def _hook(system: str, words: list[str], house: House) -> int:
    """A program of the system's own. Most of them run as a job's user: what that user has set and must not, or has set
    wrongly, is told to the job by the wrapper; here it changes nothing."""
    from belljar.batch.system import Call
    from belljar.jobs.client import client_of

    name, *rest = words or [""]
    hook = batch.load(system).hook(name)

    def settings() -> Settings:
        go_by_the_site(house)
        return house.settings.batch

    return hook(
        Call(
            name, tuple(rest), os.environ, settings, _asker,
            client=lambda: client_of(house, system), images=lambda: _known_images(house),
        )
    )  # fmt: skip


def _asker() -> Asker:
    from belljar.batch.job.policy import Asker
    from belljar.host.caller import caller

    account = caller()
    return Asker(account.name, {account.group, *(group for _, group in account.groups)})


def _known_images(house: House) -> list[str] | None:
    """The names of the site's images; None where its store cannot be seen from here (a submit host)."""
    paths = house.settings.paths
    try:
        return os.listdir((paths.site_store or paths.store) / "images/names")
    except OSError:
        return None


def go_by_the_site(house: House) -> None:
    """A user's own mistakes in the settings are left out."""
    from belljar.config import BadSettings

    try:
        house.settings  # noqa: B018 - to see whether they can be had
    except BadSettings as exc:
        if all(one.is_users for one in exc.mistakes):
            house.be_lenient()
