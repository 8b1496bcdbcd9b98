"""What machines on spare nodes cost, and who gets them: two price models. Pure.

A bid is for so many machines at no more than so much; the price is the same for all. Bids above the price are served in full, those
equal to it share what is left evenly, those below it get nothing. Both models are those of the Nimbus workspace service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from belljar.lease import PriceModel
from belljar.records import dataclass


@dataclass(frozen=True)
class Bid:
    """Of one request."""

    id: str
    price: float  # at most
    count: int
    since: float = 0.0  # the earlier one is served first where machines cannot be shared evenly
    least: int = 1  # with fewer it is of no use


@dataclass(frozen=True)
class Market:
    """The price now, and how many machines each bid gets."""

    price: float
    served: Mapping[str, int]


Model = Callable[[Sequence[Bid], int, float], float]


def most_machines(bids: Sequence[Bid], capacity: int, least: float) -> float:
    """The price at which as many machines as possible are used: the lowest bid that is served; *least* while there is room."""
    left = capacity
    for bid in sorted(bids, key=lambda one: -one.price):
        left -= bid.count
        if left <= 0:
            return max(least, bid.price)
    return least


def most_profit(bids: Sequence[Bid], capacity: int, least: float) -> float:
    """The price that brings most: price times machines. Among equals the lowest, which serves more."""

    def profit(price: float) -> float:
        return price * min(capacity, sum(bid.count for bid in bids if bid.price >= price))

    prices = sorted({bid.price for bid in bids if bid.price >= least})
    # Where higher bids fill the capacity, those at the price would get nothing: such a price is none.
    real = [one for one in prices if sum(bid.count for bid in bids if bid.price > one) < capacity]
    return max(real, key=profit, default=least)


MODELS: dict[PriceModel, Model] = {PriceModel.MACHINES: most_machines, PriceModel.PROFIT: most_profit}


def market(bids: Iterable[Bid], capacity: int, least: float, model: Model = most_machines) -> Market:
    """Never more machines than there are, and no bid below the price is served; one that is not named gets none."""
    valid = sorted((bid for bid in bids if bid.price >= least and bid.count > 0), key=lambda one: (one.since, one.id))
    if capacity <= 0:
        return Market(max([least, *(bid.price for bid in valid)]), {})
    price = model(valid, capacity, least)
    served = {bid.id: bid.count for bid in valid if bid.price > price}
    even = _evenly([bid for bid in valid if bid.price == price], capacity - sum(served.values()))
    return Market(price, served | even)


def _evenly(bids: Sequence[Bid], left: int) -> dict[str, int]:
    """What each needs at least, the earlier first; then one machine for each in turn: two bids for more than they get differ by one
    at most, where they need no more."""
    given: dict[str, int] = {}
    for bid in bids:
        if bid.least <= left:
            given[bid.id] = bid.least
            left -= bid.least
    while left > 0 and (open_ones := [bid for bid in bids if given.get(bid.id, bid.count) < bid.count]):
        bid = min(open_ones, key=lambda one: given[one.id])
        given[bid.id], left = given[bid.id] + 1, left - 1
    return given
