"""OpenPBS, 20 and later."""

from belljar.batch.system import System

SYSTEM = System(__name__, "OpenPBS")
