"""A keeper that is started before its machine is asked for: who takes it, what becomes of one that nobody needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.errors import BadSetting, ImageUnknown
from belljar.machine.outside.detached import Keeper
from belljar.model import Account, MachineSpec, Payload, Request, RunPayload

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


class Played:
    """Takes every request."""

    made: list[Played]

    def __init__(self, **options: Any) -> None:
        self.options, self.is_there, self.took, self.is_released = options, True, list[Request](), False
        self.made.append(self)

    def take(self, request: Request) -> str:
        self.took.append(request)
        return request.id

    def release(self) -> None:
        self.is_released = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    Played.made = []
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
