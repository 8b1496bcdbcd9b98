"""`belljar completion SHELL`: a script that asks `belljar completion words WORD...` what may stand in place of the last
word.

The parsers that read the words give the answer, one word a line. An empty line means: any file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from belljar.cli.parser import Verb, acts_of
from belljar.errors import BadOption, BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House

WORDS = "words"  # what the scripts ask for while somebody types
# A parameter of this name is completed with words that only the running system knows.
ASKED = {"machine": "machines", "machines": "machines", "image": "images", "images": "images"}
FILES = ("FILE", "FILE|URL", "SCRIPT", "PATH", "PATH[:DST]", "SRC[:DST][:ro|rw]", "DIR", "CMD")
GLOBAL = ("--config", "--verbose", "--version", "--help")

BASH = """\
# Completion of belljar for bash and zsh; made by `belljar completion`.
_belljar() {
  local line current="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=()
  while IFS= read -r line; do
    if [[ -z "$line" ]]; then
      compopt -o filenames 2>/dev/null
      while IFS= read -r line; do COMPREPLY+=( "$line" ); done < <(compgen -f -- "$current")
    else
      COMPREPLY+=( "$line" )
    fi
  done < <(belljar completion words "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null)
}
complete -F _belljar belljar"""
ZSH = "autoload -U compinit bashcompinit; (( $+functions[compdef] )) || compinit; bashcompinit"
FISH = """\
function __belljar
    for word in (belljar completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
        test -n "$word" && echo $word || __fish_complete_path (commandline -ct)
    end
end
complete -c belljar -f -a '(__belljar)'"""
SCRIPTS = {"bash": BASH, "zsh": f"{ZSH}\n{BASH}", "fish": FISH}


def completion(args: argparse.Namespace, house: House) -> int:
    if args.shell != WORDS:
        print(SCRIPTS[args.shell])
        return 0
    current = args.rest[-1] if args.rest else ""
    for word in offered(args.rest[:-1], current, house):
        if not word or (word.startswith(current) and word.isprintable() and " " not in word):
            print(word)
    return 0


def offered(before: Sequence[str], current: str, house: House) -> Iterable[str]:
    """All words that may follow these; "" where it may be a file."""
    from belljar.cli import HIDDEN, VERBS, parser_of, split

    try:
        line = split(before)
        if not line.verb:
            return () if line.wants else (*(VERBS.keys() - HIDDEN), *GLOBAL)
        parser, waiting, number = parser_of(line.verb), None, 0
    except BadOption:  # an option before the verb waits for its value, or there is no such verb
        return ("",) if list(before[-1:]) == ["--config"] else ()
    for word in line.rest:
        if word == "--":
            return ("",)
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            option = parser._option_string_actions.get(word)
            waiting = option if option is not None and option.nargs != 0 else None
        elif word in acts_of(parser):
            parser, number = acts_of(parser)[word], 0
        else:
            number += 1
    if waiting is not None:
        return _values(waiting, house)
    if current.startswith("-"):
        options = (one for one in parser._get_optional_actions() if one.help != argparse.SUPPRESS)
        return [flag for one in options for flag in one.option_strings]
    parameters = parser._get_positional_actions()
    return _values(parameters[min(number, len(parameters) - 1)], house) if parameters else ()


def _values(action: argparse.Action, house: House) -> Iterable[str]:
    """What may stand for this parameter, or behind this option. A broken house has nothing to offer: completion is silent."""
    if action.choices:
        return [word for word in action.choices if word != WORDS]
    if asked := ASKED.get(action.dest):
        with suppress(BelljarError, OSError):
            return _machines(house) if asked == "machines" else _images(house)
    is_file = str(action.metavar or action.dest).removeprefix("-- ").startswith(FILES)
    return ("",) if is_file else ()


def _machines(house: House) -> list[str]:
    there = sorted(house.machines.list(ended=False), key=lambda one: one.id)
    return [word for one in there for word in (one.id, one.name) if word]


def _images(house: House) -> list[str]:
    return [name for image in house.images.images() for name in image.names]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="{bash,zsh,fish}", choices=(*SCRIPTS, WORDS), help="the shell to make it for")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


VERBS = {
    "completion": Verb(
        "Print a completion script: `belljar completion bash > /etc/bash_completion.d/belljar`; for zsh, "
        "`source <(belljar completion zsh)` in ~/.zshrc; `belljar completion fish > ~/.config/fish/completions/belljar.fish`.",
        completion,
        _arguments,
    )
}
