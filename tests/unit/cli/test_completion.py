"""Completion: what may follow is read from the parsers, and bash, zsh and fish are told it."""

import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A home with an image's name, a running machine's, and a file to complete."""
    (tmp_path / "apple.toml").touch()
    variables = {f"BELLJAR_PATHS_{name.upper()}": str(tmp_path / name) for name in ("run", "store", "scratch", "logs")}
    return {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(tmp_path), **variables}


def offered(line: str, env: dict[str, str]) -> list[str]:
    """The words that belljar offers at the end of this line, as argcomplete asks for them."""
    told = Path(env["HOME"], "offered")
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(told), "COMP_LINE": line,
        "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
    }  # fmt: skip
    done = subprocess.run(["belljar"], env=env | asked, cwd=env["HOME"], capture_output=True, timeout=60, check=False)
    assert done.stdout == done.stderr == b""
    return [word.strip() for word in told.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("belljar ", "run"),
        ("belljar --config ap", "apple.toml"),
        ("belljar run --st", "--start"),
        ("belljar run --start ", "cold"),
        ("belljar run --report ap", "apple.toml"),
        ("belljar run --start cold -- ap", "apple.toml"),
        ("belljar image ", "list"),
        ("belljar image show --format ", "json"),
        ("belljar batch install ", "slurm"),
        ("belljar completion ", "bash"),
    ],
)
def test_what_may_follow_is_offered(line: str, word: str, env: dict[str, str]) -> None:
    assert word in offered(line, env)


@pytest.mark.parametrize("line", ["belljar nosuch x", "belljar run --cpus ", "belljar show x", "belljar int"])
def test_where_nothing_may_follow_nothing_is_offered(line: str, env: dict[str, str]) -> None:
    assert offered(line, env) == []


def test_broken_settings_offer_nothing_and_say_nothing(env: dict[str, str]) -> None:
    assert offered("belljar show x", env | {"BELLJAR_MACHINE_MEMORY": "much"}) == []


def said(argv: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(argv, env=env, cwd=env["HOME"], capture_output=True, timeout=60, check=False)
    assert done.stderr == b"", done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize(("words", "shown"), [("run --sta", "--start"), ("run --report app", "apple.toml")])
def test_bash_offers_it(env: dict[str, str], words: str, shown: str) -> None:
    script = f"""eval "$(belljar completion bash)"; COMP_LINE='belljar {words}'; COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
COMP_WORDS=($COMP_LINE); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
compopt() {{ :; }}; _python_argcomplete belljar; printf '%s|' "${{COMPREPLY[@]}}" """
    assert said(["bash", "--norc", "-c", script], env) == f"{shown}|"


@pytest.mark.parametrize(
    ("words", "shown"), [("run --sta", "run --start"), ("run --report app", "run --report apple.toml")]
)
def test_zsh_offers_it(env: dict[str, str], words: str, shown: str) -> None:
    """On a terminal, by its Tab key."""
    script = (
        "zmodload zsh/zpty; zpty z zsh -f -i; zpty -w z \"PS1=; autoload -U compinit; compinit -D; eval \\\"\\$(belljar completion zsh)\\\"; echo rea''dy\"; zpty -r z all '*ready*'\n"
        f"zpty -w -n z $'belljar {words}\\t'; zpty -r z all '*{shown}*' && echo completed; zpty -d z"
    )
    assert said(["zsh", "-f", "-c", script], env) == "completed\n"


@pytest.mark.parametrize(("words", "shown"), [("run --sta", "--start"), ("run --report app", "apple.toml")])
def test_fish_offers_it(env: dict[str, str], words: str, shown: str) -> None:
    script = f"belljar completion fish | source; complete -C 'belljar {words}'"
    assert said(["fish", "--no-config", "-c", script], env | {"TERM": "dumb"}).split("\t")[0].strip() == shown
