"""Forks of real machines: what runs in the parent runs on in them, and the parent notices nothing."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar

from belljar.journal import read

COUNTS = "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; echo $i; sleep 0.05; done"
SEEN = "first=$(cat /tmp/count); sleep 0.5; echo $first $(cat /tmp/count) $(uname -n) $(cat /etc/machine-id) $(cat /tmp/marker)"


@pytest.fixture
def prepared(belljar: Belljar) -> Iterator[Belljar]:
    """With a machine that counts."""
    yield belljar
    end = time.monotonic() + 10
    while forks() and time.monotonic() < end:  # its last machine takes a fork along a moment after its own end is known
        time.sleep(0.1)
    assert forks() == []


def forks() -> list[Path]:
    """What the store has of forks."""
    manifests = STORE.glob("templates/*/manifest.json")
    return [path.parent for path in manifests if b'"fork":' in path.read_bytes()]


def started(belljar: Belljar, *words: str, command: str = COUNTS) -> str:
    done = belljar.run("-d", "-n", "--cwd", "/", *words, "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    marked = belljar("exec", "--wait", "60s", id, "--", "sh", "-c", "echo marked > /tmp/marker; sleep 0.3")
    assert marked.returncode == 0, marked.stderr
    return id


def fork(belljar: Belljar, *words: str) -> list[str]:
    done = belljar("fork", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split()


def test_two_forks_of_a_machine_that_counts_count_on_and_it_loses_no_number(prepared: Belljar) -> None:
    belljar, id = prepared, started(prepared)
    children = fork(belljar, "-n", "2", "--name", "kid", id, "--", "sh", "-c", SEEN)
    assert [belljar("wait", child).returncode for child in children] == [0, 0]
    words = [belljar("logs", "--stdout", f"kid-{number}").stdout.decode().split() for number in (1, 2)]
    for first, later, *_, marker in words:
        assert 0 < int(first) < int(later) and marker == "marked"
    assert len({node for _, _, node, *_ in words}) == len({machine for *_, machine, _ in words}) == 2
    layer = belljar.scratch / f"{id}.layer1"
    assert layer.exists()
    belljar("stop", id)
    numbers = [int(line) for line in belljar("logs", "--stdout", id).stdout.split()]
    assert numbers == list(range(1, len(numbers) + 1)) and numbers[-1] > int(words[0][0])
    (forked,) = [event for event in read(belljar.logs / id) if event["event"] == "forked"]
    assert forked["still"] > 0 and belljar.leftovers() == []


@pytest.mark.slow
def test_memory_is_that_of_the_moment_of_the_fork_and_shared(prepared: Belljar) -> None:
    belljar = prepared
    id = started(
        belljar, "-m", "700M", command="dd if=/dev/urandom of=/dev/shm/x bs=1M count=100; touch /tmp/x; exec sleep 1000"
    )
    belljar("exec", id, "--", "sh", "-c", "until [ -e /tmp/x ]; do sleep 0.2; done")
    sums = []
    for _ in range(2):
        (child,) = fork(belljar, id)
        for machine in (child, id):
            done = belljar("exec", "--wait", "60s", machine, "--", "md5sum", "/dev/shm/x")
            sums.append(done.stdout)
        pid = belljar.json("show", child)["pid"]
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) >> 10 for line in lines if line.startswith("Private_Dirty"))
        assert private < 200, f"{private} MiB of its own"
        (grandchild,) = fork(belljar, child)
        sums.append(belljar("exec", "--wait", "60s", grandchild, "--", "md5sum", "/dev/shm/x").stdout)
        belljar("stop", child)
        sums.append(belljar("exec", grandchild, "--", "md5sum", "/dev/shm/x").stdout)
        belljar("stop", grandchild)
    assert len(set(sums)) == 1 and sums[0]
    belljar("stop", id)
    assert belljar.leftovers() == []


@pytest.mark.slow
def test_a_held_program_and_a_grown_parent_are_forked_too(prepared: Belljar) -> None:
    belljar = prepared
    id = started(belljar, "-c", "2", "-m", "1G", "--network", "user", command="python3 -c 'input()'; exec sleep 1000")
    (child,) = fork(belljar, "-n", "1", id)
    look = "nproc; awk '/MemTotal/ {print $2}' /proc/meminfo; ip -o link | grep -c virtio; pgrep -c sleep"
    both = [belljar("exec", "--wait", "60s", machine, "--", "sh", "-c", look).stdout for machine in (id, child)]
    assert both[0] == both[1] and both[0].startswith(b"2\n"), both
    for machine in (child, id):
        belljar("stop", machine)
    assert belljar.leftovers() == []


@pytest.mark.slow
def test_the_last_machine_of_a_fork_that_is_killed_takes_it_along(prepared: Belljar) -> None:
    belljar, id = prepared, started(prepared)
    one, two = fork(belljar, "-n", "2", id)
    belljar("stop", one)
    assert len(forks()) == 1
    keeper = next(event["pid"] for event in read(belljar.run_folder / "machines" / two) if event["event"] == "claim")
    os.kill(keeper, signal.SIGKILL)
    belljar("reap")
    assert forks() == []
    belljar("stop", id)
    assert belljar.leftovers() == []


@pytest.mark.slow
def test_what_cannot_be_forked_is_said_in_a_line_and_goes_on(prepared: Belljar, tmp_path: Path) -> None:
    belljar = prepared
    (tmp_path / "file").write_text("x")
    for words, says in (
        (("--share", str(tmp_path)), "shared folders"),
        (("--scratch", "64M"), "further disks"),
        (("--in", f"{tmp_path}/file:/tmp/x"), "further disks"),
        (("--keep",), "outlast"),
    ):
        id = started(belljar, *words)
        done = belljar("fork", id)
        assert done.returncode == 125 and re.search(says, done.stderr.decode()), done.stderr
        assert done.stderr.count(b"\n") == 2 and belljar("exec", id, "--", "true").returncode == 0
        belljar("stop", id)
    done = belljar("fork", id)
    assert done.returncode == 125 and b"not running" in done.stderr
