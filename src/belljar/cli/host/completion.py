"""`belljar completion SHELL`: a completion script. It asks `belljar completion words WORD...` what may stand in the place
of the last word, and that is read from the very parsers that will read the words.

An answer is a line: the word, a tab, a text about it. A line without a word means: any file.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from belljar.cli.parser import Verb, acts_of
from belljar.errors import BadOption, BelljarError

if TYPE_CHECKING:
    from belljar.assembly import House

WORDS = "words"  # what the scripts ask for while somebody types
# A parameter of this name is completed with words that only the running system knows.
ASKED = {"machine": "machines", "machines": "machines", "image": "images", "images": "images"}
FILES = ("FILE", "FILE|URL", "SCRIPT", "PATH", "PATH[:DST]", "SRC[:DST][:ro|rw]", "DIR", "CMD")
GLOBAL = {
    "--config": "settings file",
    "--verbose": "tell where an error was raised",
    "--version": "print the version",
    "--help": "show all verbs",
}

BASH = """\
# Completion of belljar for bash; made by `belljar completion bash`.
_belljar() {
  local line current="${COMP_WORDS[COMP_CWORD]}"
  COMPREPLY=()
  while IFS= read -r line; do
    if [[ "$line" == $'\\t'* ]]; then
      compopt -o filenames 2>/dev/null
      while IFS= read -r line; do COMPREPLY+=( "$line" ); done < <(compgen -f -- "$current")
    else
      COMPREPLY+=( "${line%%$'\\t'*}" )
    fi
  done < <(belljar completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _belljar belljar"""

ZSH = """\
#compdef belljar
# Completion of belljar for zsh; made by `belljar completion zsh`.
_belljar() {
  local line word text
  local -a found
  for line in "${(@f)$(belljar completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
    case "$line" in
      '') ;;
      $'\\t'*) _files ;;
      *) word=${line%%$'\\t'*} text=${line#*$'\\t'}; found+=("${word//:/\\\\:}${text:+:$text}") ;;
    esac
  done
  (( $#found )) && _describe belljar found
}
compdef _belljar belljar 2>/dev/null || _belljar "$@\""""

FISH = """\
# Completion of belljar for fish; made by `belljar completion fish`.
function __belljar_words
  set -l before (commandline -opc)
  set -l current (commandline -ct)
  set -e before[1]
  for line in (belljar completion words $before "$current" 2>/dev/null)
    if string match -q \\t'*' -- $line
      __fish_complete_path "$current"
    else
      echo $line
    end
  end
end
complete -c belljar -f -a '(__belljar_words)'"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def completion(args: argparse.Namespace, house: House) -> int:
    if args.shell != WORDS:
        print(SCRIPTS[args.shell])
        return 0
    current = args.rest[-1] if args.rest else ""
    for word, text in offered(args.rest[:-1], current, house):
        if not word or (word.startswith(current) and word.isprintable() and " " not in word):
            print(f"{word}\t{' '.join(text.split())}")
    return 0


def offered(before: Sequence[str], current: str, house: House) -> Iterator[tuple[str, str]]:
    """(word, what it is) of all that may follow these words; ("", "") where it may be a file."""
    from belljar.cli import VERBS, parser_of, split

    try:
        line = split(before)
        if not line.verb:
            verbs = {verb: known.help for verb, known in VERBS.items() if known.group}
            yield from (verbs | GLOBAL).items() if not line.wants else ()
            return
        parser, waiting, number = parser_of(line.verb), None, 0
    except BadOption:  # an option before the verb waits for its value, or there is no such verb
        yield from [("", "")] if list(before[-1:]) == ["--config"] else []
        return
    for word in line.rest:
        if word == "--":
            yield "", ""
            return
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
        yield from _values(waiting, house)
    elif current.startswith("-"):
        yield from _options(parser)
    elif parameters := parser._get_positional_actions():
        yield from _values(parameters[min(number, len(parameters) - 1)], house)


def _options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._get_optional_actions():
        if action.help != argparse.SUPPRESS:
            yield from ((flag, (action.help or "").replace("%%", "%")) for flag in action.option_strings)


def _values(action: argparse.Action, house: House) -> Iterator[tuple[str, str]]:
    """What may stand for this parameter, or behind this option. A broken house has nothing to offer: completion is silent."""
    if isinstance(action, argparse._SubParsersAction):
        yield from ((one.dest, one.help or "") for one in action._choices_actions)
    elif action.choices:
        yield from ((str(word), "") for word in action.choices if word != WORDS)
    elif asked := ASKED.get(action.dest):
        try:
            yield from _machines(house) if asked == "machines" else _images(house)
        except (BelljarError, OSError):
            return
    elif str(action.metavar or action.dest).removeprefix("-- ").startswith(FILES):
        yield "", ""


def _machines(house: House) -> list[tuple[str, str]]:
    there = sorted(house.machines.list(ended=False), key=lambda one: one.id)
    return [(word, one.image) for one in there for word in (one.id, one.name) if word]


def _images(house: House) -> list[tuple[str, str]]:
    return [(name, image.os) for image in house.images.images() for name in image.names]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="{bash,zsh,fish}", choices=(*SCRIPTS, WORDS), help="the shell to make it for")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


VERBS = {
    "completion": Verb(
        "Print a completion script. bash: `belljar completion bash > /etc/bash_completion.d/belljar`; "
        "zsh: into a folder of $fpath as `_belljar`; fish: into ~/.config/fish/completions/belljar.fish.",
        completion,
        _arguments,
    )
}
