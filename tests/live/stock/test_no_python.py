"""A stock image without Python and without cloud-init: the agent brings its interpreter."""

from __future__ import annotations

import json

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.images import stock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
OURS = "/usr/lib/belljar/loader"
# Whose command line names the agent: the payload's parent.
ASKS = "tr '\\0' '\\n' < /proc/$PPID/cmdline | head -n 1; cat /proc/1/comm; hostname; exit 7"


def ran(belljar: Belljar, image: str, context: str, start: str, *words: str) -> list[str]:
    report = belljar.folder / "report.json"
    argv = ("--image", image, "--context", context, "--start", start, "--report", str(report), *words)
    done = belljar.run(*argv, "--", "sh", "-c", ASKS, timeout=1600)
    outcome = json.loads(report.read_bytes())
    assert done.returncode == 7, (outcome, done.stderr.decode())
    assert (outcome["start"], outcome["context"]) == (start, context)
    program, init, hostname = done.stdout.decode().split()
    assert hostname == f"belljar-{outcome['id']}" and belljar.leftovers() == []
    return [program, init]


@pytest.mark.parametrize("context", ["ramdisk", "inject"])
def test_an_image_without_any_python_is_brought_one(belljar: Belljar, context: str) -> None:
    image = stock(belljar, "bookworm-bare")
    for start in ("clone", "clone", "cold"):
        program, init = ran(belljar, image, context, start)
        expected = ("/run/belljar/agent/loader", "init") if context == "ramdisk" else (OURS, "systemd")
        assert (program, init) == expected


def test_a_disk_without_any_python_that_boots_by_its_firmware_is_brought_one_by_the_workshop(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm-bare", "--firmware", "bios")
    for _ in range(2):
        assert ran(belljar, image, "inject", "clone", "--memory", "1G") == [OURS, "systemd"]
