"""`belljar batch ...`: what a site does with a batch system. What the system itself calls is `belljar internal`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from itertools import chain

from belljar import batch
from belljar.assembly import Runtime
from belljar.batch import node as faults
from belljar.batch.install.commands import Client
from belljar.batch.install.engine import TO_DO, Installation
from belljar.batch.install.pieces import Advice, Argv, Change, OurFile, OurFolder, OurLines, Piece, Step, mode_of
from belljar.batch.job.terms import one_line
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import as_json, show, show_findings
from belljar.errors import BadOption, BelljarError
from belljar.jobs import complain, node, plain
from belljar.jobs.site import check as checks
from belljar.jobs.site.doctor import of_users
from belljar.jobs.site.install import installation


def _site(args: Args, runtime: Runtime) -> tuple[Installation, Client]:
    queue = {"queue": ",".join(args.queue)} if args.queue else {}
    return installation(
        args.system, runtime, prefix=str(args.prefix or ""), folder=str(args.folder or ""), bins=":".join(map(str, args.commands)),
        variables=pairs(args.variable, "--variable"), options={**queue, **pairs(args.set, "--set")}, anew=args.act == "install",
    )  # fmt: skip


def pairs(words: list[str], option: str) -> dict[str, str]:
    """KEY=VALUE each. Raises BadOption."""
    for word in words:
        if "=" not in word.lstrip("="):
            raise BadOption(f"{option} {word}: not of the form KEY=VALUE")
    return dict(word.split("=", 1) for word in words)


def install(args: Args, runtime: Runtime) -> int:
    site, commands = _site(args, runtime)
    steps, stale, after = site.plan(), site.stale(), site.site.after(site.place)
    if args.print:
        rows = [row for step in steps for row in rows_of(step.piece)]
        print(as_json([*rows, *({"command": argv} for argv in after)]))
        return 0
    is_done = not stale and not any(step.status in TO_DO for step in steps)
    if not is_done or args.dry_run:
        show_plan(steps, stale, () if is_done else after)
    if args.dry_run:
        return 0
    if missing := commands.missing(site.site.needs):
        complain(f"not found: {', '.join(missing)}", f"Say where {args.system}'s commands are: --commands DIR.")
    if not (is_done or args.yes) and sys.stdin.isatty():
        print("Do this? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    trouble = site.reread() if site.install() or stale else []
    print("All is in place." if is_done else "Done.")
    advice = [step.piece for step in steps if isinstance(step.piece, Advice)]
    print_lines(f"by hand: {piece.purpose}: {piece.text}" for piece in advice)
    print_lines(f"not done, repeat it by hand: {line}" for line in trouble)
    return 1 if trouble else 0


def check(args: Args, runtime: Runtime) -> int:
    """Every finding, the bad ones with a remedy; exit 1 when there is one."""
    site, commands = _site(args, runtime)
    findings = chain(checks.commands(commands, site.place), site.check(), checks.findings(runtime, site.place))
    return show_findings(findings, as_=args.format)


def uninstall(args: Args, runtime: Runtime) -> None:
    site, _ = _site(args, runtime)
    done = site.uninstall()
    print_lines(done or ["Nothing of belljar's is installed there."])
    print_lines(f"not done, repeat it by hand: {line}" for line in (site.reread() if done else []))


# -- words ---------------------------------------------------------------------------------------------------------------


def print_lines(texts: Iterable[str]) -> None:
    for line in (line for text in texts for line in text.splitlines()):
        print(plain(line))


def show_plan(steps: list[Step], stale: list[Piece], after: tuple[Argv, ...]) -> None:
    """How each piece stands, the differences of files that are there, and the commands."""
    states = [(step.piece, step.status.value, step.detail) for step in steps]
    states += [(piece, "not wanted any more", "") for piece in stale]
    rows = [(piece.purpose, str(getattr(piece, "path", "")), state, detail) for piece, state, detail in states]
    show(None, ("WHAT", "WHERE", "STATE", "DETAIL"), rows, as_="table")
    to_do = [step for step in steps if step.status in TO_DO]
    print("".join(step.diff for step in to_do), end="")
    commands = [argv for step in to_do if isinstance(step.piece, Change) for argv in step.piece.do]
    print_lines(f"$ {shlex.join(argv)}" for argv in (*commands, *after))


def rows_of(piece: Piece) -> list[dict[str, object]]:
    """A file, a block of lines or a command each, for programs."""
    match piece:
        case OurLines():
            return [{"path": piece.path, "lines": piece.block.decode()}]
        case Advice():
            return [{"by_hand": piece.text}]
        case Change():
            return [{"command": argv} for argv in piece.do]
        case OurFile():
            files = {piece.path: piece.content}
        case OurFolder():
            files = {piece.path / name: content for name, content in piece.files.items()}
        case _:
            return []
    return [{"path": path, "mode": f"{mode_of(text):04o}", "content": text.decode()} for path, text in files.items()]


# -- the node ------------------------------------------------------------------------------------------------------------


def node_(args: Args, runtime: Runtime) -> int:
    """Exit 1 where the system cannot be asked, or the self-check failed."""
    system = batch.load(args.system)
    name = args.node or faults.name_of(system.node_variable, os.environ, os.uname().nodename)
    try:
        known = node.known(runtime, system.dialect, name)
    except ValueError as exc:
        raise BadOption(str(exc), hint="Name one node, as its batch system does: --node NAME.") from exc
    if args.action == "close":
        if not args.reason:
            raise BadOption("close: wants a reason", hint="belljar batch node SYSTEM close 'broken disk'")
        known.close(f"{node.OUR_WORD}: {one_line(args.reason)}")
        return 0
    if args.action == "open":
        known.reopen()
        return 0
    fields, text, code = _test(known, runtime) if args.action == "test" else _status(known)
    if args.format == "json":
        print(as_json({"node": name, **fields}))
    else:
        print_lines((f"node {name}: {text[0]}", *text[1:]))
    return code


def _status(known: node.Known) -> tuple[dict[str, object], list[str], int]:
    """What the system says and what is remembered."""
    now, right = known.memory.read(), of_users()
    fields: dict[str, object] = {
        "closed_by_belljar": None, "trouble": "", "faults": now.faults, "passes": now.passes, "reason": now.reason,
        "closed": bool(now.closed), "kvm_is_lost": not right.is_good, "kvm": right.text,
    }  # fmt: skip
    try:
        fields["closed_by_belljar"] = is_ours = known.is_closed_by_us()
        state, code = "closed by belljar" if is_ours else "not closed by belljar", 0
    except BelljarError as exc:
        fields["trouble"], state, code = exc.message, f"unknown: {exc.message}", 1
    counted = f"faults in a row: {now.faults}; passed self-checks in a row: {now.passes}"
    text = [state, counted, *([f"last reason: {now.reason}"] if now.reason else [])]
    return fields, [*text, f"kvm{'' if right.is_good else ' IS LOST'}: {right.text}"], code


def _test(known: node.Known, runtime: Runtime) -> tuple[dict[str, object], list[str], int]:
    """A small machine; exit 1: it failed."""
    done = node.test(runtime, known)
    end = f"{'passed' if done.passed else 'FAILED'}: {done.reason}{'; opened again' if done.opened else ''}"
    return {**vars(done)}, [end], 0 if done.passed else 1


SYSTEMS = {name: f"{name} (experimental)" if batch.load(name).untried else name for name in batch.names()}
SYSTEM = f"{{{','.join(SYSTEMS)}}} SYSTEM @system | {', '.join(SYSTEMS.values())}"
SITE = f"""{SYSTEM}
--folder DIR | where the batch system's settings are (default: its usual place)
--prefix DIR | belljar's own files go to DIR/libexec/SYSTEM (default: where belljar is installed)
--commands DIR * | where the batch system's commands are (default: PATH); repeatable
--variable NAME=VALUE * | an environment variable that these commands need; repeatable
--queue Q * | a queue to change, where the system's guide says so; repeatable
--set KEY=VALUE * | an option that only this system has: see its guide; repeatable"""
ACTS = f"""
# install | show what has to change, ask, and change it; a second time changes nothing
{SITE}
-n --dry-run | only show what would be done
--print | only print every file, line and command as JSON
-y --yes | do not ask
# check +format | check every file and setting, and say how to repair what is wrong; exits 1 then
{SITE}
# uninstall | undo what install did
{SITE}
# node +format | close or open this node for jobs, test it with a small machine, or show its state
{SYSTEM}
{{status,close,open,test}} @action | what to do; test: start a small machine; opens a node that belljar closed
REASON ? = | with close: the reason that the batch system shows
--node NAME = | the node's name (default: this host's)
"""


WHAT = "Install belljar in a batch system, so that its jobs run in machines."
VERBS = {"batch": Verb(WHAT, acts=acts(ACTS, globals()))}
