"""`belljar completion SHELL`: a completion script, made from the very parsers that will read the words."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import acts_of

if TYPE_CHECKING:
    from belljar.assembly import House

HELP = (
    "Print a completion script. bash: `belljar completion bash > /etc/bash_completion.d/belljar`; "
    "zsh: into a folder of $fpath as `_belljar`; fish: into ~/.config/fish/completions/belljar.fish."
)
SHELLS = ("bash", "zsh", "fish")
WORDS = ("machines", "images")  # what the scripts ask for while somebody types
# A parameter of this name is completed with words that only the running system knows.
ASKED = {"machine": "machines", "machines": "machines", "image": "images", "images": "images"}
FILES = ("FILE", "FILE|URL", "SCRIPT", "PATH", "PATH[:DST]", "SRC[:DST][:ro|rw]", "DIR")


@dataclass(frozen=True)
class Option:
    """One option, under all its names."""

    flags: tuple[str, ...]
    help: str
    takes: bool  # a value follows
    choices: tuple[str, ...] = ()
    asks: str = ""  # one of WORDS
    files: bool = False


@dataclass(frozen=True)
class Verb:
    """A verb, or one of its subcommands (`image list`), with what may follow it."""

    path: tuple[str, ...]
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()  # subcommands, or the choices of its first parameter
    asks: str = ""
    files: bool = False


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="{bash,zsh,fish}", choices=(*SHELLS, *WORDS), help="the shell to make it for")


def run(args: argparse.Namespace, house: House) -> int:
    if args.shell in WORDS:
        _print_words(args.shell, house)
    else:
        print({"bash": bash, "zsh": zsh, "fish": fish}[args.shell](tuple(all_verbs())))
    return 0


def _print_words(kind: str, house: House) -> None:
    """What exists just now, a word a line. A broken house has nothing to offer: completion is silent."""
    from belljar.errors import BelljarError

    try:
        if kind == "machines":
            words = [
                word
                for one in sorted(house.machines.list(ended=False), key=lambda it: it.id)
                for word in (one.id, one.name)
                if word
            ]
        else:
            words = [name for image in house.images.images() for name in image.names]
    except (BelljarError, OSError):
        return
    for word in words:
        if word.isprintable() and " " not in word:
            print(word)


def all_verbs() -> Iterator[Verb]:
    """Every verb and subcommand, read from the parsers."""
    from belljar.cli import VERBS, parser_of

    for name, (_, help) in VERBS.items():
        yield from _read(parser_of(name), (name,), help)


def _read(parser: argparse.ArgumentParser, path: tuple[str, ...], help: str) -> Iterator[Verb]:
    options: list[Option] = []
    words: tuple[str, ...] = ()
    asks, files, below = "", False, acts_of(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words = tuple(below)
        elif action.option_strings and action.help != argparse.SUPPRESS:
            options.append(_option(action))
        elif not action.option_strings and not (words or asks or files):
            words = tuple(map(str, SHELLS if path == ("completion",) else action.choices or ()))
            asks, files = _of(action)
    yield Verb(path, help, tuple(options), words, asks, files)
    for name, child in below.items():
        yield from _read(child, (*path, name), child.description or "")


def _option(action: argparse.Action) -> Option:
    asks, files = _of(action)
    text = (action.help or "").replace("%%", "%")
    choices = tuple(map(str, action.choices or ()))
    return Option(tuple(action.option_strings), text, action.nargs != 0, choices, asks, files)


def _of(action: argparse.Action) -> tuple[str, bool]:
    """What completes this parameter: words to ask for, or files."""
    name = str(action.metavar or action.dest)
    return ASKED.get(action.dest, ""), name in FILES or name.startswith(("SCRIPT", "CMD"))


def bash(verbs: Sequence[Verb]) -> str:
    """One function with a table of verbs; options that take a value are tables of their own."""
    cases, values = [], []
    for verb in verbs:
        key = " ".join(verb.path)
        flags = " ".join(flag for option in verb.options for flag in option.flags)
        first = _bash_words(verb.words, verb.asks, verb.files)
        cases.append(f"    {shlex.quote(key)}) flags={shlex.quote(flags)}; {first} ;;")
        for option in verb.options:
            if option.takes:
                pattern = "|".join(shlex.quote(f"{key} {flag}") for flag in option.flags)
                values.append(
                    f"    {pattern}) files=''; {_bash_words(option.choices, option.asks, option.files)}; value=1 ;;"
                )
    top = " ".join(verb.path[0] for verb in verbs if len(verb.path) == 1)
    return BASH.format(top=top, cases="\n".join(cases), values="\n".join(values), nested="|".join(_nested(verbs)))


def _bash_words(words: Sequence[str], asks: str, files: bool) -> str:
    if asks:
        return f'words="$(belljar completion {asks} 2>/dev/null)"'
    return f"words={shlex.quote(' '.join(words))}" + ("; files=1" if files else "")


def _nested(verbs: Sequence[Verb]) -> list[str]:
    """Verbs that have subcommands. A pattern that fits nothing where there are none."""
    return sorted({verb.path[0] for verb in verbs if len(verb.path) > 1}) or ["-"]


BASH = """\
# Completion of belljar for bash; made by `belljar completion bash`.
_belljar() {{
  local at=1 verb="" word flags="" words="" files="" value="" current="${{COMP_WORDS[COMP_CWORD]}}"
  COMPREPLY=()
  while (( at < COMP_CWORD )); do
    word="${{COMP_WORDS[at]}}"
    case "$word" in
      --config) (( at++ )) ;;
      -*) ;;
      *) verb="$word"; break ;;
    esac
    (( at++ ))
  done
  if [[ -z "$verb" ]]; then
    COMPREPLY=( $(compgen -W "{top} --config --verbose --version --help" -- "$current") )
    return
  fi
  case "$verb" in
    {nested})
      word="${{COMP_WORDS[at+1]:-}}"
      if (( at + 1 < COMP_CWORD )) && [[ "$word" != -* ]]; then verb="$verb $word"; fi ;;
  esac
  for word in "${{COMP_WORDS[@]:at:COMP_CWORD-at}}"; do [[ "$word" == -- ]] && {{ COMPREPLY=( $(compgen -f -c -- "$current") ); return; }}; done
  case "$verb" in
{cases}
  esac
  case "$verb ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  if [[ "$current" == -* && -z "$value" ]]; then
    COMPREPLY=( $(compgen -W "$flags" -- "$current") )
  elif [[ -n "$files" ]]; then
    compopt -o filenames 2>/dev/null
    COMPREPLY=( $(compgen -f -- "$current") )
  else
    COMPREPLY=( $(compgen -W "$words" -- "$current") )
  fi
}}
complete -F _belljar belljar"""


def zsh(verbs: Sequence[Verb]) -> str:
    """One function a verb, in the form of `_arguments`."""
    described = "\n".join(f"    {shlex.quote(f'{verb.path[0]}:{verb.help}')}" for verb in verbs if len(verb.path) == 1)
    functions = []
    for verb in verbs:
        specs = [spec for option in verb.options for spec in _zsh_option(option)]
        specs.append(f"'1:word:{_zsh_words(verb.words, verb.asks, verb.files)}'")
        if any(other.path[:-1] == verb.path for other in verbs):
            specs.append("'*::rest:->rest'")
            after = f"\n  [[ $state == rest ]] && (( $+functions[_belljar_{verb.path[0]}_${{line[1]}}] )) && _belljar_{verb.path[0]}_${{line[1]}}"
        else:
            specs.append("'*:file:_files'")
            after = ""
        body = " \\\n    ".join(specs)
        functions.append(
            f"_belljar_{'_'.join(verb.path)}() {{\n  local line state\n  _arguments -S \\\n    {body}{after}\n}}"
        )
    return ZSH.format(described=described, functions="\n".join(functions))


def _zsh_option(option: Option) -> Iterator[str]:
    text = option.help.translate(str.maketrans("'[]:", "’() "))
    for flag in option.flags:
        value = f":value:{_zsh_words(option.choices, option.asks, option.files)}" if option.takes else ""
        yield f"'{flag}[{text}]{value}'"


def _zsh_words(words: Sequence[str], asks: str, files: bool) -> str:
    if asks:
        return f"_belljar_ask_{asks}"
    return "_files" if files else f"({' '.join(words)})"


ZSH = """\
#compdef belljar
# Completion of belljar for zsh; made by `belljar completion zsh`.
_belljar_ask_machines() {{ compadd -- ${{(f)"$(belljar completion machines 2>/dev/null)"}} }}
_belljar_ask_images() {{ compadd -- ${{(f)"$(belljar completion images 2>/dev/null)"}} }}
{functions}
_belljar() {{
  local line state verbs
  verbs=(
{described}
  )
  _arguments -C '--config[settings file]:file:_files' '--verbose[tell where an error was raised]' '--version[print the version]' \\
    '1: :->verb' '*::rest:->rest'
  case $state in
    verb) _describe verb verbs ;;
    rest) local name="_belljar_${{line[1]}}"; (( $+functions[$name] )) && $name ;;
  esac
}}
compdef _belljar belljar 2>/dev/null || _belljar "$@\""""


