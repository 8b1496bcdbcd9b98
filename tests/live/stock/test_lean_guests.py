"""Guests that have nothing to run the agent by, or nothing to speak to it by: musl alone, Python 2, no driver for the port."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.lean import lean

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
PARENT = "tr '\\0' '\\n' < /proc/$PPID/cmdline | head -n 1"  # the program that runs the agent


def ran(belljar: Belljar, image: str, *words: str, **options: Any) -> tuple[subprocess.CompletedProcess[bytes], Any]:
    report = belljar.folder / "report.json"
    done = belljar.run("--image", image, "--cwd", "/", "--report", str(report), *words, **options)
    return done, json.loads(report.read_text())


def test_a_guest_with_another_c_library_runs_the_agent_by_its_own_loader(belljar: Belljar) -> None:
    image = lean(belljar, "musl")
    says = f"{PARENT}; /lib/ld-musl-x86_64.so.1 2>&1 | head -n 1; ls -d /lib64 /lib/x86_64-linux-gnu; exit 7"
    for start in ("cold", "clone", "clone"):
        done, outcome = ran(belljar, image, "--start", start, "--", "sh", "-c", says)
        assert (done.returncode, outcome["start"], outcome["context"]) == (7, start, "ramdisk"), done.stderr
        assert done.stdout == b"/run/belljar/python/loader\nmusl libc (x86_64)\n"
    assert belljar.leftovers() == []


def test_a_guest_whose_pythons_are_too_old_is_brought_one(belljar: Belljar) -> None:
    image = lean(belljar, "python2")
    says = f"{PARENT}; python2.7 -S -c 'print \"two\"'; python3; exit 7"
    for start in ("cold", "clone", "clone"):
        done, outcome = ran(belljar, image, "--context", "ssh", "--start", start, "--", "sh", "-c", says)
        assert (done.returncode, outcome["start"], outcome["context"]) == (7, start, "ssh"), (done.stderr, outcome)
        assert done.stdout.split() == [b"/usr/lib/belljar/python/loader", b"two", b"3.4"]
    assert belljar.leftovers() == []


# -- frames over the ssh session ---------------------------------------------------------------------------------------


def test_without_a_driver_for_the_port_status_and_streams_come_over_ssh(belljar: Belljar) -> None:
    image = lean(belljar, "portless")
    says = "cat; echo err >&2; ls /sys/class/virtio-ports /dev/vport* 2> /dev/null; exit 7"
    done, outcome = ran(belljar, image, "--context", "ssh", "--", "sh", "-c", says, input=b"heard\n\0\xff\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"heard\n\0\xff\n", b"err\n"), outcome
    assert outcome["start"] == "cold" and "virtio_console" in outcome["start_reason"], outcome
    large = "head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2; kill -USR1 $$"
    done, outcome = ran(belljar, image, "--context", "ssh", "--", "sh", "-c", large)
    assert (done.returncode, outcome["signal"]) == (-signal.SIGUSR1, signal.SIGUSR1), outcome
    assert (len(done.stdout), len(done.stderr)) == (20_000_000, 3_000_000)
    assert belljar.leftovers() == []


def test_signals_reach_a_payload_over_ssh(belljar: Belljar) -> None:
    image = lean(belljar, "portless")
    says = "trap 'echo usr1' USR1; trap 'echo term; exit 9' TERM; echo up; while :; do sleep 0.1; done"
    words = ("--image", image, "--context", "ssh", "--cwd", "/", "--start", "cold", "--", "sh", "-c", says)
    job = belljar.popen("run", *words)
    assert job.stdout is not None and job.stdout.readline() == b"up\n"
    job.send_signal(signal.SIGUSR1)
    assert job.stdout.readline() == b"usr1\n"
    job.send_signal(signal.SIGTERM)
    assert job.stdout.read() == b"term\n" and job.wait(60) == 9
    assert belljar.leftovers() == []


def test_no_template_is_made_of_a_guest_without_a_port(belljar: Belljar) -> None:
    image = lean(belljar, "portless")
    done, _ = ran(belljar, image, "--context", "ssh", "--start", "clone", "--", "true")
    assert (
        done.returncode == 125
        and b"virtio_console" in done.stderr
        and b"Without `--start clone` it boots cold" in done.stderr
    )
    assert belljar.leftovers() == []
