"""`belljar completion SHELL`, by argcomplete: the parsers that read the words also say what may follow."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import NoReturn

from belljar.assembly import Runtime
from belljar.cli.parser import Args, Parser, acts
from belljar.errors import BelljarError

FILES = ("FILE", "FILE|URL", "SCRIPT", "PATH", "PATH[:DST]", "SRC[:DST][:ro|rw]", "DIR", "CMD")


def completion(args: Args, runtime: Runtime) -> None:
    from argcomplete import shellcode  # type: ignore[attr-defined]

    print(shellcode(["belljar"], shell=args.shell))


def offer() -> NoReturn:
    """Tell the shell what may follow, as argcomplete's variables ask for it, and end the process."""
    from argcomplete.finders import CompletionFinder

    from belljar.cli import HIDDEN, VERBS, verb_of

    parser = Parser(prog="belljar")
    below = parser.add_subparsers()
    for name in sorted(VERBS.keys() - HIDDEN):
        below.add_parser(name).take(verb_of(name))
    _complete(parser)
    CompletionFinder(parser, always_complete_options=False)(parser)
    raise SystemExit(1)  # not reached: the finder ends the process


def _complete(parser: argparse.ArgumentParser) -> None:
    """Say for each parameter and value what completes it, below this parser too."""
    from argcomplete.completers import FilesCompleter, SuppressCompleter

    names = {"machine": _machines, "machines": _machines, "image": _images, "images": _images}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                _complete(choice)
        elif not action.choices:
            usual = FilesCompleter() if str(action.metavar).startswith(FILES) else SuppressCompleter()
            action.completer = names.get(action.dest, usual)  # type: ignore[attr-defined]


def _runtime(parsed_args: Args) -> Runtime:
    return Runtime(getattr(parsed_args, "config_file", None), verbose=False, commands=None)


def _machines(parsed_args: Args, **_: object) -> list[str]:
    """IDs and names of the machines that run. With broken settings there is nothing to offer."""
    words: list[str] = []
    with suppress(BelljarError, OSError):
        for machine in sorted(_runtime(parsed_args).machines.list(ended=False), key=lambda machine: machine.id):
            words += [word for word in (machine.id, machine.name) if word and word.isprintable() and " " not in word]
    return words


def _images(parsed_args: Args, **_: object) -> list[str]:
    with suppress(BelljarError, OSError):
        return [name for image in _runtime(parsed_args).images.images() for name in image.names]
    return []


ROWS = """
# completion | Print a completion script for your shell; for zsh, write `source <(belljar completion zsh)` into ~/.zshrc.
{bash,zsh,fish} @shell | your shell"""
VERBS = acts(ROWS, globals(), needs_runtime=False)
