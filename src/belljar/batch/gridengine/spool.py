"""What Grid Engine's shepherd would have done with a job, from what it tells a starter method. Pure functions.

The starter gets the script's path (or the command of a binary job) and the user's arguments, but neither the shell's
words nor whether it is a binary job: that stands in the job's spool folder, in `config`, which the job's user may read.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from belljar.batch.job.terms import Command

LARGEST_CONFIG = 1 << 20
# https://manpages.debian.org/bookworm/gridengine-common/sge_types.5.en.html: a small letter counts in thousands.
UNITS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {letter.upper(): 1024**power for power, letter in enumerate("kmgt", 1)}
MEMORY = re.compile(r"([0-9]+(?:\.[0-9]*)?)([kKmMgGtT]?)")
CLOCK = re.compile(r"([0-9]*):([0-9]*):([0-9]*)")


def config(text: bytes) -> dict[str, bytes]:
    """`KEY=VALUE` per line. A value's own newlines cannot be told from the next line's start: the first KEY counts."""
    found: dict[str, bytes] = {}
    for line in text[:LARGEST_CONFIG].split(b"\n"):
        key, equals, value = line.partition(b"=")
        if equals:
            found.setdefault(key.decode("latin-1"), value)
    return found


def memory(text: str) -> int | None:
    """A memory specifier in bytes; None for INFINITY, NONE and what is none."""
    if text[:2].lower() == "0x":
        return int(text, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]{1,15}", text) else None
    match = MEMORY.fullmatch(text)
    return int(float(match[1]) * UNITS.get(match[2], 1)) if match and len(match[1]) < 20 else None


def seconds(text: str) -> float | None:
    """A time specifier: seconds, or H:M:S with empty parts for zero; None for INFINITY and what is none."""
    if match := CLOCK.fullmatch(text):
        hours, minutes, rest = (int(part or "0") for part in match.groups())
        return float(hours * 3600 + minutes * 60 + rest)
    return float(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def notice(spool: Mapping[str, bytes]) -> tuple[int, float] | None:
    """(signal, seconds before the end) of a job submitted with `-notify`; the signal may be the site's (NOTIFY_KILL)."""
    after = seconds(spool.get("notify", b"").decode("latin-1"))
    kind, name = spool.get("notify_kill_type", b"1"), spool.get("notify_kill", b"").decode("latin-1").upper()
    number = {b"1": signal.SIGUSR2, b"0": getattr(signal, f"SIG{name.removeprefix('SIG')}", None)}.get(kind)
    return (int(number), after) if after and isinstance(number, signal.Signals) else None


def native(argv: tuple[bytes, ...], env: Mapping[str, bytes], spool: Mapping[str, bytes]) -> Command:
    """The shepherd's own command for this job without a starter method, by `shell_start_mode`.

    unix_behavior, raw_exec   the script itself: its first line names the interpreter, /bin/sh where there is none
    posix_compliant           the shell with the script and the arguments
    script_from_stdin         the shell with `-s` and the arguments; the script is its standard input
    a binary job              the shell with `-c` and all words in one, each followed by a blank; with `-shell n` the
                              command itself, looked for in PATH
    """
    shell = env.get("SGE_STARTER_SHELL_PATH", b"") or b"/bin/sh"
    mode = env.get("SGE_STARTER_SHELL_START_MODE", b"").lower()
    login = env.get("SGE_STARTER_USE_LOGIN_SHELL") == b"true"
    name = (b"-" if login else b"") + shell.rpartition(b"/")[2]
    is_stdin = mode == b"script_from_stdin" and argv[:1] == (b"-s",)
    arguments, file = argv[1:], spool.get("script_file", b"") if is_stdin else (argv[0] if argv else b"")
    if is_binary(env, spool) and spool.get("no_shell", b"0") != b"1":
        return Command(shell, (name, b"-c", file + b" " + b"".join(word + b" " for word in arguments)))
    if is_stdin:
        return Command(shell, (name, b"-s", *arguments))
    if mode == b"posix_compliant" and not is_binary(env, spool):
        return Command(shell, (name, file, *arguments))
    return Command(file, (file, *arguments))


def is_binary(env: Mapping[str, bytes], spool: Mapping[str, bytes]) -> bool:
    """`qsub -b y`: a command of the host, no spooled script."""
    if flag := spool.get("handle_as_binary"):
        return flag == b"1"
    return not env.get("JOB_SCRIPT", b"").endswith(b"/job_scripts/" + env.get("JOB_ID", b"-"))
