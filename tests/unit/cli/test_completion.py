"""Completion: what may follow is read from the parsers, and the scripts hand it to their shells."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from belljar.cli.host import completion
from belljar.errors import BadSetting

FILE = ("", "")


class Broken:
    @property
    def machines(self) -> Any:
        raise BadSetting("broken")


def offered(*words: str) -> dict[str, str]:
    house: Any = SimpleNamespace(
        machines=SimpleNamespace(
            list=lambda ended: [SimpleNamespace(id="0123456789ab", name="mine", image="debian12")]
        ),
        images=SimpleNamespace(images=lambda: [SimpleNamespace(names=("debian12", "deb"), os="Debian 12")]),
    )
    return dict(completion.offered(words[:-1], words[-1], house))


@pytest.mark.parametrize(
    ("words", "is_offered"),
    [
        ([""], ("run", "run a command or a script in its own fresh virtual machine")),
        (["--config", "x", ""], ("--verbose", "tell where an error was raised")),
        (["--config", ""], FILE),
        (["run", "--image", ""], ("debian12", "Debian 12")),
        (["run", "--start", ""], ("cold", "")),
        (["run", "--report", ""], FILE),
        (["run", "-t", ""], FILE),
        (["run", "--start", "cold", "--", "ls", ""], FILE),
        (["show", ""], ("0123456789ab", "debian12")),
        (["stop", "mine", ""], ("mine", "debian12")),
        (["image", ""], ("list", "list the images")),
        (["image", "show", ""], ("deb", "Debian 12")),
        (["image", "show", "--format", ""], ("json", "")),
        (["batch", "install", ""], ("slurm", "")),
        (["completion", ""], ("zsh", "")),
    ],
)  # fmt: skip
def test_what_may_follow_is_offered_with_a_text(words: list[str], is_offered: tuple[str, str]) -> None:
    assert is_offered in offered(*words).items()


def test_options_are_those_of_the_parsers() -> None:
    found = offered("run", "--st")
    assert found["--start"] and {"-t", "--tty", "--help"} <= set(found)
    assert "--config" not in found and "words" not in offered("completion", "")


@pytest.mark.parametrize("words", [["nosuch", "x"], ["--nosuch", "x"], ["--help", ""], ["version", ""]])
def test_where_nothing_may_follow_nothing_is_offered(words: list[str]) -> None:
    assert offered(*words) == {}


def test_it_is_silent_when_the_settings_are_broken(capsys: pytest.CaptureFixture[str]) -> None:
    completion.completion(SimpleNamespace(shell="words", rest=["show", ""]), Broken())  # type: ignore[arg-type]
    output = capsys.readouterr()
    assert output.out == output.err == ""


def test_words_are_ids_and_names_of_machines(call: Any, house: Any, capsys: pytest.CaptureFixture[str]) -> None:
    house.machine("aaaaaaaaaaaa", name="mine")
    house.machine("bbbbbbbbbbbb", name="bad name")
    call("completion", "words", "show", "")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["aaaaaaaaaaaa", "mine", "bbbbbbbbbbbb"]
    call("completion", "words", "show", "m")
    assert capsys.readouterr().out.split("\t")[0] == "mine"


@pytest.fixture
def with_belljar(tmp_path: Path) -> dict[str, str]:
    """An environment whose `belljar` knows an option with a text, and a file where `--report` is to be completed."""
    fake = tmp_path / "belljar"
    fake.write_text(
        '#!/bin/sh\nfor last; do :; done\ncase "$*" in\n'
        '  "completion words run --report "*) printf "\\t\\n" ;;\n'
        '  "completion words run "*) printf "%s\\tby name: or digest\\n" "--image" ;;\nesac\n'
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
    ("words", "shown"), [("run --im", ["--image\tby name: or digest"]), ("run --report bell", ["belljar"])]
)
def test_fish_offers_what_it_is_told(with_belljar: dict[str, str], words: str, shown: list[str]) -> None:
    script = f"{completion.FISH}\ncomplete -C 'belljar {words}'"
    found = said(["fish", "--no-config", "-c", script], with_belljar)
    assert [line.removesuffix("\texecutable") if "belljar" in line else line for line in found] == shown


def test_zsh_understands_its_script(with_belljar: dict[str, str]) -> None:
    (Path(with_belljar["HOME"]) / "_belljar").write_text(completion.ZSH)
    assert said(["zsh", "-f", "-n", "_belljar"], with_belljar) == []
