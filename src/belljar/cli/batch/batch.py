"""`belljar batch ...`: what a site does with a batch system. What the system itself calls is `belljar internal`."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from belljar import batch
from belljar.batch import node as faults
from belljar.batch.install.engine import TO_DO
from belljar.batch.install.pieces import Advice, Argv, Change, OurFile, Status, Step
from belljar.batch.job.terms import one_line, one_node
from belljar.cli.parser import FORMAT, Verb, acts
from belljar.cli.render import as_json, show
from belljar.errors import BadOption, BelljarError
from belljar.jobs import complain, node, plain
from belljar.jobs.install import Asked, Site, site_for
from belljar.jobs.node import of_users, runner

if TYPE_CHECKING:
    from belljar.assembly import House


def _site(args: argparse.Namespace, house: House) -> Site:
    queue = {"queue": ",".join(args.queue)} if args.queue else {}
    variables, options = pairs(args.variable, "--variable"), {**queue, **pairs(args.set, "--set")}
    commands, anew = ":".join(args.commands), args.act == "install"
    return site_for(args.system, Asked(args.folder or "", args.prefix or "", commands, variables, options, anew), house)


def pairs(words: list[str], option: str) -> dict[str, str]:
    """KEY=VALUE each. Raises BadOption."""
    for word in words:
        if "=" not in word.lstrip("="):
            raise BadOption(f"{option} {word}: not of the form KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def install(args: argparse.Namespace, house: House) -> int:
    """Put everything in place, or only show what that would be."""
    site = _site(args, house)
    if args.dry_run:
        site.engine.refuse_unwanted()
        show_plan(site.engine.plan(), site.site.after(site.place), args.format)
        return 0
    if missing := site.commands.missing(site.site.needs):
        complain(f"not found: {', '.join(missing)}", f"Say where {args.system}'s commands are: --commands DIR.")
    done = site.engine.install(prefix=site.prefix, force=args.force)
    trouble = site.engine.reread() if done else []
    if args.format == "json":
        print(as_json({"done": [row_of(step) for step in done], "trouble": trouble}))
    else:
        tell_installed(done, site.engine.plan(), trouble)
    return 1 if trouble else 0


def check(args: argparse.Namespace, house: House) -> int:
    """Every finding, the bad ones with a remedy; exit 1 when there is one."""
    from belljar.jobs import check

    site = _site(args, house)
    found = [*check.commands(site.commands, site.place), *site.engine.check(), *check.findings(house, site.place)]
    is_good = all(one.is_good for one in found)
    if args.format == "json":
        print(as_json({"ok": is_good, "findings": found}))
        return 0 if is_good else 1
    for one in found:
        print(plain(f"{'ok ' if one.is_good else 'BAD'}  {one.what}{f': {one.detail}' if one.detail else ''}"))
        if one.remedy and not one.is_good:
            print(plain(f"     remedy: {one.remedy}"))
    return 0 if is_good else 1


def uninstall(args: argparse.Namespace, house: House) -> int:
    """Take out what install put in."""
    engine = _site(args, house).engine
    done = engine.uninstall(force=args.force)
    for line in done or ["Nothing of belljar's is installed there."]:
        print(plain(line))
    for line in engine.reread() if done else []:
        print(plain(f"not done, repeat it by hand: {line}"))
    return 0


# -- words ---------------------------------------------------------------------------------------------------------------


def row_of(step: Step) -> dict[str, Any]:
    return {
        "purpose": step.piece.purpose, "path": step.path, "state": step.status, "detail": step.detail,
        "kind": type(step.piece).__name__,
    }  # fmt: skip


def tell_installed(done: list[Step], now: list[Step], trouble: list[str]) -> None:
    rows = [(step.piece.purpose, str(step.path or ""), "done") for step in done]
    if rows:
        show(None, ("WHAT", "WHERE", "STATE"), rows, as_="table")
    else:
        print("All is in place.")
    by_hand = [f"by hand: {one.piece.purpose}: {one.piece.text}" for one in now if isinstance(one.piece, Advice)]
    again = [f"not done, repeat it by hand: {line}" for line in trouble]
    for line in "\n".join([*by_hand, *again]).splitlines():
        print(plain(line))


def show_plan(steps: list[Step], after: tuple[Argv, ...], form: str) -> None:
    """How each piece stands, and what would be changed: differences of files, commands."""
    if form == "json":
        print(as_json([{**row_of(step), **_work(step)} for step in steps]))
        return
    rows = [(step.piece.purpose, str(step.path or ""), step.status.value, step.detail) for step in steps]
    show(None, ("WHAT", "WHERE", "STATE", "DETAIL"), rows, as_="table")
    for step in steps:
        if isinstance(step.piece, Advice):
            print(f"\nby hand: {step.piece.text}")
        elif step.status is not Status.THERE:
            print("\n" + "".join(_diff(step)), end="")
            _print_commands(_commands(step))
    if any(step.status in TO_DO for step in steps):
        _print_commands(after)


def _work(step: Step) -> dict[str, Any]:
    """What is to be done, for sites that put the pieces in place by other means."""
    piece = step.piece
    whole = piece.content if isinstance(piece, OurFile) else piece.stdin if isinstance(piece, Change) else b""
    return {"diff": "".join(_diff(step)), "commands": _commands(step), "content": whole.decode(errors="replace")}


def _diff(step: Step) -> list[str]:
    if step.path is None or step.after is None:
        return []
    before, after = ((part or b"").decode(errors="replace").splitlines(True) for part in (step.before, step.after))
    lines = difflib.unified_diff(before, after, str(step.path), str(step.path))
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _commands(step: Step) -> list[Argv]:
    return [] if not isinstance(step.piece, Change) or step.status is Status.THERE else list(step.piece.do)


def _print_commands(commands: Iterable[Argv]) -> None:
    for argv in commands:
        print(f"$ {shlex.join(argv)}")


# -- the node ------------------------------------------------------------------------------------------------------------


def node_(args: argparse.Namespace, house: House) -> int:
    """Exit 1 where the system cannot be asked, or the self-check failed."""
    system = batch.load(args.system)
    name = args.node or faults.name_of(system.node_variable, os.environ, os.uname().nodename)
    try:
        one_node(name)
    except ValueError as exc:
        raise BadOption(str(exc), hint="Name one node, as its batch system does: --node NAME.") from exc
    memory = faults.Memory(node.memory_folder(house), args.system, name)
    known = node.Known(system.dialect, name, memory, runner(house, args.system, house.settings.batch.ask_timeout))
    if args.action == "close":
        if not args.reason:
            raise BadOption("close: wants a reason", hint="belljar batch node SYSTEM close 'broken disk'")
        known.close(f"{node.OUR_WORD}: {one_line(args.reason)}")
        return 0
    if args.action == "open":
        known.reopen()
        return 0
    facts, text, code = _test(known, house) if args.action == "test" else _status(known)
    if args.format == "json":
        print(as_json({"node": name, **facts}))
    else:
        print("\n".join(plain(line) for line in (f"node {name}: {text[0]}", *text[1:])))
    return code


def _status(known: node.Known) -> tuple[dict[str, object], list[str], int]:
    """What the system says and what is remembered."""
    now, right, trouble = known.memory.read(), of_users(), ""
    by_us: bool | None = None
    try:
        by_us = known.is_closed_by_us()
    except BelljarError as exc:
        trouble = exc.message
    facts: dict[str, object] = {
        "closed_by_belljar": by_us, "trouble": trouble, "faults": now.faults, "passes": now.passes, "reason": now.reason,
        "closed": bool(now.closed), "kvm_is_lost": right.is_lost, "kvm": right.text,
    }  # fmt: skip
    state = f"unknown: {trouble}" if trouble else "closed by belljar" if by_us else "not closed by belljar"
    counted = f"faults in a row: {now.faults}; passed self-checks in a row: {now.passes}"
    text = [state, counted, *([f"last reason: {now.reason}"] if now.reason else [])]
    return facts, [*text, f"kvm{' IS LOST' if right.is_lost else ''}: {right.text}"], 1 if trouble else 0


def _test(known: node.Known, house: House) -> tuple[dict[str, object], list[str], int]:
    """A small machine; exit 1: it failed."""
    done = node.test(house, known)
    end = f"{'passed' if done.passed else 'FAILED'}: {done.reason}{'; opened again' if done.opened else ''}"
    return {**vars(done)}, [end], 0 if done.passed else 1


SITE = """SYSTEM | the batch system
--folder DIR | where the system's settings are (default: its usual place)
--prefix DIR | the launchers go to DIR/libexec (default: beside belljar itself)
--commands DIR * | where the system's own commands are (default: PATH); repeatable
--variable NAME=VALUE * | a variable that these commands need; repeatable
--queue Q * | queue to change, where a system needs to know; repeatable
--set KEY=VALUE * | another option of the system; see its guide"""
ACTS = f"""
# install | put the files and settings of a system in place; to do it twice changes nothing
{SITE}
-n --dry-run | show the differences and commands, do nothing; with --format json each file whole, too
--force | also replace files of ours that were changed by hand
{FORMAT}
# check | look at every file and setting; exit 1 when something is wrong, with remedies
{SITE}
{FORMAT}
# uninstall | take out what install put in
{SITE}
--force | also remove files of ours that were changed by hand
# node | this node: in service or not, and why; test it with a small machine
SYSTEM | the batch system
{{status,close,open,test}} @action | status; close REASON; open; test: start a small machine, open a node that belljar closed after
| enough passes
REASON ? = | with close: shown by the batch system
--node NAME = | the node's name (default: this host's)
{FORMAT}"""


def _systems() -> str:
    """The parameter SYSTEM, with the names of all there are."""
    known = [batch.load(name) for name in batch.names()]
    named = ", ".join(f"{one.name} (experimental)" if one.untried else one.name for one in known)
    return f"{{{','.join(one.name for one in known)}}} SYSTEM @system | {named}"


VERBS = {
    "batch": Verb(
        "Put belljar into a batch system, so that jobs run in machines: install writes every file and setting (--dry-run only "
        "shows them), check tells what is wrong, uninstall takes all out; node looks after this node.",
        acts=acts(
            ACTS.replace("SYSTEM | the batch system", _systems()),
            {"install": install, "check": check, "uninstall": uninstall, "node": node_},
        ),
    )
}
