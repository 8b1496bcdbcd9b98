"""Run a program to its end, with a deadline and no shell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from belljar.errors import CommandFailed, CommandHung, CommandMissing

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def bare_environment() -> dict[str, str]:
    """For programs that are to be told nothing by whoever started us, but who and where we are."""
    own = {name: value for name in ("HOME", "USER", "LOGNAME", "TZ") if (value := os.environ.get(name))}
    return {**own, "LC_ALL": "C", "PATH": SEARCH_PATH}


@dataclass(frozen=True)
class Finished:
    """A program's end."""

    argv: tuple[str, ...]
    code: int  # negative: killed by this signal
    out: bytes
    err: bytes


def which(name: str) -> str | None:
    """The program's path, looked for in PATH and then in the system's usual folders (hooks often have an empty PATH)."""
    for folder in (*os.environ.get("PATH", "").split(":"), *SEARCH_PATH.split(":")):
        candidate = os.path.join(folder, name)
        if folder and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    check: bool = True,
    env: Mapping[str, str] | None = None,
    bound: bool = False,
) -> Finished:
    """Run to the end. Raises CommandMissing, and CommandFailed at the deadline or (with *check*) for a non-zero code;
    the message quotes the last line the program wrote to stderr. *bound*: it dies with us, whatever we die of."""
    import subprocess

    program = argv[0] if "/" in argv[0] else which(argv[0])
    if program is None:
        raise CommandMissing(f"{argv[0]}: no such program on this host")
    before = [setpriv, "--pdeathsig=KILL"] if bound and (setpriv := which("setpriv")) else []
    try:
        done = subprocess.run(
            [*before, program, *argv[1:]], input=stdin, capture_output=True, timeout=timeout, env=env, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise CommandHung(f"{argv[0]}: not finished after {timeout:.0f} s, killed") from exc
    except FileNotFoundError as exc:
        raise CommandMissing(f"{argv[0]}: no such program on this host") from exc
    finished = Finished(tuple(argv), done.returncode, done.stdout, done.stderr)
    if check and done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise CommandFailed(f"{argv[0]}: exit {done.returncode}: {lines[-1] if lines else 'no message'}")
    return finished
