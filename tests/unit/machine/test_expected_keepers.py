"""A keeper that is started before its machine is asked for: who takes it, what becomes of one that nobody needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.errors import BadRequest, BadSetting, BelljarError, HostError, ImageUnknown
from belljar.machine.outside.detached import Keeper
from belljar.model import Account, MachineSpec, Payload, Request, RunPayload
from belljar.records import replace

REQUEST = Request(
    "0123456789ab", MachineSpec("none", 1, 64 << 20), RunPayload(Payload((b"true",), Account("a", 1, 1, "a")))
)


@pytest.fixture
def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keeper]:
    """A real one, of a host that has nothing."""
    for name in ("STORE", "RUN", "SCRATCH", "LOGS"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name}", str(tmp_path / name))
    made = Keeper(tied=True)
    yield made
    made.release()


def test_one_that_waited_answers_as_any_other(keeper: Keeper) -> None:
    assert keeper.is_there
    with pytest.raises(ImageUnknown):
        keeper.take(REQUEST)
    assert not keeper.is_there


def test_one_that_was_asked_for_nothing_is_gone_when_it_is_released(keeper: Keeper) -> None:
    pid = keeper._process.pid
    keeper.release()
    assert not keeper.is_there
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_one_whose_asker_dies_ends_by_itself_and_makes_nothing(keeper: Keeper, tmp_path: Path) -> None:
    assert keeper._process.stdin is not None
    keeper._process.stdin.close()
    assert keeper._process.wait(30) != 0
    assert [*tmp_path.rglob("machines/*")] == []


def test_one_that_starts_many_answers_for_each(keeper: Keeper) -> None:
    """*keeper*: for the settings. A machine that cannot be made stops none of the others from being asked for."""
    many = Keeper(tied=True, count=3)
    requests = [replace(REQUEST, id=f"{number:012x}") for number in range(2)]
    answers = many.take_all([*requests, replace(REQUEST, id="not an id")])
    assert [type(answer) for answer in answers] == [ImageUnknown, ImageUnknown, BadRequest]
    assert not many.is_there


def test_one_that_starts_many_and_is_killed_has_answered_what_it_can(keeper: Keeper) -> None:
    many = Keeper(count=2)
    many._process.kill()
    many._process.wait()
    assert [type(answer) for answer in many.take_all([REQUEST, REQUEST])] == [HostError, HostError]


def test_of_many_machines_all_live_or_none(made: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(api.Machine, "ask", lambda self, do: asked.append((self.id, do)))
    assert [machine.id for machine in api.start_many(REQUEST, 3)] == [request.id for request in made[0].took]
    assert len({request.id for request in made[0].took}) == 3 and made[0].options["count"] == 3 and asked == []
    Played.refuses = True
    with pytest.raises(ImageUnknown):
        api.start_many(REQUEST, 3)
    assert asked == [(request.id, "kill") for request in made[1].took[:2]]


def test_one_of_many_tied_machines_is_released_alone(made: list[Played], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(api.Machine, "ask", lambda self, do: asked.append((self.id, do)))
    first, _ = api.start_many(REQUEST, 2, tied=True)
    first.release()
    assert asked == [(first.id, "stop")] and not made[0].is_released


@pytest.mark.parametrize("count", [0, -1])
def test_no_machine_is_not_a_number_of_machines(made: list[Played], count: int) -> None:
    with pytest.raises(ValueError, match=f"count: {count}"):
        api.start_many(REQUEST, count)
    assert made == []


class Played:
    """Takes every request."""

    made: list[Played]
    refuses = False  # the last of many

    def __init__(self, **options: Any) -> None:
        self.options, self.is_there, self.took, self.is_released = options, True, list[Request](), False
        self.count = options.get("count", 1)
        self.made.append(self)

    def take(self, request: Request) -> str:
        self.took.append(request)
        return request.id

    def take_all(self, requests: list[Request]) -> list[str | BelljarError]:
        self.took += requests
        ids: list[str | BelljarError] = [request.id for request in requests]
        return [*ids[:-1], ImageUnknown("no such image")] if self.refuses else ids

    def release(self) -> None:
        self.is_released = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    Played.made = []
    monkeypatch.setattr(Played, "refuses", False)
    monkeypatch.setattr(api, "Keeper", Played)
    yield Played.made
    api.expect_none()


def test_the_next_tied_machine_has_the_one_that_is_expected_and_those_after_it_their_own(made: list[Played]) -> None:
    api.expect()
    api.expect()
    assert len(made) == 1 and made[0].options["tied"]
    api.start(REQUEST, stdin=b"words", tied=True)  # its keeper is told where they are when it starts
    api.start(REQUEST)
    assert made[0].took == [] and len(made) == 3
    api.start(REQUEST, tied=True)
    api.start(REQUEST, tied=True)
    assert [len(one.took) for one in made] == [1, 1, 1, 1]


def test_one_that_died_meanwhile_is_not_asked(made: list[Played]) -> None:
    api.expect()
    made[0].is_there = False
    api.start(REQUEST, tied=True)
    assert made[0].is_released and made[0].took == [] and len(made[1].took) == 1


def test_what_is_expected_no_more_is_released_once(made: list[Played]) -> None:
    api.expect()
    api.expect_none()
    api.expect_none()
    assert made[0].is_released and len(made) == 1


def test_what_keeps_one_from_starting_is_told_by_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(**options: Any) -> None:
        raise BadSetting("machine.cpus: none", hint="")

    monkeypatch.setattr(api, "Keeper", none)
    api.expect()
    with pytest.raises(BadSetting):
        api.start(REQUEST, tied=True)
