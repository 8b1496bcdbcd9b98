"""Clones by every QEMU that the mirror has: that of Debian 12, of Debian 13, and the newest; and the Pythons there. What the
next ones break is seen here first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from tests.live.conftest import ROOT, STORE
from tests.roots import Done, Room, root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
PACKAGES = ("qemu-system-x86", "qemu-utils", "python3", "e2fsprogs", "passwd")
SUITES = {"bookworm": (), "trixie": ("virtiofsd",), "sid": ("virtiofsd",)}  # and what is a package of its own there
FOLDERS = {f"BELLJAR_PATHS_{name.upper()}": f"/belljar/{name}" for name in ("run", "scratch", "logs", "store")}

ASK = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
    asker.settimeout(10)
    asker.connect(("10.0.2.3", 53))
    asker.send(bytes((0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0)) + b"\\3www\\7example\\3net\\0\\0\\1\\0\\1")
    print(asker.recv(1000)[3] & 15)
"""

# Until it is told to check, it writes numbers into pages, some of them again and again.
WRITES = """
import os, signal
pages, number = 8192, 0
memory, numbers = bytearray(pages << 12), [0] * pages
while not os.path.exists("/tmp/check"):
    for number in range(number + 1, number + 1001):
        page = number * 2654435761 % (64 if number % 8 else pages)
        memory[page << 12 : (page + 1) << 12] = number.to_bytes(8, "little") * 512
        numbers[page] = number
wrong = [page for page in range(pages) if memory[page << 12 : (page + 1) << 12] != numbers[page].to_bytes(8, "little") * 512]
with open("/tmp/told", "w") as file:
    print(len(wrong), number > 1000, file=file)
os.rename("/tmp/told", "/tmp/checked")
signal.pause()  # its end is the machine's
"""
CHECK = "touch /tmp/check; until [ -e /tmp/checked ]; do sleep 0.1; done; cat /tmp/checked"


class Place:
    """A room of a suite with this belljar, the tests' images, and templates of its own."""

    def __init__(self, suite: str, room: Room) -> None:
        self.suite, self.room = suite, room
        room.run("mkdir", "-m", "0755", "-p", "/belljar/store", "/data")
        room.run("useradd", "--create-home", "bob")

    def belljar(self, *words: str, user: str = "", **env: str) -> Done:
        mine = FOLDERS if not user else {"BELLJAR_PATHS_SITE_STORE": "/belljar/store", "HOME": f"/home/{user}"}
        env = {"PYTHONPATH": "/source:/libraries", "PYTHONDONTWRITEBYTECODE": "1", **mine, **env}
        return self.room.run("python3", "-m", "belljar", *words, user=user, check=False, timeout=300, **env)

    def run(self, *words: str, user: str = "", **env: str) -> tuple[str, dict[str, Any]]:
        """A clone that is insisted on: what it wrote, and its outcome. QEMU itself has nothing to complain of."""
        report = f"/tmp/report{user}"
        done = self.belljar("run", "--start", "clone", "--keep", "--report", report, *words, user=user, **env)
        assert done.returncode == 0, done.stderr.decode()
        outcome = json.loads(self.room.path(report).read_text())
        complaints = self.belljar("logs", "--qemu", outcome["id"], user=user)
        assert (complaints.returncode, complaints.stdout) == (0, b"")
        return done.stdout.decode(), outcome


