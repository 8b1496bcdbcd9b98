"""Which spot leases run now. A look sums up all bids; `advance` acts on each lease's share. Pure, but for the price's history.

A lease that waits starts when the price lets it and there is room: whole, or with `least`. One whose job waits in the batch system
gives that up when the price rises. Machines that run get notice, the last ones first; their room is free when they have ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from belljar.lease import Event, Instance, Lease, Settings
from belljar.lease.decisions.case import Act, Case, Kind, Seen, ended
from belljar.lease.decisions.prices import MODELS, Bid, Market, market
from belljar.lease.orders import Do, Order
from belljar.lease.states import Cause, InstanceState
from belljar.lease.store import Book
from belljar.records import replace

PRICES = "spot"  # events of this lease are the price's history


def shares(spot: Sequence[tuple[Lease, Sequence[Instance]]], settings: Settings) -> Market:
    """How many machines each may have; one that is not named, as many as it wants. *spot*: leases that live and have a bid, with their
    live machines."""
    if not settings.spot_machines:
        return Market(settings.min_price, {})
    bids = [_bid(*one) for one in spot]
    found = market(bids, settings.spot_machines, settings.min_price, MODELS[settings.spot_price])
    may = {lease.id: found.served.get(lease.id, 0) for lease, _ in spot if lease.price is not None}
    room = settings.spot_machines - sum(len(machines) for lease, machines in spot if lease.id in may)
    for bid in sorted((one for one in bids if one.id not in may), key=lambda one: (-one.price, one.since, one.id)):
        may[bid.id] = share if (share := found.served.get(bid.id, 0)) <= room else 0
        room -= may[bid.id]
    return Market(found.price, may)


def look(book: Book, leases: Sequence[Lease], settings: Settings, now: float) -> Market:
    """Of these live leases. A price that has moved is written down."""
    spot = [(one, book.find(Instance, lease=one.id, live=1)) for one in leases if one.wanted.bid is not None]
    found, before = shares(spot, settings), price(book, settings)
    if found.price != before:
        book.add(Event(PRICES, "price", str(before), str(found.price), now))
    return found


def price(book: Book, settings: Settings) -> float:
    """The last that was written down."""
    return next((float(one.after) for one in book.latest(PRICES)), settings.min_price)


def _bid(lease: Lease, machines: Sequence[Instance]) -> Bid:
    """Machines that end, or got notice, bid no more. Before it starts a lease needs all of them, or its `least`."""
    count = sum(not one.stop and one.cause is not Cause.SPOT for one in machines)
    least = lease.wanted.least or (count if lease.price is None else 1)
    return Bid(lease.id, lease.wanted.bid or 0.0, count, lease.created, min(least, count))


# -- one lease ---------------------------------------------------------------------------------------------------------


def let_in(case: Case, seen: Seen) -> Case:
    """It starts when the price and the room let it: whole, or with as many as its owner said are enough."""
    wanted, live = case.lease.wanted, staying(case)
    share = len(live) if seen.share is None else seen.share
    if not share:
        return case.but(why=waits(case.lease, seen))
    why, surplus = "the price of spot machines left room for fewer", live[share:]
    case = case.each(lambda one: ended(one, Cause.CAPACITY, why, seen.now) if one in surplus else one)
    fewer = replace(wanted, count=share, per_node=min(wanted.per_node, share))
    return case.but(wanted=fewer, price=seen.price, why="")


def noticed(case: Case, seen: Seen, settings: Settings) -> tuple[Case, tuple[Act, ...]]:
    """Machines beyond its share, the last ones first: one that runs ends when its notice is over, also when the service is away; one
    that does not ends at once."""
    gone, end = staying(case)[seen.share :] if seen.share is not None else [], seen.now + settings.spot_notice
    why = f"a bid of {case.lease.wanted.bid:g}; spot machines cost {seen.price:g}, or have less room" if gone else ""

    def told(one: Instance) -> Instance:
        if one not in gone:
            return one
        if one.state is not InstanceState.RUNNING:
            return replace(one, cause=Cause.SPOT, why=why, stop=True)
        until = min(one.deadline, end)
        return replace(one, cause=Cause.SPOT, why=why, deadline=until, seconds=max(1.0, until - one.launched))

    case, ids = case.each(told), {one.id for one in gone}
    told_ones = [one for one in case.live if one.id in ids and not one.stop]
    return case, tuple(Act(Kind.ORDER, one.slot, Order(Do.EXTEND, one.id, seconds=one.seconds)) for one in told_ones)


def staying(case: Case) -> list[Instance]:
    return [one for one in case.live if not one.stop and one.cause is not Cause.SPOT]


def waits(lease: Lease, seen: Seen) -> str:
    return f"a bid of {lease.wanted.bid:g} waits: spot machines cost {seen.price:g}, or have no room yet"
