"""Help texts as their reader sees them: examples first, and each of these is a command line that its parser takes."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from belljar import cli
from belljar.cli import HIDDEN, VERBS, overview, parser_of, split
from belljar.cli.parser import examples_of

EXAMPLES = (Path(cli.__file__).parent / "examples.txt").read_text()
DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted({*DOCS.rglob("*.md")} - {DOCS / "reference/cli.md"})
COMMANDS = re.findall(r"^belljar .*$", EXAMPLES, re.MULTILINE)

FENCE = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its acts."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for act in action.choices.values():
                yield from below(act)


@pytest.mark.parametrize("verb", [name for name in VERBS if name not in HIDDEN])
def test_help_begins_with_what_it_does_and_examples(verb: str) -> None:
    for parser in below(parser_of(verb)):
        purpose, examples, usage, *_ = parser.format_help().split("\n\n")
        assert purpose[0].isupper() and purpose.endswith("."), parser.prog
        assert examples.startswith("examples:\n  ") and parser.prog in examples, parser.prog
        assert usage.startswith("usage: belljar "), parser.prog


def test_there_is_no_example_for_what_is_not_there() -> None:
    known = {parser.prog.removeprefix("belljar ") for verb in VERBS for parser in below(parser_of(verb))}
    assert set(re.findall(r"^\[(.+)\]$", EXAMPLES, re.MULTILINE)) <= known


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_is_a_command_line_that_is_taken(command: str) -> None:
    understood(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_has_only_commands_that_are_taken(page: Path) -> None:
    for block in FENCE.findall(page.read_text()):
        for command in re.findall(r"^(?:\$ )?(belljar (?:.*\\\n)*.*)$", block, re.MULTILINE):
            understood(command.replace("\\\n", " "))


def understood(command: str) -> None:
    """As far as the shell's next sign, such as a pipe."""
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)|\d(?=>)", "", command), posix=True, punctuation_chars="<>|&;")
    lexer.whitespace_split = True
    words = list(takewhile(lambda word: not set(word) <= set("<>|&;"), lexer))
    line = split(words[1:])
    parser_of(line.verb).parse_args(line.rest)


def test_a_verb_with_many_acts_shows_a_few_of_their_examples() -> None:
    assert 3 < len(examples_of("belljar image").splitlines()) <= 6
    assert examples_of("belljar image tag") == "  belljar image tag debian12 default\n"
    assert examples_of("belljar internal") == ""


def test_the_overview_has_examples_before_its_groups() -> None:
    text = overview()
    assert text.index("examples:") < text.index("usage:") < text.index("\nRun:\n") < text.index("\nThis host:\n")
