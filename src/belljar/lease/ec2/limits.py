"""How often somebody may ask: a bucket of tokens each, which fills again with time. Pure."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST = 4096  # that are remembered; the one who was silent longest is forgotten, for whom a full bucket is right


class Buckets:
    """Of one kind of asker: so many a second, and so many at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._guard = threading.Lock()
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when that was so

    def take(self, who: str, now: float, *, cost: float = 1.0) -> bool:
        """False: too often. Nothing is taken then. A *cost* of 0 asks whether there is anything left."""
        with self._guard:
            left, since = self._left.get(who, (self._burst, now))
            left = min(self._burst, left + max(0.0, now - since) * self._rate)
            is_enough = left >= max(cost, 1.0)
            self._left[who] = (left - cost if is_enough else left, now)
            self._left.move_to_end(who)
            while len(self._left) > MOST:
                self._left.popitem(last=False)
            return is_enough
