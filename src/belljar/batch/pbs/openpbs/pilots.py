"""Jobs of our own in OpenPBS."""

from __future__ import annotations

from belljar.batch.pbs.pilots import OPENPBS as PILOTS

__all__ = ["PILOTS"]
