"""Grid Engine, 8.1.9 and its successors."""

from belljar.batch import System

SYSTEM = System(
    __name__, "Grid Engine", ends_words=True,
    hooks={
        "jsv": "jsv:run", "complexes": "hooks:run", "verifier": "hooks:run",
        "suspend": "methods:run", "resume": "methods:run", "terminate": "methods:run",
    },
)  # fmt: skip
