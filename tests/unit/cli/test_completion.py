"""Completion scripts: made from the parsers, and understood by their shells."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.cli.host import completion
from belljar.cli.host.completion import Option, Verb
from belljar.errors import BadSetting

VERBS = (
    Verb(
        ("run",),
        "run it; it's simple",
        (
            Option(("--image",), "by name: or [digest]", True, asks="images"),
            Option(("-t", "--tty"), "a terminal", False),
            Option(("--start",), "how", True, choices=("auto", "cold")),
            Option(("--report",), "where", True, files=True),
        ),
        files=True,
    ),
    Verb(("show",), "show it", (), asks="machines"),
    Verb(("image",), "images", (), words=("list", "show")),
    Verb(
        ("image", "show"), "one image", (Option(("--format",), "how", True, choices=("table", "json")),), asks="images"
    ),
)


def complete(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers after these words, with a `belljar` that knows one machine."""
    fake = tmp_path / "belljar"
    fake.write_text('#!/bin/sh\n[ "$2" = machines ] && echo 0123456789ab\n[ "$2" = images ] && echo debian12\nexit 0\n')
    fake.chmod(0o755)
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
{completion.bash(VERBS)}
COMP_WORDS=(belljar {quoted}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_belljar; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        cwd=tmp_path,
        capture_output=True,
        timeout=30,
    )
    assert done.stderr == b"", done.stderr.decode()
    return done.stdout.decode().split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["r"], ["run"]),
        (["--config", "x", "sh"], ["show"]),
        (["run", "--i"], ["--image"]),
        (["run", "--image", ""], ["debian12"]),
        (["run", "--start", "c"], ["cold"]),
        (["show", ""], ["0123456789ab"]),
        (["image", "l"], ["list"]),
        (["image", "show", ""], ["debian12"]),
        (["image", "show", "--format", "j"], ["json"]),
        (["run", "--report", "bell"], ["belljar"]),
        (["nosuch", "x"], []),
    ],
)
def test_bash_offers_what_fits(tmp_path: Path, words: list[str], offered: list[str]) -> None:
    assert complete(tmp_path, *words) == offered


def test_the_options_are_those_of_the_parsers() -> None:
    run = next(verb for verb in completion.all_verbs() if verb.path == ("run",))
    start = next(option for option in run.options if "--start" in option.flags)
    assert start.takes and start.choices == ("auto", "clone", "cold")
    tty = next(option for option in run.options if "--tty" in option.flags)
    assert tty.flags == ("-t", "--tty") and not tty.takes


def test_zsh_and_fish_get_every_option_with_its_text() -> None:
    zsh, fish = completion.zsh(VERBS), completion.fish(VERBS)
    assert "'--image[by name  or (digest)]:value:_belljar_ask_images'" in zsh
    assert "_belljar_image_show()" in zsh
    assert "-l tty -d 'a terminal'" in fish and "-s t" in fish
    assert "-x -a 'auto cold'" in fish and "-r -F" in fish


def test_words_are_silent_when_the_settings_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        @property
        def machines(self) -> Any:
            raise BadSetting("broken")

    completion.run(SimpleNamespace(shell="machines"), Broken())  # type: ignore[arg-type]
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_words_are_ids_and_names_of_machines(call: Any, house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    house.machine("aaaaaaaaaaaa", name="mine")
    house.machine("bbbbbbbbbbbb", name="bad name")
    call("completion", "machines")
    assert capsys.readouterr().out.split() == ["aaaaaaaaaaaa", "mine", "bbbbbbbbbbbb"]
