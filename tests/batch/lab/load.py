"""How much longer things may take on a host that does others as well."""

from __future__ import annotations

import os


def stretched(seconds: float) -> float:
    """The seconds a thing may take that takes fewer on an idle host: in proportion to what waits for a processor."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
