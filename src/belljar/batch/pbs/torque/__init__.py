"""Torque 6."""

from belljar.batch import System

SYSTEM = System(__name__, "Torque", ends_words=True)
