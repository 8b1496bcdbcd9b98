"""Jobs of our own in Torque."""

from __future__ import annotations

from belljar.batch.pbs.pilots import TORQUE as PILOTS

__all__ = ["PILOTS"]
