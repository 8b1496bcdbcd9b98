"""Price models: what holds for any bids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.lease.decisions.prices import Bid, Model, market, most_machines, most_profit

PRICES = st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
BIDS = st.lists(st.tuples(PRICES, st.integers(1, 8), st.integers(0, 3)), max_size=12).map(
    lambda found: [Bid(f"b{number}", price, count, since) for number, (price, count, since) in enumerate(found)]
)
MODELS = pytest.mark.parametrize("model", [most_machines, most_profit])


@MODELS
@given(bids=BIDS, capacity=st.integers(0, 20))
def test_what_holds_of_every_market(model: Model, bids: list[Bid], capacity: int) -> None:
    found = market(bids, capacity, 0.1, model)
    served, by_id = found.served, {bid.id: bid for bid in bids}
    assert sum(served.values()) <= capacity
    assert found.price >= 0.1
    assert all(by_id[one].price >= found.price and count <= by_id[one].count for one, count in served.items())
    if capacity:
        assert all(served.get(bid.id) == bid.count for bid in bids if bid.price > found.price)
    equal = [bid for bid in bids if bid.price == found.price and served.get(bid.id, 0) < bid.count]
    assert len({served.get(bid.id, 0) for bid in equal}) <= 2
    counts = [served.get(bid.id, 0) for bid in equal]
    assert not counts or max(counts) - min(counts) <= 1


@MODELS
@given(bids=BIDS, capacity=st.integers(1, 20), number=st.integers(0, 11))
def test_who_bids_more_gets_no_less(model: Model, bids: list[Bid], capacity: int, number: int) -> None:
    if number >= len(bids):
        return
    bid = bids[number]
    raised = [Bid(one.id, one.price + 5 if one is bid else one.price, one.count, one.since) for one in bids]
    before, after = market(bids, capacity, 0.1, model), market(raised, capacity, 0.1, model)
    assert after.served.get(bid.id, 0) >= before.served.get(bid.id, 0)


def test_while_there_is_room_the_price_is_the_least() -> None:
    found = market([Bid("a", 1.0, 2), Bid("b", 0.5, 1)], 4, 0.1)
    assert found.price == 0.1 and found.served == {"a": 2, "b": 1}


def test_a_full_house_costs_what_the_last_one_served_bids() -> None:
    found = market([Bid("a", 1.0, 2), Bid("b", 0.5, 4), Bid("c", 0.2, 1)], 4, 0.1)
    assert found.price == 0.5 and found.served == {"a": 2, "b": 2}


def test_profit_may_leave_machines_empty() -> None:
    bids = [Bid("a", 2.0, 2), Bid("b", 0.2, 2)]
    assert market(bids, 4, 0.1, most_profit).price == 2.0
    assert market(bids, 4, 0.1, most_machines).price == 0.2


def test_who_needs_a_group_gets_it_whole_or_not_at_all() -> None:
    bids = [Bid("a", 1.0, 3, 1.0, least=3), Bid("b", 1.0, 3, 2.0, least=3), Bid("c", 1.0, 2, 3.0)]
    assert market(bids, 4, 0.1).served == {"a": 3, "c": 1}
