"""OpenPBS, 20 and later."""

from belljar.batch import System

SYSTEM = System(__name__, "OpenPBS")
