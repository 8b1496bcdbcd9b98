"""Torque 6."""

from belljar.batch.system import System

SYSTEM = System(__name__, "Torque", ends_words=True)
