"""Run a program on bytes nobody trusts: under limits, without rights, on open files instead of paths.

The program gets each file as /proc/self/fd/N: it can open that file and, being nobody when we are root, no other of ours.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from belljar.errors import CommandMissing, ImageCorrupt
from belljar.host.commands import SEARCH_PATH, which

if TYPE_CHECKING:
    import subprocess

NOBODY = 65534
LARGEST_COMPLAINT = 64 << 10
MEMORY = 8 << 30  # address space; qemu-img reserves much and touches little


@dataclass(frozen=True)
class Limits:
    """How much a program may take. *output* bounds every file it writes, its standard output too."""

    seconds: int
    output: int


@dataclass(frozen=True)
class Printed:
    """What a program that ended well has said."""

    out: bytes
    err: bytes


def run(argv: Sequence[str], files: Sequence[Path], limits: Limits, *, writable: Sequence[Path] = ()) -> Printed:
    """Run *argv* to its end and return what it printed. `{0}`, `{1}`... in argv stand for *files*, then for *writable*, which
    exist already. Raises ImageCorrupt, with the program's last words, when it fails, is killed or exceeds its limits."""
    import subprocess
    import tempfile

    descriptors: list[int] = []
    try:
        descriptors += [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in files]
        descriptors += [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in writable]
        for descriptor in descriptors[len(files) :]:
            _lend(descriptor, NOBODY)
        names = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
        command = [*_confined(limits), *(_filled(word, names) for word in argv)]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            done = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=descriptors,
                env={"PATH": SEARCH_PATH, "LC_ALL": "C"}, cwd="/", start_new_session=True,
            )  # fmt: skip
            _await(done, argv[0], limits.seconds)
            if done.returncode:
                raise ImageCorrupt(f"{argv[0]}: {_last_words(err, done.returncode)}")
            out.seek(0)
            err.seek(0)
            return Printed(out.read(limits.output), err.read(LARGEST_COMPLAINT))
    finally:
        for descriptor in descriptors[len(files) :]:
            _lend(descriptor, os.geteuid())
        for descriptor in descriptors:
            os.close(descriptor)


def _await(process: subprocess.Popen[bytes], name: str, seconds: int) -> None:
    import subprocess

    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired as exc:
        raise ImageCorrupt(f"{name}: not finished after {seconds} s, killed") from exc
    finally:
        process.kill()
        process.wait()


def _confined(limits: Limits) -> list[str]:
    prlimit, setpriv = _needed("prlimit"), _needed("setpriv")
    confined = [prlimit, f"--as={MEMORY}", f"--fsize={limits.output}", f"--cpu={limits.seconds}", "--core=0"]
    confined += [setpriv, "--no-new-privs", "--pdeathsig=KILL"]
    if os.geteuid() == 0:
        confined += [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    return confined


def _needed(name: str) -> str:
    if found := which(name):
        return found
    raise CommandMissing(f"{name}: no such program on this host")


def _filled(word: str, names: Sequence[str]) -> str:
    for index, name in enumerate(names):
        word = word.replace(f"{{{index}}}", name)
    return word


def _lend(descriptor: int, owner: int) -> None:
    if os.geteuid() == 0:
        os.fchown(descriptor, owner, -1)


def _last_words(err: IO[bytes], code: int) -> str:
    err.seek(max(0, err.seek(0, os.SEEK_END) - 2000))
    lines = err.read().decode(errors="replace").strip().splitlines()
    end = f"exit {code}" if code > 0 else f"killed by signal {-code}"
    return f"{end}: {lines[-1]}" if lines else end
