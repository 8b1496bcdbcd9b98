"""Man pages from the parsers that read the command line, so they say what `--help` says: belljar(1), and one page a verb."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator

from belljar import __version__
from belljar.cli import HIDDEN, VERBS, overview, parser_of

SUMMARY = "every batch job in its own fresh virtual machine"
FILES = """\
/etc/belljar/belljar.toml, /etc/belljar/conf.d/*.toml
settings of the site; `belljar config show --origin` shows all that hold
~/.config/belljar/belljar.toml
settings of a user
/var/lib/belljar, ~/.local/share/belljar
images and templates, of root and of a user
/var/log/belljar, ~/.local/share/belljar/logs
records of machines that ended"""


def pages() -> dict[str, str]:
    """File name -> page."""
    verbs = [verb for verb in VERBS if verb not in HIDDEN]
    made = {f"belljar-{verb}.1": page(verb) for verb in verbs}
    names, meanings = FILES.splitlines()[::2], FILES.splitlines()[1::2]
    return made | {
        "belljar.1": "\n".join([
            *head("belljar", SUMMARY), ".SH SYNOPSIS", ".nf", text("belljar [--config FILE] [-v] VERB ..."), ".fi",
            ".SH DESCRIPTION", *as_is(overview().partition("\n\n")[2]),
            ".SH FILES", *(line for pair in zip(names, meanings, strict=True) for line in item(*pair)),
            *see_also(verbs),
        ])
    }  # fmt: skip


def page(verb: str) -> str:
    lines = head(f"belljar-{verb}", VERBS[verb].help)
    parser = parser_of(verb)
    lines += [".SH SYNOPSIS", *usage(parser), ".SH DESCRIPTION", *said(parser), *options(parser)]
    for help, act in below(parser):
        lines += [
            f".SH {quoted(act.prog.upper())}",
            *usage(act),
            ".PP",
            *(said(act) or [text(help)]),
            *options(act, ".SS"),
        ]
    return "\n".join([*lines, *see_also([])])


def head(name: str, summary: str) -> list[str]:
    day = time.strftime("%Y-%m-%d", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    title = f'.TH {name.upper()} 1 "{day}" "belljar {__version__}" "belljar"'
    return [title, ".nh", ".ad l", ".SH NAME", f"{name} \\- {text(summary)}"]


def below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """What its acts do, and their parsers; those of theirs, too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                yield capitalized(choice.help or ""), action.choices[choice.dest]
                yield from below(action.choices[choice.dest])


def capitalized(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else words


def usage(parser: argparse.ArgumentParser) -> list[str]:
    lines = parser.format_usage().replace("usage: ", "", 1).rstrip().splitlines()
    return [".nf", *(text(line.removeprefix("       ")) for line in lines), ".fi"]


def said(parser: argparse.ArgumentParser) -> list[str]:
    """What stands above and below the options in `--help`. An indented line stays as it is."""
    lines: list[str] = []
    for part in filter(None, (parser.description, parser.epilog)):
        lines += [".PP"] if lines else []
        if "\n" in part:
            lines += as_is(part % {"prog": parser.prog} if "%(" in part else part)
        else:
            lines.append(text(part))
    return lines


def options(parser: argparse.ArgumentParser, heading: str = ".SH") -> list[str]:
    lines: list[str] = []
    formatter = parser._get_formatter()
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help not in (argparse.SUPPRESS, None)]
        shown = [
            action for action in shown if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
        ]
        if shown:
            title = {"positional arguments": "arguments"}.get(group.title or "", group.title or "options")
            lines += [f"{heading} {quoted(title.upper() if heading == '.SH' else title)}"]
        for action in shown:
            name = formatter._format_action_invocation(action)
            lines += item(re.sub(r"\x1b\[[0-9;]*m", "", name), formatter._expand_help(action))
    return lines


def item(name: str, meaning: str) -> list[str]:
    return [".TP", f".B {quoted(name)}", text(" ".join(meaning.split()))]


def see_also(verbs: list[str]) -> list[str]:
    names = [f".BR belljar\\-{verb.replace('-', chr(92) + '-')} (1)" for verb in verbs] or [".BR belljar (1)"]
    return [".SH SEE ALSO", *(f"{name}," for name in names[:-1]), names[-1], ""]


def as_is(block: str) -> list[str]:
    return [".nf", *map(text, block.strip("\n").splitlines()), ".fi"]


def quoted(words: str) -> str:
    return '"' + text(words).replace('"', "\\(dq") + '"'


def text(words: str) -> str:
    """A line that troff takes for nothing but words. `-` stays what can be typed."""
    words = words.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\`").replace("'", "\\(aq")
    return f"\\&{words}" if words[:1] in (".", "'") else words
