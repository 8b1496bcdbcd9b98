"""Completion: what may follow is read from the parsers, and the scripts hand it to bash, zsh and fish."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.cli.host import completion
from belljar.errors import BadSetting

FILE = ""


class Broken:
    @property
    def machines(self) -> Any:
        raise BadSetting("broken")


def offered(*words: str) -> set[str]:
    house: Any = SimpleNamespace(
        machines=SimpleNamespace(
            list=lambda ended: [SimpleNamespace(id="0123456789ab", name="mine", image="debian12")]
        ),
        images=SimpleNamespace(images=lambda: [SimpleNamespace(names=("debian12", "deb"), os="Debian 12")]),
    )
    return set(completion.offered(words[:-1], words[-1], house))


@pytest.mark.parametrize(
    ("words", "is_offered"),
    [
        ([""], "run"),
        (["--config", "x", ""], "--verbose"),
        (["--config", ""], FILE),
        (["run", "--image", ""], "debian12"),
        (["run", "--start", ""], "cold"),
        (["run", "--report", ""], FILE),
        (["run", "-t", ""], FILE),
        (["run", "--start", "cold", "--", "ls", ""], FILE),
        (["show", ""], "0123456789ab"),
        (["stop", "mine", ""], "mine"),
        (["image", ""], "list"),
        (["image", "show", ""], "deb"),
        (["image", "show", "--format", ""], "json"),
        (["batch", "install", ""], "slurm"),
        (["completion", ""], "bash"),
    ],
)  # fmt: skip
def test_what_may_follow_is_offered(words: list[str], is_offered: str) -> None:
    assert is_offered in offered(*words)


def test_options_are_those_of_the_parsers() -> None:
    found = offered("run", "--st")
    assert {"-t", "--tty", "--help", "--start"} <= found
    assert "--config" not in found and "words" not in offered("completion", "")


@pytest.mark.parametrize("words", [["nosuch", "x"], ["--nosuch", "x"], ["--help", ""], ["doctor", ""]])
def test_where_nothing_may_follow_nothing_is_offered(words: list[str]) -> None:
    assert offered(*words) == set()


def test_it_is_silent_when_the_settings_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    completion.completion(SimpleNamespace(shell="words", rest=["show", ""]), Broken())  # type: ignore[arg-type]
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_words_are_ids_and_names_of_machines(call: Any, house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    house.machine("aaaaaaaaaaaa", name="mine")
    house.machine("bbbbbbbbbbbb", name="bad name")
    call("completion", "words", "show", "")
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["aaaaaaaaaaaa", "mine", "bbbbbbbbbbbb"]
    call("completion", "words", "show", "m")
    assert capsys.readouterr().out == "mine\n"


@pytest.fixture
def with_belljar(tmp_path: Path) -> dict[str, str]:
    """An environment whose `belljar` knows an option, and a file where `--report` is to be completed."""
    fake = tmp_path / "belljar"
    fake.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$*" in\n'
        '  "completion words run --report "*) echo ;;\n'
        '  "completion words run "*) echo --image ;;\nesac\n'
    )
    fake.chmod(0o755)
    return {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}


def said(argv: list[str], env: dict[str, str]) -> list[str]:
    done = subprocess.run(argv, env=env, cwd=env["HOME"], capture_output=True, timeout=60, check=False)
    assert done.stderr == b"", done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.parametrize(("words", "shown"), [("run --im", ["--image"]), ("run --report bell", ["belljar"])])
def test_bash_offers_what_it_is_told(with_belljar: dict[str, str], words: str, shown: list[str]) -> None:
    script = f"{completion.BASH}\nCOMP_WORDS=(belljar {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))\n"
    script += "_belljar; printf '%s\\n' \"${COMPREPLY[@]}\""
    assert said(["bash", "--norc", "-c", script], with_belljar) == shown


@pytest.mark.parametrize(
    ("words", "shown"), [("run --im", "run --image"), ("run --report bell", "run --report belljar")]
)
def test_zsh_offers_what_it_is_told(with_belljar: dict[str, str], words: str, shown: str) -> None:
    """On a terminal, by its Tab key."""
    (Path(with_belljar["HOME"]) / "script").write_text(completion.SCRIPTS["zsh"])
    script = (
        "zmodload zsh/zpty; zpty z zsh -f -i; zpty -w z \"PS1=; source ./script; echo rea''dy\"; zpty -r z all '*ready*'\n"
        f"zpty -w -n z $'belljar {words}\\t'; zpty -r z all '*{shown}*' && echo completed; zpty -d z"
    )
    assert said(["zsh", "-f", "-c", script], with_belljar) == ["completed"]


@pytest.mark.parametrize(("words", "shown"), [("run --im", ["--image"]), ("run --report bell", ["belljar"])])
def test_fish_offers_what_it_is_told(with_belljar: dict[str, str], words: str, shown: list[str]) -> None:
    script = f"{completion.SCRIPTS['fish']}\ncomplete -C 'belljar {words}'"
    assert said(["fish", "--no-config", "-c", script], with_belljar) == shown