def fish(verbs: Sequence[Verb]) -> str:
    """One line a word and option."""
    lines = ["# Completion of belljar for fish; made by `belljar completion fish`.", "complete -c belljar -f"]
    for verb in verbs:
        if len(verb.path) == 1:
            lines.append(f"complete -c belljar -n __fish_use_subcommand -a {verb.path[0]} -d {shlex.quote(verb.help)}")
    for verb in verbs:
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in verb.path)
        begin = f"complete -c belljar -n {shlex.quote(seen)}"
        if verb.asks or verb.words:
            lines.append(f"{begin} -a {shlex.quote(_fish_words(verb.words, verb.asks))}")
        if verb.files:
            lines.append(f"{begin} -F")
        for option in verb.options:
            lines.append(" ".join((begin, *_fish_option(option))))
    return "\n".join(lines)


def _fish_option(option: Option) -> Iterator[Any]:
    for flag in option.flags:
        yield f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
    yield f"-d {shlex.quote(option.help)}"
    if option.files:
        yield "-r -F"
    elif option.takes:
        yield "-x"
        if option.choices or option.asks:
            yield f"-a {shlex.quote(_fish_words(option.choices, option.asks))}"


def _fish_words(words: Sequence[str], asks: str) -> str:
    return f"(belljar completion {asks} 2>/dev/null)" if asks else " ".join(words)
