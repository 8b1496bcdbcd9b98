"""Machines that know their own work, with belljar's agent in them and a sign that they are ready: real guests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.live.conftest import Belljar

LONGEST = 60.0


def running(belljar: Belljar, *words: str) -> str:
    """A machine on its own with this work, when it is ready."""
    done = belljar.run("--detach", *words)
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    end = time.monotonic() + LONGEST
    while belljar.json("show", id)["state"] != "running":
        assert time.monotonic() < end and belljar.json("show", id)["outcome"] is None, belljar("show", id).stdout
        time.sleep(0.2)
    return id


def test_a_clone_without_a_payload_takes_commands_and_files_until_it_is_stopped(
    belljar: Belljar, tmp_path: Path
) -> None:
    (tmp_path / "in").write_bytes(os.urandom(100))
    id = running(belljar, "--ready", "agent", "--scratch", "16M")
    assert belljar("cp", str(tmp_path / "in"), f"{id}:/root/f").returncode == 0
    done = belljar(
        "exec", id, "--", "sh", "-c", "hostname; cmp /root/f - && findmnt -n /scratch >/dev/null; exit 7", input=b""
    )
    assert (done.stdout.decode().strip(), done.returncode) == (f"belljar-{id}", 7)
    assert belljar("cp", f"{id}:/root/f", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    begin = time.monotonic()
    assert belljar("stop", id).returncode == 0
    assert time.monotonic() - begin < 5  # no grace is waited for where nobody heeds the power button
    outcome = belljar.json("show", id)["outcome"]
    assert (outcome["cause"], outcome["start"], outcome["context"]) == ("cancelled", "clone", "ramdisk")
    assert belljar.leftovers() == []


def test_a_file_shows_that_the_guest_is_ready(belljar: Belljar) -> None:
    id = running(belljar, "--ready", "file:/etc/passwd")
    assert belljar("kill", id).returncode == 0
    late = belljar.run("--ready", "file:/nowhere", "--name", "late", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "5"})
    assert late.returncode == 125 and b"waited 5 s for the file /nowhere in the guest" in late.stderr


REBOOTS = """
import asyncio, time, belljar.api as b
from belljar.journal import read
from belljar.model import Account, OwnWork, Probe, Sign
root, again = Account("root", 0, 0, "root", home="/root"), "sync; echo u >/proc/sysrq-trigger; sleep 1; echo b >/proc/sysrq-trigger"
machine = b.start(b.request_of(OwnWork(ready=Probe(Sign.AGENT), agent=True, reboots=True)), tied=True)
boot = lambda: machine.exec(["cat", "/proc/sys/kernel/random/boot_id"], b"", root)[1]
first = boot()
print(machine.exec(["sh", "-c", "echo kept > /root/f"], b"", root)[0])
for _ in range(2):
    try:
        machine.exec(["sh", "-c", again], b"", root)
    except Exception:
        pass
    while True:
        try:
            second = boot()
            if second != first:
                break
        except Exception:
            pass
        time.sleep(0.2)
    first = second
    print(machine.exec(["cat", "/root/f"], b"", root)[1].decode().strip(), machine.view.state)
async def told(times):
    async with asyncio.timeout(10):
        async for _ in machine.reboots():
            if (times := times - 1) == 0:
                return
asyncio.run(told(2))
machine.stop()
outcome = machine.wait()
print(outcome.cause.value, outcome.start, sum(one["event"] == "rebooted" for one in read(machine.view.folder)))
"""


def test_a_guest_that_may_reboot_starts_again_from_its_disk(belljar: Belljar) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REBOOTS], env=belljar.env, capture_output=True, timeout=LONGEST * 3, check=False
    )
    assert done.stdout.decode().split("\n")[:3] == ["0", "kept running", "kept running"], done.stderr.decode()
    assert done.stdout.decode().split()[-3:] == ["cancelled", "cold", "2"]
    assert belljar.leftovers() == []
