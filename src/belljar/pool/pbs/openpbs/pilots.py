"""Jobs of our own in OpenPBS."""

from __future__ import annotations

from belljar.pool.pbs.submitting import OPENPBS as PILOTS

__all__ = ["PILOTS"]
