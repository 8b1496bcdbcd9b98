"""`belljar completion SHELL`, by argcomplete: the parsers that read the words also say what may follow."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from belljar.cli.parser import Args, Parser, Verb
from belljar.errors import BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House

FILES = ("FILE", "FILE|URL", "SCRIPT", "PATH", "PATH[:DST]", "SRC[:DST][:ro|rw]", "DIR", "CMD")


def completion(args: Args, house: House) -> int:
    from argcomplete import shellcode  # type: ignore[attr-defined]

    print(shellcode(["belljar"], shell=args.shell))
    return 0


def offer() -> NoReturn:
    """Tell the shell what may follow, as argcomplete's variables ask for it, and end the process."""
    from argcomplete.completers import FilesCompleter, SuppressCompleter
    from argcomplete.finders import CompletionFinder

    from belljar.cli import HIDDEN, VERBS, verb_of

    parser = Parser(prog="belljar")
    below = parser.add_subparsers()
    for name in sorted(VERBS.keys() - HIDDEN):
        below.add_parser(name).take(verb_of(name))
    for action in _every_action(parser):
        if action.choices:
            continue
        is_file = str(action.metavar or action.dest).removeprefix("-- ").startswith(FILES)
        words = {"machine": _machines, "machines": _machines, "image": _images, "images": _images}.get(action.dest)
        action.completer = words or (FilesCompleter() if is_file else SuppressCompleter())  # type: ignore[attr-defined]
    CompletionFinder(parser, always_complete_options=False)(parser)
    raise SystemExit(1)  # not reached: the finder ends the process


def _every_action(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    below = [
        choice
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for choice in action.choices.values()
    ]
    return [*parser._actions, *(action for choice in below for action in _every_action(choice))]


def _house(parsed_args: Args) -> House:
    from belljar.assembly import House

    return House(getattr(parsed_args, "config_file", None), verbose=False, commands=None)


def _machines(parsed_args: Args, **_: object) -> list[str]:
    """IDs and names of the machines that run. With broken settings there is nothing to offer."""
    with suppress(BelljarError, OSError):
        machines = sorted(_house(parsed_args).machines.list(ended=False), key=lambda machine: machine.id)
        return [
            word
            for machine in machines
            for word in (machine.id, machine.name)
            if word and word.isprintable() and " " not in word
        ]
    return []


def _images(parsed_args: Args, **_: object) -> list[str]:
    with suppress(BelljarError, OSError):
        return [name for image in _house(parsed_args).images.images() for name in image.names]
    return []


VERBS = {
    "completion": Verb(
        "Print a completion script: `belljar completion bash > /etc/bash_completion.d/belljar`; for zsh, "
        "`source <(belljar completion zsh)` in ~/.zshrc; `belljar completion fish > ~/.config/fish/completions/belljar.fish`.",
        completion,
        "{bash,zsh,fish} @shell | the shell to make it for",
        needs_house=False,
    )
}
