"""What accounting asks for is in the outcome and its row, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.stories.conftest import Runtime

from belljar.journal import Ledger
from belljar.machine import JOBOUTPUTS
from belljar.machine.life.claim import claim
from belljar.model import MIB, Account, NetworkMode, Request

ASKED = {
    "requester": "vacuum:7", "labels": [["machinetype", "atlas"], ["space", "site.example"]], "uid": 1001, "account": "bob",
    "cpus": 2, "memory": 128 * MIB, "disk": 9 << 30, "network": "none", "image": "debian12", "name": "one",
}  # fmt: skip


def asked(runtime: Runtime) -> Request:
    request = runtime.request(
        name="one", requester="vacuum:7", labels=(("machinetype", "atlas"), ("space", "site.example")),
        machine={"cpus": 2, "memory": 128 * MIB, "disk": 9 << 30},
        payload={"account": Account("bob", 1001, 1001, "bob")},
    )  # fmt: skip
    return request


def row(runtime: Runtime) -> dict[str, Any]:
    (only,) = [row for row, _ in Ledger(runtime.folders.logs).since()]
    return only


def say(runtime: Runtime, text: bytes) -> None:
    folder = runtime.folders.machine("0123456789ab") / JOBOUTPUTS
    folder.mkdir()
    (folder / "shutdown_message").write_bytes(text)


def test_the_row_tells_who_asked_for_what(runtime: Runtime) -> None:
    runtime.run(asked(runtime))
    told = row(runtime)
    assert {name: told[name] for name in ASKED} == ASKED
    assert told["phases"] and told["guest"] and told["host"] and told["exit_code"] == 0
    assert (told["shutdown_code"], told["shutdown_message"]) == (None, "")


def test_a_reapers_row_tells_the_same(runtime: Runtime) -> None:
    claim(asked(runtime), runtime.folders, lambda point: None).release()
    say(runtime, b"700 the \x1b[2Jnetwork went\nand more")
    runtime.reaper.quick()
    told = row(runtime)
    assert {name: told[name] for name in ASKED} == ASKED
    assert (told["shutdown_code"], told["shutdown_message"]) == (700, "the [2Jnetwork went")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [(b"200 ok", 200, "ok"), (b"nonsense", None, ""), (b"99 no", None, ""), (b"300 " + b"x" * 9999, 300, "x" * 296)],
)
def test_what_the_guest_said_of_its_end(runtime: Runtime, text: bytes, code: int | None, message: str) -> None:
    runtime.at["payload-started"] = lambda: say(runtime, text)
    outcome = runtime.run(asked(runtime))
    assert (outcome.shutdown_code, outcome.shutdown_message) == (code, message)
    assert row(runtime)["shutdown_message"] == message


def test_a_network_is_told_with_its_name(runtime: Runtime) -> None:
    machine = replace(runtime.request().machine, network=NetworkMode.ISOLATED, network_name="lease7")
    assert machine.network_class == "isolated:lease7"
