"""What a factory's machines rely on, with real guests: images by address, a power-off from inside, heartbeats, deadlines that move."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import STORE, Belljar
from tests.live.small_disc import make_disc
from tests.live.stock.images import served
from tests.live.test_vacuum import Queues, Space, queues, until

__all__ = ["queues"]
NAME = "127.0.0.7"
HEAD = """
[space]
name = "vac.example.org"
factories = {factories}
port = {port}
[factory]
name = "{name}"
processors = 3
memory = "256M"
cycle = 2
overload = 1000
"""
TYPES = """
[machinetype.off]
share = 1
image = "debian12"
user_data = "{folder}/off"
[machinetype.silent]
share = 1
image = "debian12"
user_data = "{folder}/silent"
heartbeat_file = "beat"
fizzle = 3
[machinetype.long]
share = 1
image = "debian12"
user_data = "{folder}/long"
"""
PUT = """#!/bin/sh
put() {
    python3 -c 'import http.client as h, sys; c = h.HTTPConnection("169.254.169.253"); c.request("PUT", "/joboutputs/" + sys.argv[1],
sys.argv[2]); assert c.getresponse().status == 201' "$1" "$2"
}
"""
OFF = "put shutdown_message '200 Work done'; echo o > /proc/sysrq-trigger; sleep 60"
LONG = """trap 'put until "$(cat /etc/machinefeatures/shutdowntime)"; put shutdown_message "100 Stopped"; exit 0' TERM
while :; do sleep 1 & wait $!; done"""
PIPE = """
[pipe.micro]
url = "{{url}}/pipe.json"
share = 1
"""


def said(space: Space, event: str) -> list[dict[str, Any]]:
    return [one for one in space.log(NAME) if one["event"] == event]


def stop(space: Space) -> None:
    process = space.processes[NAME]
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert space.belljar.leftovers() == []


def test_machines_end_as_they_may_and_as_they_must(belljar: Belljar, tmp_path: Path, queues: Queues) -> None:
    for name, script in (("off", OFF), ("silent", "sleep 1000"), ("long", LONG)):
        (tmp_path / name).write_text(PUT + script)
    space = Space(belljar, tmp_path, queues, (NAME,), HEAD + TYPES)
    space.start(NAME)
    state = str(space.state(NAME))

    # One that powers itself off has done its work; one that gives no sign of life is ended, and its type backs off.
    until(lambda: {one["machinetype"] for one in said(space, "machine ended")} >= {"off", "silent"}, "two ends")
    ends = {one["machinetype"]: (one["message"], one["cause"]) for one in said(space, "machine ended")}
    assert ends["off"] == ("200 Work done", "finished")
    assert ends["silent"] == ("700 Heartbeat file not created", "cancelled")
    until(lambda: "backing-off" in space.reasons(NAME, "silent", 0.0), "the silent type to back off")

    # A broken file is refused once, and changes nothing.
    whole = space.file(NAME).read_text()
    space.file(NAME).write_text(whole + "[machinetype.Broken_Name]\nshare = 'x'\n")
    space.processes[NAME].send_signal(signal.SIGHUP)
    (refused,) = until(lambda: said(space, "settings refused"), "the settings to be refused")
    assert "machinetype.Broken_Name" in refused["why"]
    until(lambda: belljar("vacuum", "check", "--state", state).returncode == 1, "the check to warn")
    space.file(NAME).write_text(whole)
    space.processes[NAME].send_signal(signal.SIGHUP)
    until(lambda: belljar("vacuum", "check", "--state", state).returncode == 0, "the check to be content")

    # All are to be gone by a moment: the deadline moves, the features say so, and there is time for a last word.
    long, *_ = [id for id, name in until(space.machines, "a machine").items() if name == "long"]
    assert belljar("vacuum", "drain", "--by", "+15s", "--state", state).returncode == 0
    at = json.loads((space.state(NAME) / "drain.json").read_text())["shutdown_time"]
    until(lambda: not space.machines(), "an empty host")
    (row,) = [row for row in space.rows() if row["id"] == long]
    assert (row["cause"], row["shutdown_code"], row["shutdown_message"]) == ("walltime", 100, "Stopped")
    assert at - 2 <= row["ended"] <= at + 25
    until_then = int(belljar("logs", long, "--joboutput", "until").stdout)
    assert at - 2 < until_then <= at  # rounded to the safe side
    stop(space)


@pytest.mark.slow
def test_a_pipe_brings_an_image_by_its_address_and_its_machines_work(
    belljar: Belljar, tmp_path: Path, queues: Queues, request: pytest.FixtureRequest
) -> None:
    made = belljar.run("--", "sh", "-c", "cat /boot/vmlinuz-*")
    assert made.returncode == 0, made.stderr.decode()
    web = tmp_path / "web"
    web.mkdir()
    (tmp_path / "vmlinuz").write_bytes(made.stdout)
    (ramdisk,) = [path for path in (STORE / "images").glob("sha256-*/initrd")][:1]
    make_disc(tmp_path / "small.iso", tmp_path / "vmlinuz", ramdisk)
    shutil.move(tmp_path / "small.iso", web / "micro.iso")
    (web / "user_data").write_text('echo "200 Work done by ##user_data_machinetype##" > /m; put shutdown_message /m\n')
    with served(web) as url:
        entry = {"suffix": "a", "target_share": 1, "root_image": f"{url}/micro.iso", "user_data": f"{url}/user_data"}
        missing = {**entry, "suffix": "b", "root_image": f"{url}/missing.iso"}
        (web / "pipe.json").write_text(json.dumps({"machinetypes": [entry, missing]}))
        own = Belljar(tmp_path / "own", tmp_path / "own/store")
        request.addfinalizer(own.close)
        own.env["BELLJAR_NETWORK_ALLOW"] = url.removeprefix("http://")
        space = Space(own, tmp_path, queues, (NAME,), HEAD + PIPE.format().replace("{url}", url))
        space.start(NAME)
        until(lambda: said(space, "machine ended"), "a machine to end", 240)
        (failed,) = [one for one in said(space, "failed") if one["about"] == "micro-b"]
        assert "404" in failed["why"]  # once, though it was tried for each place
        assert own("vacuum", "drain", "--state", str(space.state(NAME))).returncode == 0
        until(lambda: not space.machines(), "an empty host", 240)
        stop(space)
    assert {(row["cause"], row["shutdown_code"]) for row in space.rows()} == {("finished", 200)}
    assert {row["shutdown_message"] for row in space.rows()} == {"Work done by micro-a"}
    shown = own("image", "list", "--format", "json")
    assert [name for one in json.loads(shown.stdout) for name in one["names"] if name.startswith("from-micro.iso-")]
