"""Folders of the guest that are kept with a machine's records. Nothing about them is the job's affair."""

from __future__ import annotations

import stat
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import AgentLost, GuestRefused
from belljar.hypervisor import EventKind
from belljar.machine.orders import Kill, Signal
from belljar.model import Cause, Outcome, OutcomeClass, Request, Start, Transfer


def wanted(runtime: Runtime, **changes: Any) -> Request:
    return replace(runtime.request(machine={"start": Start.COLD}, **changes), collect=("/var/log",), collect_limit=1000)


def noted(runtime: Runtime) -> dict[str, Any]:
    return next(event for event in runtime.journal() if event["event"] == "collected")


def as_it_was(outcome: Outcome, code: int = 0) -> bool:
    return (outcome.cause, outcome.klass, outcome.exit_code) == (Cause.FINISHED, OutcomeClass.PAYLOAD, code)


def test_the_archive_lies_with_the_records_and_is_the_owners_alone(runtime: Runtime) -> None:
    runtime.plan(Script(collected=b"x" * 1000, exit_code=3))
    assert as_it_was(runtime.run(wanted(runtime)), 3), "also after a payload that failed"
    archive = runtime.folders.ended("0123456789ab") / "collect.tar"
    assert archive.read_bytes() == b"x" * 1000 and stat.S_IMODE(archive.stat().st_mode) == 0o600
    assert (noted(runtime)["bytes"], noted(runtime)["cut_off"], noted(runtime)["trouble"]) == (1000, False, "")


def test_who_asks_for_nothing_gets_nothing(runtime: Runtime) -> None:
    runtime.plan(Script(collected=b"x"))
    runtime.run(runtime.request())
    assert "collect" not in runtime.guests[-1].done
    assert not (runtime.folders.ended("0123456789ab") / "collect.tar").exists()


def test_it_comes_after_the_files_of_the_job_and_before_the_end(runtime: Runtime) -> None:
    outputs = (Transfer("/tmp/x", "x"),)
    runtime.plan(Script())
    runtime.run(wanted(runtime, payload={"outputs": outputs}))
    done = runtime.guests[-1].done
    assert done.index("get") < done.index("collect")
    states = [event.get("state", event["event"]) for event in runtime.journal()]
    assert states.index("collected") < states.index("stopping")


def test_what_is_too_much_is_cut_off_and_said(runtime: Runtime) -> None:
    runtime.plan(Script(collected=b"x" * 1001))
    assert as_it_was(runtime.run(wanted(runtime)))
    assert (noted(runtime)["bytes"], noted(runtime)["cut_off"]) == (1000, True)


@pytest.mark.parametrize(
    "script",
    [
        Script(refuses={"collect": GuestRefused("it refuses to collect")}),
        Script(collects_for=None),
        Script(collects_for=31.0),
    ],
)
def test_a_guest_that_refuses_or_takes_too_long_changes_nothing(runtime: Runtime, script: Script) -> None:
    runtime.plan(replace(script, exit_code=5))
    assert as_it_was(runtime.run(wanted(runtime)), 5)
    assert noted(runtime)["trouble"] in ("it refuses to collect", "not finished after 30 s")
    assert runtime.leftovers() == []


@pytest.mark.parametrize("order", [Kill(), Signal(15)])
def test_whoever_ends_the_machine_meanwhile_does_not_end_the_job(runtime: Runtime, order: Any) -> None:
    runtime.plan(Script(boots_in=1.0, runs_for=10.0, collects_for=20.0, exit_code=4))
    assert as_it_was(runtime.run(wanted(runtime), (15.0, order)), 4)
    assert runtime.leftovers() == []


def test_a_machine_that_dies_meanwhile_does_not_fail_the_job(runtime: Runtime) -> None:
    runtime.plan(Script(collects_for=None, exit_code=4))
    runtime.at["status-written"] = lambda: runtime.domain().happen(EventKind.EXITED, status=9)
    assert as_it_was(runtime.run(wanted(runtime)), 4)
    assert runtime.leftovers() == []


def test_a_payload_whose_files_could_not_be_had_is_collected_too(runtime: Runtime) -> None:
    runtime.plan(Script(outputs=frozenset(), collected=b"why"))
    outcome = runtime.run(wanted(runtime, payload={"outputs": (Transfer("/tmp/x", "x"),)}))
    assert (outcome.klass, outcome.exit_code) == (OutcomeClass.USER, 0), "its missing file is still told"
    assert (runtime.folders.ended("0123456789ab") / "collect.tar").read_bytes() == b"why"


def test_a_guest_that_is_gone_is_not_asked(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=1.0, runs_for=None, dies_after=5.0))
    outcome = runtime.run(wanted(runtime))
    assert outcome.error == AgentLost.__name__ or outcome.cause is Cause.GUEST_LOST
    assert "collect" not in runtime.guests[-1].done


def test_a_file_in_the_way_is_not_written_through(runtime: Runtime) -> None:
    runtime.plan(Script(collected=b"x"))

    def place() -> None:
        (runtime.folders.machine("0123456789ab") / "collect.tar").symlink_to("/tmp/elsewhere-of-belljar")

    runtime.at["payload-ended"] = place
    assert as_it_was(runtime.run(wanted(runtime)))
    assert "exists" in noted(runtime)["trouble"]
