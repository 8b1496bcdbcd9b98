"""`belljar batch install|check|uninstall SYSTEM`."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar import batch
from belljar.batch.install import commands as client
from belljar.batch.install.engine import TO_DO, Engine
from belljar.batch.install.pieces import Advice, Change, OurFile, OurLines, Piece, Place, SiteOfSystem, Status, Step
from belljar.errors import BadOption, HostError
from belljar.jobs.client import own_prefix

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.batch.install.commands import Client

LONGEST_SHEBANG = 120  # of 127 that older kernels read
SHOWN_COLUMNS = ("WHAT", "WHERE", "STATE", "DETAIL")

LAUNCHER = """\
#!{python} -IS
# Made by `belljar batch install {system}`: {purpose}.
import sys

sys.path += {libraries!r}
sys.argv[1:1] = {words!r}
from belljar.cli import entry

entry({commands!r})
"""


def install(args: argparse.Namespace, house: House) -> int:
    """Put everything in place, or only show what that would be."""
    engine, place, site, ours = prepare(args, house)
    if args.print:
        print_all(engine.plan(), site.after(place))
        return 0
    if args.dry_run:
        show_plan(engine.plan(), site.after(place), args.format)
        return 0
    if missing := ours.missing(site.needs):
        from belljar.cli import complain

        complain(f"not found: {', '.join(missing)}", f"Say where {args.system}'s commands are: --commands DIR.")
    done = engine.install(prefix=args.prefix or "", force=args.force)
    trouble = engine.reread() if done else []
    if args.format == "json":
        from belljar.cli.render import as_json

        print(as_json({"done": [row_of(step) for step in done], "trouble": trouble}))
    else:
        tell_installed(done, engine.plan(), trouble)
    return 1 if trouble else 0


def check(args: argparse.Namespace, house: House) -> int:
    """Every finding, the bad ones with a remedy; exit 1 when there is one."""
    from belljar.cli.batch import look as batch_look
    from belljar.cli.render import as_json
    from belljar.jobs.words import plain

    engine, place, _, ours = prepare(args, house)
    found = [*batch_look.commands(ours, place), *engine.check(), *batch_look.findings(house, place)]
    is_good = all(one.is_good for one in found)
    if args.format == "json":
        print(as_json({"ok": is_good, "findings": found}))
        return 0 if is_good else 1
    for one in found:
        print(plain(f"{'ok ' if one.is_good else 'BAD'}  {one.what}{f': {one.detail}' if one.detail else ''}"))
        if not one.is_good and one.remedy:
            print(plain(f"     remedy: {one.remedy}"))
    return 0 if is_good else 1


def uninstall(args: argparse.Namespace, house: House) -> int:
    """Take out what install put in."""
    from belljar.jobs.words import plain

    engine, _, _, _ = prepare(args, house)
    done = engine.uninstall(force=args.force)
    for line in done or ["Nothing of belljar's is installed there."]:
        print(plain(line))
    for line in engine.reread() if done else []:
        print(plain(f"not done, repeat it by hand: {line}"))
    return 0


# -- the place -----------------------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace, house: House) -> tuple[Engine, Place, SiteOfSystem, Client]:
    """The engine for what the command line asks; options that were given at the installation hold until others are."""
    from belljar.batch.install import record as siting_record

    system: str = args.system
    site = batch.load(system).site
    folder = Path(args.folder).absolute() if args.folder else site.needs.home(os.environ) or site.default_folder
    try:
        before = siting_record.load(siting_record.path_of(folder, system))
    except ValueError as exc:
        raise BadOption(str(exc), hint="Repair or remove that file.") from exc
    options = {**before.options, **options_of(args)}
    prefixes = [Path(one).absolute() for one in (args.prefix, before.prefix) if one] or [own_prefix()]
    args.prefix, prefix = args.prefix or before.prefix, prefixes[0]
    ours = client_for(args, site, folder, prefixes)
    settings = house.settings
    timeout = settings.batch.ask_timeout

    def execute(argv: tuple[str, ...], stdin: bytes) -> bytes:
        return ours.run(argv, timeout, stdin)

    place = Place(
        settings=settings.batch, wrapper=prefix / "libexec" / f"wrap-{system}", belljar=prefix / "libexec" / f"belljar-{system}",
        store=settings.paths.site_store or settings.paths.store, folder=folder, options=options,
        node=settings.paths.node, run=lambda argv: execute(argv, b""),
    )  # fmt: skip
    own = functools.partial(launchers, ours, config_file=house.config_file)
    return Engine(system, site, place, own, execute), place, site, ours


def client_for(args: argparse.Namespace, site: SiteOfSystem, folder: Path, prefixes: list[Path]) -> Client:
    """The system's commands: those of the installation, which `install` looks for anew. Raises BadOption."""
    system: str = args.system
    listed = [client.path_of(prefix / "libexec/belljar", system) for prefix in prefixes]
    known = next((one for path in listed if (one := client.read(path, system))), None)
    if known is not None and args.act != "install":
        return known
    return client.find(
        system, site.needs, folder, os.environ, folders=":".join(args.commands), named=pairs(args.variable, "--variable"),
        known=known,
    )  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, str]:
    """`--queue` and `--set` as one mapping."""
    options = {"queue": ",".join(args.queue)} if args.queue else {}
    return {**options, **pairs(args.set, "--set")}


