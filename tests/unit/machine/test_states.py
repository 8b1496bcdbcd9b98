"""The life of a machine is one table; what each end means is another."""

from __future__ import annotations

import inspect

import pytest

from belljar import errors
from belljar.errors import BelljarError
from belljar.machine.states import CLASSES, MOVES, check_move, class_of_error
from belljar.model import Cause, OutcomeClass, Retry, State

ALL_ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, BelljarError)]


def test_every_state_has_its_moves_and_every_cause_its_class() -> None:
    assert set(MOVES) == set(State)
    assert set(CLASSES) == set(Cause)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DONE])
def test_everyone_leaves_by_the_same_door(state: State) -> None:
    reachable, frontier = set(), {state}
    while frontier:
        reachable |= frontier
        frontier = {after for before in frontier for after in MOVES[before]} - reachable
    assert {State.CLEANING, State.DONE} <= reachable
    before_done = [before for before, after in MOVES.items() if State.DONE in after]
    assert before_done == [State.CLEANING]


@pytest.mark.parametrize("state", [State.STARTING, State.BOOTING, State.READY, State.RUNNING])
def test_a_state_in_which_a_domain_may_exist_never_skips_stopping(state: State) -> None:
    assert State.CLEANING not in MOVES[state] and State.STOPPING in MOVES[state]


def test_what_is_not_in_the_table_cannot_happen() -> None:
    for before, after in ((before, after) for before in State for after in State if after not in MOVES[before]):
        with pytest.raises(AssertionError, match=" -> "):
            check_move(before, after)


def test_the_advice_on_retrying_decides_what_the_batch_system_is_told() -> None:
    wanted = {Retry.NEVER: OutcomeClass.USER, Retry.LATER: OutcomeClass.TRANSIENT, Retry.ELSEWHERE: OutcomeClass.NODE}
    assert [kind.__name__ for kind in ALL_ERRORS if class_of_error(kind("x")) is not wanted[kind.retry]] == []
