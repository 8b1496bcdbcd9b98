"""A deadline is an order: it is moved while the machine lives, journaled first, and told to the guest."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.host.files import short_path
from belljar.machine.extras.features import values
from belljar.model import Cause, Outcome, Request

ID = "0123456789ab"


async def ask(runtime: Runtime, **question: Any) -> dict[str, Any]:
    with short_path(runtime.folders.machine(ID)) as folder:
        reader, writer = await asyncio.open_unix_connection(f"{folder}/control.sock")
    writer.write(json.dumps({"do": "deadline", **question}).encode() + b"\n")
    answer: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return answer


def kept(runtime: Runtime, request: Request, *moves: tuple[float, dict[str, Any]]) -> tuple[Outcome, list[Any], float]:
    """The outcome, the answers, and after how many seconds it came. Each is asked so long after the payload's start."""

    async def keep() -> tuple[Outcome, list[Any], float]:
        loop, started = asyncio.get_running_loop(), asyncio.Event()
        runtime.at["payload-started"] = started.set
        work = asyncio.ensure_future(runtime._keep(request, ()))
        await started.wait()
        begun, answers = loop.time(), []
        for seconds, question in moves:
            await asyncio.sleep(begun + seconds - loop.time())
            answers.append(await ask(runtime, **question))
        outcome = await work
        return outcome, answers, loop.time() - begun

    return runtime.leap(keep())


def test_a_later_deadline_lets_the_payload_go_on(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=5000.0))
    outcome, answers, _ = kept(runtime, runtime.request(timeout=3600.0), (1800.0, {"by": 3600.0}))
    assert outcome.cause is Cause.FINISHED and answers[0]["ok"]
    (moved,) = [event for event in runtime.journal() if event["event"] == "deadline"]
    assert moved["at"] == answers[0]["at"]


def test_an_earlier_one_ends_it_then(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))
    outcome, answers, seconds = kept(runtime, runtime.request(timeout=3600.0), (60.0, {"by": -3000.0}))
    assert answers[0]["ok"] and outcome.cause is Cause.WALLTIME and "moved to" in outcome.reason
    assert 590 < seconds < 620


def test_one_without_a_limit_can_be_given_one_and_then_more(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))
    import time

    at = time.time() + 100.0
    outcome, answers, seconds = kept(
        runtime, runtime.request(), (0.0, {"by": 5.0}), (1.0, {"at": at}), (2.0, {"by": 50.0})
    )
    assert "no deadline" in answers[0]["error"] and answers[1] == {"ok": True, "at": at} and answers[2]["ok"]
    assert outcome.cause is Cause.WALLTIME and 140 < seconds < 160


def test_what_is_past_is_now(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None))
    outcome, answers, seconds = kept(runtime, runtime.request(timeout=3600.0), (10.0, {"at": 5.0}))
    assert answers[0]["ok"] and outcome.cause is Cause.WALLTIME and seconds < 20


def test_the_guests_features_change_with_it(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=5000.0))
    kept(runtime, runtime.request(timeout=3600.0), (1.0, {"by": 3600.0}))
    assert "place" in runtime.guests[-1].done
    machine, job = values(runtime.request(timeout=3600.0), 1000.0, deadline=8200.0)
    assert (machine["shutdowntime"], job["shutdowntime_job"], job["wall_limit_secs"]) == ("8200", "8200", "7200")


def test_a_batch_systems_own_limit_still_counts(runtime: Runtime) -> None:
    _, job = values(runtime.request(created=1000.0, wall_limit=500.0), 1000.0, deadline=8200.0)
    assert job["wall_limit_secs"] == "500"


@pytest.mark.parametrize("question", [{"at": "noon"}, {"by": True}, {"at": 1e300}, {"at": 1e299}, {"until": 5}])
def test_what_is_no_moment_is_refused(runtime: Runtime, question: dict[str, Any]) -> None:
    runtime.plan(Script(runs_for=5.0))
    outcome, answers, _ = kept(runtime, runtime.request(timeout=3600.0), (1.0, question))
    assert "error" in answers[0] and outcome.cause is Cause.FINISHED


def test_when_it_has_passed_it_cannot_be_moved_any_more(runtime: Runtime) -> None:
    runtime.plan(Script(runs_for=None, obeys=frozenset()))
    outcome, answers, _ = kept(runtime, runtime.request(timeout=100.0, grace=50.0), (120.0, {"by": 1000.0}))
    assert "being ended" in answers[0]["error"] and outcome.cause is Cause.WALLTIME