def pairs(words: list[str], option: str) -> dict[str, str]:
    """KEY=VALUE each. Raises BadOption."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise BadOption(f"{option} {word}: not of the form KEY=VALUE")
        found[key] = value
    return found


def launchers(ours: Client, place: Place, config_file: Path | None) -> list[Piece]:
    """The executables that systems and hooks start: one word each, whatever their environment says; and what they know
    of the system's commands."""
    config = ["--config", str(config_file.absolute())] if config_file else []
    system = ours.system
    # Where the redirect says nothing to us, all that follows is the job's, dashes or not.
    wrap = [*config, "internal", "wrap", system, *(["--"] if batch.load(system).ends_words else [])]
    return [
        OurFile("the system's commands", client.path_of(place.wrapper, system), ours.as_json()),
        _launcher(system, "belljar for hooks, with this site's settings", place.belljar, config),
        _launcher(system, "what the system starts in place of a job", place.wrapper, wrap),
    ]


def _launcher(system: str, purpose: str, path: Path, words: list[str]) -> OurFile:
    python = sys.executable
    if len(python) > LONGEST_SHEBANG or any(char.isspace() for char in python):
        raise HostError(f"{python}: a path that a `#!` line cannot hold", hint="Install belljar with another Python.")
    listed = os.fspath(client.path_of(path, system))
    text = LAUNCHER.format(
        python=python, system=system, purpose=purpose, libraries=_libraries(), words=words, commands=listed
    )
    return OurFile(purpose, path, text.encode(), 0o755)


def _libraries() -> list[str]:
    """Where this belljar is, and what it needs: in one folder where it was installed, in two where it runs in a checkout."""
    found = [Path(__file__).resolve().parents[3]]
    if (needed := importlib.util.find_spec("h11")) is not None and needed.origin is not None:
        found.append(Path(needed.origin).resolve().parents[1])
    return [os.fspath(one) for one in dict.fromkeys(found)]


# -- words ---------------------------------------------------------------------------------------------------------------


def row_of(step: Step) -> dict[str, Any]:
    return {
        "purpose": step.piece.purpose, "path": step.path, "state": step.status, "detail": step.detail,
        "kind": type(step.piece).__name__,
    }  # fmt: skip


def tell_installed(done: list[Step], now: list[Step], trouble: list[str]) -> None:
    from belljar.cli.render import show
    from belljar.jobs.words import plain

    rows = [(step.piece.purpose, str(step.path or ""), outcome_of(step)) for step in done]
    if rows:
        show(None, ("WHAT", "WHERE", "STATE"), rows, as_="table")
    else:
        print("All is in place.")
    for step in now:
        if step.status is Status.ADVICE:
            for line in f"by hand: {step.piece.purpose}: {getattr(step.piece, 'text', '')}".splitlines():
                print(plain(line))
    for line in trouble:
        print(plain(f"not done, repeat it by hand: {line}"))


def outcome_of(step: Step) -> str:
    """What was done to a piece."""
    if step.status is not Status.LEFTOVER:
        return "done"
    return step.detail or "taken out"


def show_plan(steps: list[Step], after: tuple[tuple[str, ...], ...], form: str) -> None:
    """How each piece stands, and what would be changed: differences of files, commands."""
    from belljar.cli.render import as_json, show

    if form == "json":
        print(as_json([{**row_of(step), "diff": "".join(_diff(step)), "commands": _commands(step)} for step in steps]))
        return
    rows = [(step.piece.purpose, str(step.path or ""), step.status.value, step.detail) for step in steps]
    show(None, SHOWN_COLUMNS, rows, as_="table")
    for step in steps:
        if step.status is Status.ADVICE:
            print(f"\nby hand: {getattr(step.piece, 'text', '')}")
        elif step.status is not Status.THERE:
            print("\n" + "".join(_diff(step)), end="")
            for argv in _commands(step):
                print(_shell(argv))
    if any(step.status in (*TO_DO, Status.LEFTOVER) for step in steps):
        for argv in after:
            print(_shell(argv))


def print_all(steps: list[Step], after: tuple[tuple[str, ...], ...]) -> None:
    """Every file whole and every command, for whoever puts them in place by other means."""
    for step in steps:
        piece = step.piece
        if step.status is Status.LEFTOVER:
            continue
        print(f"== {piece.purpose}")
        if isinstance(piece, OurFile):
            print(f"-- {piece.path} (mode {piece.mode:04o})")
            print(piece.content.decode(errors="replace"))
        elif isinstance(piece, OurLines):
            from belljar.batch.install.files import block

            print(f"-- lines in {piece.path}")
            print(block(piece.lines, piece.comment).decode())
        elif isinstance(piece, Change):
            print("-- commands")
            for argv in piece.do:
                print(_shell(argv))
            if piece.stdin:
                print(f"-- their standard input\n{piece.stdin.decode(errors='replace')}")
            print()
        elif isinstance(piece, Advice):
            print(f"-- by hand\n{piece.text}\n")
        else:
            print(f"-- {step.detail}\n")
    if after:
        print("== have it read again")
        for argv in after:
            print(_shell(argv))


def _diff(step: Step) -> list[str]:
    import difflib

    if step.path is None or step.after is None:
        return []
    before, after = ((part or b"").decode(errors="replace").splitlines(True) for part in (step.before, step.after))
    lines = difflib.unified_diff(before, after, str(step.path), str(step.path))
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _commands(step: Step) -> list[tuple[str, ...]]:
    if not isinstance(step.piece, Change) or step.status is Status.THERE:
        return []
    return list(step.piece.undo if step.status is Status.LEFTOVER else step.piece.do)


def _shell(argv: tuple[str, ...]) -> str:
    import shlex

    return f"$ {shlex.join(argv)}"
