"""Pi, by four machines that throw darts."""

from __future__ import annotations

import random


def hits(seed: int, darts: int) -> int:
    """Darts within the quarter of a circle."""
    draw = random.Random(seed).random
    return sum(draw() ** 2 + draw() ** 2 <= 1 for _ in range(darts))


if __name__ == "__main__":
    from belljar.api import Executor

    with Executor(max_workers=2, timeout=300) as executor:
        print(4 * sum(executor.map(hits, range(4), [20_000] * 4)) / 80_000)
