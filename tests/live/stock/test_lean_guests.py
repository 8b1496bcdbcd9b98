"""Guests that have nothing to run the agent by: musl alone."""

from __future__ import annotations

import json
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
    image = lean(belljar)
    says = f"{PARENT}; /lib/ld-musl-x86_64.so.1 2>&1 | head -n 1; ls -d /lib64 /lib/x86_64-linux-gnu; exit 7"
    for start in ("cold", "clone", "clone"):
        done, outcome = ran(belljar, image, "--start", start, "--", "sh", "-c", says)
        assert (done.returncode, outcome["start"], outcome["context"]) == (7, start, "ramdisk"), done.stderr
        assert done.stdout == b"/run/belljar/agent/loader\nmusl libc (x86_64)\n"
    assert belljar.leftovers() == []
