"""The tables of moves: nothing is stuck, nothing comes back from its end."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from belljar.lease.states import (
    EC2,
    INSTANCE_MOVES,
    LEASE_ENDS,
    LEASE_MOVES,
    SLOT_MOVES,
    Cause,
    InstanceState,
    LeaseState,
    SlotState,
    end_of,
)

TABLES: tuple[tuple[type[Enum], Mapping[Any, frozenset[Any]]], ...] = (
    (LeaseState, LEASE_MOVES),
    (InstanceState, INSTANCE_MOVES),
    (SlotState, SLOT_MOVES),
)


@pytest.mark.parametrize(("kind", "moves"), TABLES)
def test_every_state_leads_to_an_end_and_no_end_leads_on(kind: type[Enum], moves: Mapping[Any, frozenset[Any]]) -> None:
    assert set(moves) == set(kind)
    ends = {one for one in kind if not moves[one]}
    for state in kind:
        reached, before = {state}, set[Any]()
        while reached != before:
            before, reached = reached, reached.union(*(moves[one] for one in reached))
        assert reached & ends, f"{state} leads nowhere"
    assert ends == (LEASE_ENDS if kind is LeaseState else ends)


def test_a_lease_that_may_have_a_job_ends_by_way_of_draining() -> None:
    assert {state for state, after in LEASE_MOVES.items() if after & LEASE_ENDS} == {LeaseState.DRAINING}


def test_what_ran_never_waits_again() -> None:
    """EC2's waiters fail where an instance goes back."""
    order = ["pending", "running", "shutting-down", "terminated"]
    for before, afters in INSTANCE_MOVES.items():
        for after in afters:
            assert order.index(EC2[after][1]) >= order.index(EC2[before][1])
    assert {one for one in InstanceState if EC2[one][0] == 0} == {
        InstanceState.QUEUED, InstanceState.CLAIMED, InstanceState.STAGING, InstanceState.BOOTING,
    }  # fmt: skip


@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("was_active", [True, False])
def test_every_cause_has_its_end(cause: Cause, was_active: bool) -> None:
    assert end_of(cause, was_active=was_active) in LEASE_ENDS


def test_who_gives_up_before_it_began_has_cancelled() -> None:
    assert end_of(Cause.USER, was_active=False) is LeaseState.CANCELLED
    assert end_of(Cause.USER, was_active=True) is LeaseState.RELEASED
    assert end_of(Cause.EXPIRED, was_active=True) is LeaseState.EXPIRED
    assert end_of(Cause.NODE_LOST, was_active=True) is LeaseState.FAILED
