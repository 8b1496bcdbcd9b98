"""How often each client may ask a service, and how much is sent to it: each has a budget that fills again with time. Over UDP a sender's
address may be forged, so no address is sent more than its budget, and refusals are reported only now and then.
"""

from __future__ import annotations

import socket
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from ipaddress import ip_address, ip_network
from typing import Final

from belljar.records import dataclass

TELL_EVERY: Final = 60.0  # seconds between two lines about one sender
TELL_MOST: Final = 20  # senders that a line is written about in that time
REMEMBERED: Final = 4096  # senders; for one who was silent longest, and is forgotten, a full purse is right


@dataclass(frozen=True)
class Budget:
    """Bytes that go to one sender, or to many: so many at once, and so many a second. A sender with none left waits; an
    answer is sent whole, and what it costs beyond the budget is waited for."""

    burst: float
    rate: float


ALLOWED: Final = Budget(4 << 20, 1 << 20)  # each sender of a network that the site named, and each friend
STRANGER: Final = Budget(128 << 10, 32 << 10)  # each other sender, where no networks are named
STRANGERS: Final = Budget(8 << 20, 2 << 20)  # all these together: their addresses may be made up


class Purse:
    """What is left of a budget."""

    def __init__(self, budget: Budget, now: float) -> None:
        self._budget, self._left, self._at = budget, budget.burst, now

    def has_any(self, now: float) -> bool:
        self._left = min(self._budget.burst, self._left + (now - self._at) * self._budget.rate)
        self._at = now
        return self._left > 0

    def pay(self, cost: float) -> None:
        self._left -= cost


class Askers:
    """Of one kind: each may ask so many times at once, and so many a second. Threads may share it."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._guard, self._known = budget, threading.Lock(), OrderedDict[str, Purse]()

    def may_ask(self, who: str, now: float, *, cost: float = 1.0) -> bool:
        """False: too often. A *cost* of 0 asks whether there is anything left."""
        with self._guard:
            purse = self._known[who] = self._known.pop(who) if who in self._known else Purse(self._budget, now)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
            has_any = purse.has_any(now)
            if has_any:
                purse.pay(cost)
            return has_any


class Sender:
    """What is known of one address."""

    def __init__(self, may_ask: bool, is_stranger: bool, now: float) -> None:
        self.may_ask, self.is_stranger = may_ask, is_stranger
        self.purse = Purse(STRANGER if is_stranger else ALLOWED, now)
        self.refused, self.told_at = 0, -TELL_EVERY


class Senders:
    """All who ask. *allow*: networks that may; none: everybody. *friends*: addresses of hosts that are expected to ask; strangers,
    whose addresses may be made up, cannot use up what is theirs."""

    def __init__(self, allow: Iterable[str], now: float, friends: Collection[str] = ()) -> None:
        self._networks = [ip_network(network, strict=False) for network in allow]
        self._friends = friends
        self._strangers = Purse(STRANGERS, now)
        self._known: OrderedDict[tuple[bytes, bool], Sender] = OrderedDict()
        self._lines, self._lines_since = 0, 0.0

    def find(self, host: str, now: float) -> Sender:
        """Of IPv6 a whole /64 is one: who has one address there has all. The one not heard of for longest is forgotten."""
        whole = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])[:8] if ":" in host else host.encode()
        is_stranger = not self._networks and host not in self._friends
        key = (whole, is_stranger)
        sender = self._known.get(key)
        if sender is None:
            address = ip_address(host.partition("%")[0])
            may_ask = not self._networks or any(address in network for network in self._networks)
            sender = self._known[key] = Sender(may_ask, is_stranger, now)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return sender

    def may_be_sent(self, sender: Sender, now: float) -> bool:
        """Is something left of its budget, and of that of all strangers?"""
        return sender.purse.has_any(now) and (not sender.is_stranger or self._strangers.has_any(now))

    def pay(self, sender: Sender, cost: float) -> None:
        sender.purse.pay(cost)
        if sender.is_stranger:
            self._strangers.pay(cost)

    def refuse(self, sender: Sender, now: float) -> int:
        """Count a refusal. How many there were of this sender since the last line about it, where it is time for one; else 0."""
        sender.refused += 1
        if now - self._lines_since >= TELL_EVERY:
            self._lines, self._lines_since = 0, now
        if now - sender.told_at < TELL_EVERY or self._lines >= TELL_MOST:
            return 0
        count, sender.refused, sender.told_at = sender.refused, 0, now
        self._lines += 1
        return count
