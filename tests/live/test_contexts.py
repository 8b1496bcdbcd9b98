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

slow = [pytest.mark.slow, pytest.mark.timeout(3600)]


def outcome_of(belljar: Belljar, *words: str) -> tuple[dict[str, Any], str, str]:
    report = belljar.folder / "report.json"
    done = belljar.run("--report", str(report), *words, timeout=3000)
    return json.loads(report.read_bytes()), done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(("context", "missing"), [("cloud-init", "no cloud-init"), ("inject", "no systemd")])
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


CLOUD_CONFIG = """\
#cloud-config
write_files:
  - path: /etc/mine
    content: |
      written by ##user_data_option_who##
runcmd:
  - [sh, -c, 'cat /etc/mine > /root/both; hostname > /root/host']
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_user_data_is_carried_out_before_the_job_begins_with_no_network_at_all(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm")
    (belljar.folder / "user-data").write_text(CLOUD_CONFIG)
    outcome, out, err = outcome_of(
        belljar, "--image", image, "--context", "cloud-init", "--network", "none", "--user-data", str(belljar.folder / "user-data"),
        "--user-data-option", "who=alice", "--", "sh", "-c", "cat /root/both; ls /sys/class/net; cloud-init status; blkid -L cidata",
    )  # fmt: skip
    assert (outcome["start"], outcome["start_reason"]) == ("cold", "it has user data of its own"), err
    assert out.split() == ["written", "by", "alice", "lo", "status:", "done", "/dev/vdb"], (out, err)
    assert belljar.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_user_data_that_fails_ends_the_machine_and_is_the_reason(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm")
    (belljar.folder / "user-data").write_text("#!/bin/sh\necho it went wrong >&2\nexit 3\n")
    outcome, out, err = outcome_of(
        belljar, "--image", image, "--context", "cloud-init", "--user-data", str(belljar.folder / "user-data"), "--", "echo", "ran"
    )  # fmt: skip
    assert (outcome["exit_code"], out) == (None, "") and "cloud-init failed" in outcome["reason"], (outcome, err)
    assert b"it went wrong" in belljar("logs", outcome["id"], "--console").stdout
    assert belljar.leftovers() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_clones_that_others_reach_show_host_keys_of_their_own(belljar: Belljar) -> None:
    image = stock(belljar, "bookworm")
    shows = """\
        systemctl is-active ssh
        cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub
        ssh-keyscan -t ed25519 127.0.0.1 2> /dev/null | cut -d' ' -f3
        ip -br addr show up
    """
    words = ("--image", image, "--context", "cloud-init", "--start", "clone", "--network", "isolated:keys")
    seen = []
    for _ in range(2):
        outcome, out, err = outcome_of(belljar, *words, "--", "sh", "-c", shows)
        assert outcome["exit_code"] == 0, (outcome, err)
        service, file, server, *cards = out.splitlines()
        assert service == "active" and file == server, out
        assert any("10.98.0.1/24" in card for card in cards), cards
        seen.append(file)
    assert len(set(seen)) == 2
    assert belljar.leftovers() == []
