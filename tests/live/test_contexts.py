"""Guests that run their own init: a stock Debian, given the agent by cloud-init or by hand before its first boot.

The payload contract in these is another file's; here it is the ways in, and how they fail. A whole Debian under emulation
takes minutes, so most of this is slow.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.live.conftest import Belljar
from tests.live.stock.images import stock

slow = [pytest.mark.slow, pytest.mark.timeout(1800)]


def outcome_of(belljar: Belljar, *words: str) -> tuple[dict[str, Any], str, str]:
    report = belljar.folder / "report.json"
    done = belljar.run("--report", str(report), *words, timeout=1700)
    return json.loads(report.read_bytes()), done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    ("context", "missing"), [("cloud-init", "no cloud-init"), ("inject", "no systemd"), ("ssh", "no ssh server")]
)
def test_a_way_that_the_image_cannot_go_is_refused_before_anything_is_started(
    belljar: Belljar, context: str, missing: str
) -> None:
    done = belljar.run("--context", context, "--", "true")
    assert done.returncode == 125 and missing in done.stderr.decode()
    assert belljar.leftovers() == []


def test_the_way_that_was_taken_is_told(belljar: Belljar) -> None:
    outcome, _, _ = outcome_of(belljar, "--context", "ramdisk", "--", "true")
    assert (outcome["exit_code"], outcome["context"]) == (0, "ramdisk")
    shown = belljar("show", outcome["id"]).stdout.decode()
    assert "context" in shown and "ramdisk" in shown


@pytest.mark.parametrize("context", [pytest.param(way, marks=slow) for way in ("cloud-init", "inject")])
def test_the_images_own_init_is_up_when_the_job_begins_and_clones_are_nobodys_twin(
    belljar: Belljar, context: str
) -> None:
    image = stock(belljar, "bookworm")
    script = "cat /proc/1/comm; systemctl is-active multi-user.target cloud-final; hostname; cat /etc/machine-id; pgrep -c sshd"
    said = []
    for start in ("clone", "clone", "cold"):
        outcome, out, err = outcome_of(
            belljar, "--image", image, "--context", context, "--start", start, "--", "sh", "-c", script
        )
        assert (outcome["start"], outcome["context"]) == (start, context), err
        lines = out.split()
        assert lines[0] == "systemd" and lines[1] == "active"
        said.append(lines[3:5])
        assert lines[3] == f"belljar-{outcome['id']}"
    assert len({machine_id for _, machine_id in said}) == 3
    assert belljar.leftovers() == []