@pytest.fixture(scope="module", params=SUITES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    made = root(request.param, [*PACKAGES, *SUITES[request.param]])
    # The images alone: templates belong to one QEMU.
    site = Path(h11.__file__).parents[1]
    with Room(
        made,
        net=True,
        host="node",
        binds={
            ROOT / "src": "/source",
            **{site / name: f"/libraries/{name}" for name in ("h11", "rich", "pygments", "markdown_it", "mdurl")},
            ROOT / "docs": "/docs",
            ROOT / "scripts": "/scripts",
            STORE / "images": "/belljar/store/images",
        },
    ) as room:
        yield Place(request.param, room)


def test_a_job_is_a_clone_and_its_template_is_whole(place: Place) -> None:
    out, outcome = place.run("--", "uname", "-s")
    assert (out, outcome["start"], outcome["cause"]) == ("Linux\n", "clone", "finished")
    out, _ = place.run("--", "echo", "again")
    assert out == "again\n"
    templates = place.belljar("template", "verify")
    assert templates.returncode == 0, templates.stdout
    assert place.belljar("template", "list").stdout.count(b"debian12") == 1  # the second one was of the same


def test_an_ordinary_user_has_clones(place: Place) -> None:
    out, outcome = place.run("--", "id", "-un", user="bob")
    assert (out, outcome["start"]) == ("bob\n", "clone")


def test_a_clone_shares_a_folder_by_9p(place: Place) -> None:
    place.run("--share", "/data:/data:rw", "--", "sh", "-c", "echo 9p > /data/9p")
    assert place.room.path("/data/9p").read_text() == "9p\n"


def test_a_clone_shares_a_folder_by_virtiofs(place: Place) -> None:
    if place.suite == "bookworm":  # its virtiofsd is the one in C
        done = place.belljar("run", "--share", "virtiofs:/data", "--", "true")
        assert done.returncode == 125 and b"in Rust" in done.stderr and b"on Debian 12" in done.stderr
        return
    place.run("--share", "virtiofs:/data:/data:rw", "--", "sh", "-c", "echo virtiofs > /data/virtiofs")
    assert place.room.path("/data/virtiofs").read_text() == "virtiofs\n"


def test_a_clone_has_a_scratch_disk_and_a_network(place: Place) -> None:
    out, _ = place.run(
        "--scratch", "64M", "--network", "user", "--", "sh", "-c", "findmnt -no FSTYPE /scratch; ls /sys/class/net"
    )
    assert out.split()[0] == "ext4" and len(out.split()) == 3


def test_a_warm_image_has_one_memory_for_every_network(place: Place) -> None:
    words = ("--from", "debian12", "-m", "256M", "--network", "user", "--user", "0:0", "--cwd", "/")
    made = place.belljar("image", "warm", "prepared", *words, "--", "sh", "-c", "cat /proc/net/route > /tmp/route")
    try:
        assert made.returncode == 0, made.stderr.decode()
        for network, lines in (("none", 1), ("user", 3), ("isolated:group", 2)):
            shown, _ = place.run(
                "--image", "prepared", "--network", network, "--cwd", "/", "--", "cat", "/tmp/route", "/proc/net/route"
            )
            assert shown.count("0202000A") == 1 + (network == "user") and len(shown.splitlines()) == 3 + lines
    finally:
        place.belljar("image", "remove", "prepared")


@pytest.mark.parametrize("memory", ["256M", "1G"])  # in one piece, which may move while the guest runs, and in two
def test_forks_of_a_machine_that_writes_have_all_that_it_wrote(place: Place, memory: str) -> None:
    words = ("run", "-d", "-n", "-m", memory, "--user", "0:0", "--cwd", "/", "--", "python3", "-c", WRITES)
    machines = place.belljar(*words).stdout.decode().split()
    try:
        assert place.belljar("exec", "--wait", "60s", machines[0], "--", "true").returncode == 0
        for _ in range(5):
            machines += place.belljar("fork", machines[0]).stdout.decode().split()
        assert len(machines) == 6
        for machine in reversed(machines):
            done = place.belljar("exec", "--wait", "60s", machine, "--", "sh", "-c", CHECK)
            assert done.stdout == b"0 True\n", done.stderr
    finally:
        for machine in machines:
            place.belljar("stop", machine)


def test_a_query_that_is_not_allowed_is_answered_at_once(place: Place) -> None:
    """By slirp, which takes the guard's answer for that of a name server."""
    out, _ = place.run("--allow", "data.example.org", "--", "python3", "-c", ASK)
    assert out == "3\n"


def test_doctor_proves_a_clone(place: Place) -> None:
    done = place.belljar("doctor", "--only", "clone", "--only", "qemu")
    assert done.returncode == 0 and b"was ready in" in done.stdout and b"tried with" not in done.stdout, done.stdout


def test_help_texts_are_the_same_by_every_python(place: Place) -> None:
    env = {"PYTHONPATH": "/source:/libraries", "PYTHONDONTWRITEBYTECODE": "1"}
    done = place.room.run("python3", "/scripts/reference", "--check", check=False, **env)
    assert (done.returncode, done.stdout) == (0, b"current\n")
