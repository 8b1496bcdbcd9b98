"""How often somebody may ask: a purse for each, of what fills again with time. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict

from belljar.service.udp.senders import Budget, Purse

MOST = 4096  # that are remembered; the one who was silent longest is forgotten, for whom a full purse is right


class Askers:
    """Of one kind: each may ask so many times at once, and so many a second. Threads may share it."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self._guard, self._known = budget, threading.Lock(), OrderedDict[str, Purse]()

    def may_ask(self, who: str, now: float, *, cost: float = 1.0) -> bool:
        """False: too often. A *cost* of 0 asks whether there is anything left."""
        with self._guard:
            purse = self._known[who] = self._known.pop(who) if who in self._known else Purse(self._budget, now)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
            has_any = purse.has_any(now)
            if has_any:
                purse.pay(cost)
            return has_any
