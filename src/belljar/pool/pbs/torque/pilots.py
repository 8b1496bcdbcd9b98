"""Jobs of our own in Torque."""

from __future__ import annotations

from belljar.pool.pbs.submitting import TORQUE as PILOTS

__all__ = ["PILOTS"]
