"""Doors for other people's frameworks: each adapter is one file, stands over `belljar.api` alone, and imports its framework
only when that asks for it. Nothing of ours imports an adapter.

    nemo_gym.py        a sandbox provider of NeMo Gym, found by its entry point
    harbor.py          an environment of Harbor, given by `--env MODULE:CLASS`
    mini_swe_agent.py  an environment of mini-swe-agent, given as `environment_class`
    openenv.py         a container provider of OpenEnv
    dask.py, parsl.py, submitit.py  workers and tasks of these in machines

`sandbox.py` is what the first four share. The others share the Python environment of this program with their machines, at the
same path, so that what a framework sends by name is found.
"""

from __future__ import annotations

import os
import sys

from belljar.errors import BadOption


def environment() -> str:
    """The folder of this virtual environment. Raises BadOption where there is none."""
    if sys.prefix == sys.base_prefix:
        problem = f"{sys.executable}: not in a virtual environment, so its packages cannot be shared with a machine"
        raise BadOption(problem, hint="Make one (`python3 -m venv`), and install framework and belljar there.")
    return sys.prefix


def run_words(*words: str) -> list[str]:
    """`belljar run` with these words, up to its command, which finds this environment's programs."""
    prefix = environment()
    path = f"PATH={prefix}/bin:{os.defpath.lstrip(':')}"
    return [sys.executable, "-m", "belljar", "run", "--share", prefix, "--env", path, *words, "--"]
