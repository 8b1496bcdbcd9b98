"""Which spot leases run, as the price and the room move."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.lease.decisions.test_advance import SETTINGS, Story, lease, orders

from belljar.lease import Cause, Do, Instance, InstanceState, Lease, LeaseState, PriceModel, Settings, Tell, Wanted
from belljar.lease.decisions.advance import advance
from belljar.lease.decisions.case import Kind, Seen
from belljar.lease.decisions.spot import shares
from belljar.pool import JobState
from belljar.records import replace

L, I = LeaseState, InstanceState  # noqa: E741
SPOT = replace(SETTINGS, spot_queue="spare", spot_machines=4, spot_notice=120.0)


def bidder(
    id: str, bid: float, count: int = 1, *, started: bool = False, created: float = 0.0, least: int = 0
) -> tuple[Lease, list[Instance]]:
    wanted = Wanted("alma", count=count, least=least, bid=bid)
    found = Lease(id, "ada", wanted, created=created, price=bid if started else None)
    return found, [Instance(f"{id}-{one}", id, one, "ada") for one in range(count)]


def test_without_a_limit_of_ours_everybody_may_start_at_the_least_price() -> None:
    found = shares([bidder("a", 0.3, 9)], Settings())
    assert (found.price, found.served) == (0.1, {})


def test_who_waits_for_machines_that_end_is_not_let_in_before() -> None:
    low, high = bidder("low", 0.2, 4, started=True), bidder("high", 0.5, 3)
    assert shares([low, high], SPOT).served == {"low": 1, "high": 0}
    noticed = [replace(one, cause=Cause.SPOT) if number else one for number, one in enumerate(low[1])]
    assert shares([(low[0], noticed), high], SPOT).served == {"low": 1, "high": 0}
    assert shares([(low[0], noticed[:1]), high], SPOT).served == {"low": 1, "high": 3}


def test_a_room_that_shrinks_takes_the_lowest_bid_first() -> None:
    bids = [bidder("a", 0.2, 2, started=True), bidder("b", 0.5, 2, started=True)]
    assert shares(bids, replace(SPOT, spot_machines=3)).served == {"a": 1, "b": 2}
    assert shares(bids, replace(SPOT, spot_machines=1)).served == {"a": 0, "b": 1}


def test_of_equal_bids_the_earlier_lease_stays() -> None:
    bids = [bidder("late", 0.2, started=True, created=2.0), bidder("early", 0.2, started=True, created=1.0)]
    assert shares(bids, replace(SPOT, spot_machines=1)).served == {"early": 1, "late": 0}


def test_a_group_starts_whole_or_with_its_least() -> None:
    settings = replace(SPOT, spot_machines=2)
    assert shares([bidder("whole", 0.2, 3)], settings).served == {"whole": 0}
    assert shares([bidder("some", 0.2, 3, least=2)], settings).served == {"some": 2}


BIDS = st.lists(
    st.tuples(st.sampled_from([0.05, 0.1, 0.3, 0.9]), st.integers(1, 4), st.booleans(), st.integers(0, 3)), max_size=9
)


@pytest.mark.parametrize("model", PriceModel)
@given(found=BIDS, room=st.integers(1, 9))
def test_what_starts_fits_beside_what_has_not_ended(
    model: PriceModel, found: list[tuple[float, int, bool, int]], room: int
) -> None:
    bids = [
        bidder(f"r-{number}", price, count, started=started, created=since)
        for number, (price, count, started, since) in enumerate(found)
    ]
    may = shares(bids, replace(SPOT, spot_machines=room, spot_price=model))
    held = sum(len(machines) for one, machines in bids if one.price is not None)
    new = sum(may.served[one.id] for one, _ in bids if one.price is None)
    assert new == 0 or held + new <= room
    assert all(not may.served[one.id] or (one.wanted.bid or 0) >= may.price for one, _ in bids)


# -- one lease ---------------------------------------------------------------------------------------------------------


class Bidding(Story):
    share: int | None = None

    def look(self, after: float = 5.0):  # type: ignore[no-untyped-def]
        self.now += after
        while True:
            before = self.case.lease.state
            seen = Seen(self.now, 0.0, self.jobs, frozenset(self.connected), self.share, 0.4)
            step = advance(self.case, seen, self.settings)
            self.case = step.case
            if self.case.lease.state is before:
                return step


def test_a_bid_below_the_price_waits_and_says_so() -> None:
    story = Bidding(lease(bid=0.3), SPOT)
    story.share = 0
    assert story.look().acts == ()
    assert story.case.lease.why == "a bid of 0.3 waits: spot machines cost 0.4, or have no room yet"
    story.share = 1
    assert [act.kind for act in story.look().acts] == [Kind.SUBMIT]
    assert (story.case.lease.price, story.case.lease.why) == (0.4, "")


def test_a_job_that_waits_is_given_up_when_the_price_rises_and_no_try_is_lost() -> None:
    story = Bidding(lease(bid=0.3), SPOT)
    for attempt in (1, 2, 3, 4):
        story.share = 1
        story.jobs = ()
        assert [act.kind for act in story.look().acts] == [Kind.SUBMIT]
        story.job(JobState.WAITING, attempt)
        story.look()
        assert story.case.lease.state is L.QUEUED
        story.share = 0
        assert [(act.kind, act.of) for act in story.look().acts] == [(Kind.CANCEL, "77")]
        assert (story.case.lease.state, story.case.lease.price) == (L.REQUESTED, None)


def test_machines_that_run_get_notice_the_last_first_and_then_end() -> None:
    story = Bidding(lease(count=2, bid=0.3), SPOT).running()
    story.share = 1  # type: ignore[attr-defined]
    assert (Do.EXTEND, "i-1") in orders(story.look())
    first, last = story.case.instances
    assert (first.cause, last.cause, last.state) == (None, Cause.SPOT, I.RUNNING)
    assert last.deadline == story.now + 120 and last.seconds == last.deadline - last.launched
    assert (Do.EXTEND, "i-1") not in orders(story.look())
    assert (Do.STOP, "i-1") in orders(story.look(after=120))
    story.hears(Tell.INSTANCE, 1, 2, instance="i-1", state=I.TERMINATED, cause=Cause.EXPIRED)
    assert story.case.instances[1].cause is Cause.SPOT
    story.share = 0  # type: ignore[attr-defined]
    story.look()
    story.hears(Tell.INSTANCE, 0, 2, instance="i-0", state=I.TERMINATED, cause=Cause.EXPIRED)
    story.look()
    assert (story.case.lease.state, story.case.lease.cause) == (L.DRAINING, Cause.SPOT)


def test_a_machine_that_does_not_run_yet_ends_without_notice() -> None:
    story = Bidding(lease(bid=0.3), SPOT).active()
    story.share = 0  # type: ignore[attr-defined]
    assert (Do.STOP, "i-0") in orders(story.look())
    assert story.case.instances[0].stop
