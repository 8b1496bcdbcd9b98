"""HTCondor, 9.7 and later."""

from belljar.batch import System

SYSTEM = System(__name__, "HTCondor", ends_words=True, hooks={"prepare": "rules:run"})
