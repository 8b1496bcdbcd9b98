"""A machine is ended only when its system said twice, far enough apart, that it does not know the job."""

from __future__ import annotations

from typing import Any, cast

import pytest

from belljar.batch.node import Answer, Live, ask, decide
from belljar.errors import CommandFailed, CommandMissing


def live(key: str = "m", *jobs: str, system: str = "slurm") -> Live:
    return Live(key, system, frozenset(jobs or ("1",)))


def answer(*ids: str) -> dict[str, Answer]:
    return {"slurm": Answer(frozenset(ids))}


UNREACHABLE = {"slurm": Answer(None, "no")}


def test_one_answer_is_not_enough_and_two_far_enough_apart_are() -> None:
    first = decide([live()], answer(), {}, 100.0, 60.0)
    assert (first.to_end, first.waiting) == ((), ("m",))
    early = decide([live()], answer(), first.remembered, 159.0, 60.0)
    assert (early.to_end, early.remembered) == ((), {"m": 100.0})
    late = decide([live()], answer(), early.remembered, 160.0, 60.0)
    assert late.to_end == ("m",)


def test_even_with_no_time_between_two_answers_are_needed() -> None:
    first = decide([live()], answer(), {}, 100.0, 0.0)
    assert first.to_end == ()
    assert decide([live()], answer(), first.remembered, 100.0, 0.0).to_end == ("m",)


@pytest.mark.parametrize("answers", [UNREACHABLE, {}])
def test_a_system_that_cannot_be_asked_knows_all_its_jobs(answers: dict[str, Answer]) -> None:
    decision = decide([live()], answers, {"m": 0.0}, 1e9, 60.0)
    assert (decision.to_end, decision.waiting) == ((), ())
    assert decision.remembered == {"m": 0.0}, "the first answer still counts"


def test_a_job_that_is_known_again_begins_anew() -> None:
    known = decide([live()], answer("1"), {"m": 0.0}, 1000.0, 60.0)
    assert known.remembered == {}
    assert decide([live()], answer(), known.remembered, 2000.0, 60.0).to_end == ()


def test_any_of_a_jobs_ids_keeps_its_machine() -> None:
    task = live("m", "10_3", "13")
    assert decide([task], answer("13"), {"m": 0.0}, 1e6, 60.0).to_end == ()
    assert decide([task], answer("10_3"), {"m": 0.0}, 1e6, 60.0).to_end == ()
    assert decide([task], answer("10_4", "10"), {"m": 0.0}, 1e6, 60.0).to_end == ("m",)


def test_another_systems_answer_says_nothing() -> None:
    other = live("m", "1", system="gridengine")
    assert decide([other], answer(), {"m": 0.0}, 1e6, 60.0).to_end == ()


def test_machines_that_are_gone_are_forgotten() -> None:
    assert decide([], answer(), {"m": 0.0, "n": 5.0}, 1e6, 60.0).remembered == {}


def test_a_memory_from_the_future_begins_now() -> None:
    assert decide([live()], answer(), {"m": 9e9}, 100.0, 60.0).remembered == {"m": 100.0}


class Paper:
    def alive(self) -> tuple[str, ...]:
        return ("squeue",)

    def living(self, printed: bytes) -> frozenset[str]:
        if printed == b"nonsense":
            raise ValueError("no list")
        return frozenset(printed.decode().split())


@pytest.mark.parametrize("error", [CommandFailed("timed out"), CommandMissing("none"), OSError(12, "memory")])
def test_a_command_that_fails_is_no_answer(error: Exception) -> None:
    def run(argv: tuple[str, ...]) -> bytes:
        raise error

    found = ask(cast(Any, Paper()), run)
    assert found.living is None and found.trouble


def test_a_list_is_an_answer_even_when_it_is_empty_and_nonsense_is_none() -> None:
    assert ask(cast(Any, Paper()), lambda argv: b"1 2").living == {"1", "2"}
    assert ask(cast(Any, Paper()), lambda argv: b"").living == frozenset()
    assert ask(cast(Any, Paper()), lambda argv: b"nonsense").living is None
