"""From the promised time to the batch system's limit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.errors import OverLimit
from belljar.lease import Settings, Wanted
from belljar.lease.decisions.margins import Queue, fitting, margins

SETTINGS = Settings(staging=300, barrier=120, grace=30, margin=30)


def test_two_hours_on_one_node() -> None:
    found = margins(7200, 1, SETTINGS, quantum=60)
    assert found.pilot == 300 + 7200 + 30 + 2
    assert found.walltime == 7620  # 2 + 7532 + 30 = 7564, in whole minutes


def test_a_group_waits_for_its_last_node() -> None:
    assert margins(7200, 4, SETTINGS).pilot == margins(7200, 1, SETTINGS).pilot + 120


def test_the_refusal_tells_what_the_queue_can_give() -> None:
    with pytest.raises(OverLimit, match=r"takes 7620 s .* gives 7200 s") as caught:
        fitting(Wanted("alma", seconds=7200), SETTINGS, Queue(7200, 60))
    assert caught.value.hint == "Ask for 6836 s or less, or for another queue."
    assert fitting(Wanted("alma", seconds=6836), SETTINGS, Queue(7200, 60)).walltime == 7200


def test_a_queue_that_is_too_short_for_any_lease_is_said_to_be() -> None:
    with pytest.raises(OverLimit) as caught:
        fitting(Wanted("alma", seconds=60), SETTINGS, Queue(200))
    assert caught.value.hint == "Ask for another queue."


@given(st.floats(1, 1e6), st.integers(1, 64), st.sampled_from([1, 60]), st.floats(1, 1e6))
def test_the_batch_system_never_ends_a_pilot_that_keeps_its_time(
    seconds: float, nodes: int, quantum: int, limit: float
) -> None:
    found = margins(seconds, nodes, SETTINGS, quantum=quantum)
    assert found.walltime % quantum == 0 and found.walltime >= found.pilot + SETTINGS.margin
    try:
        assert fitting(Wanted("alma", nodes, seconds=seconds), SETTINGS, Queue(limit, quantum)).walltime <= limit
    except OverLimit:
        assert found.walltime > limit
