"""Warm images with real guests: prepared once, and every machine starts where the preparation ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar

NAME = f"warm-{os.getpid()}"
LOADED = """\
import os, random, subprocess, sys
sys.path.append("/usr/lib/belljar")
import belljar_hold
print("loading", flush=True)
table = {number: number * number for number in range(100_000)}
args = belljar_hold.hold()
if args == ["die"]: os.kill(os.getpid(), 9)
print(args, table[300], os.uname().nodename, os.getuid(), random.random(), flush=True)
print(open("/tmp/loaded").read(), sys.stdin.read(), end="", file=sys.stderr)
print(subprocess.run(["pgrep", "-x", "sleep"], stdout=subprocess.PIPE).stdout.decode().split() != [], flush=True)
sys.exit(7)
"""
PREPARE = "echo loaded > /tmp/loaded; setsid sleep 100000 < /dev/null > /dev/null 2>&1 & exec python3 loaded.py"


@pytest.fixture
def warm(belljar: Belljar) -> Iterator[Belljar]:
    yield belljar
    belljar("image", "remove", NAME)
    assert all(NAME not in template["images"] for template in belljar.json("template", "list"))


GROWN, OTHER = ("-m", "700M", "-c", "2", "--cwd", "/"), ("--user", "1000:1000", "--cwd", "/")


# Root's machine of another user is prepared by itself: QEMU runs as that user.
@pytest.mark.parametrize("machines", [((), GROWN), pytest.param(((), OTHER), marks=pytest.mark.slow)])
def test_a_held_program_is_the_job_of_every_machine_of_its_image(
    warm: Belljar, tmp_path: Path, machines: tuple[tuple[str, ...], ...]
) -> None:
    (tmp_path / "loaded.py").write_text(LOADED)
    words = ("--from", "debian12", "--in", str(tmp_path / "loaded.py"), "--cwd", "/root", "-m", "256M")
    made = warm("image", "warm", NAME, *words, "--", "sh", "-c", PREPARE)
    assert (made.returncode, made.stderr) == (0, b"loading\n"), made.stderr
    assert made.stdout.decode().strip() == warm.json("image", "show", NAME)["digest"]
    seen = []
    for number, more in enumerate(machines):
        done = warm.run("--image", NAME, *more, "--", "ARG", str(number), input=b"input")
        assert done.returncode == 7 and done.stderr == b"loaded\n input", done.stderr
        arguments, _, rest = done.stdout.decode().partition("] ")
        table, node, uid, drawn, daemon = rest.split()
        assert (arguments, table, daemon) == (f"['ARG', '{number}'", "90000", "True")
        assert uid == ("1000" if "--user" in more else "0" if os.geteuid() == 0 else str(os.geteuid()))
        seen += [node, drawn]
    assert len(set(seen)) == 4
    killed = warm.run("--image", NAME, "--", "die")
    assert (killed.returncode, killed.stdout, killed.stderr) == (-signal.SIGKILL, b"", b"")
    for words in (("-m", "128M"), ("--start", "cold")):
        assert warm.run("--image", NAME, *words, "--", "x").returncode == 125
    assert warm.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("echo no library >&2; exit 3", "the command that prepares it ended with exit code 3"),
        ("echo o > /proc/sysrq-trigger; sleep 100", "powered the guest off"),
        ("sleep 1000", "waited 5 s for it to end"),
    ],
)
def test_a_preparation_that_fails_leaves_nothing(warm: Belljar, command: str, says: str) -> None:
    drafts, images = set(STORE.glob("templates/*.draft")), warm.json("image", "list")
    words = ("--from", "debian12", "-m", "256M", "--user", "0:0", "--cwd", "/", "--time", "5s")
    done = warm("image", "warm", NAME, *words, "--", "sh", "-c", command)
    assert done.returncode == 125 and says in done.stderr.decode(), done.stderr
    assert warm.json("image", "list") == images and warm.leftovers() == []
    assert set(STORE.glob("templates/*.draft")) <= drafts
