"""The Python environment of this program, in a machine: shared, at the same path, so that what a framework sends by name is found."""

from __future__ import annotations

import os
import sys

from belljar.errors import BadOption


def environment() -> str:
    """The folder of this virtual environment. Raises BadOption where there is none."""
    if sys.prefix == sys.base_prefix:
        raise BadOption(
            f"{sys.executable}: is in no virtual environment, so its packages cannot be shared with a machine",
            hint="Make one (`python3 -m venv`), and install framework and belljar there.",
        )
    return sys.prefix


def run_words(*words: str) -> list[str]:
    """`belljar run` with these words, up to its command, which finds this environment's programs."""
    prefix = environment()
    path = f"PATH={prefix}/bin:{os.defpath.lstrip(':')}"
    return [sys.executable, "-m", "belljar", "run", "--share", prefix, "--env", path, *words, "--"]
