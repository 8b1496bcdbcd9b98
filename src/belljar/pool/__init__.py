"""The door of the pool room: a batch system seen from outside, its jobs and its nodes. Nothing here runs a command.

    load(name)         a Pool, where belljar can add worker nodes: nodes.py in the system's folder
    pilots_of(name)    Pilots, where belljar can submit jobs of its own: pilots.py in the system's folder
    terms.py           the words that all systems share

`batch/` is about one job that belljar was started for; this is about all of them, for a policy that works beside the batch system and
owns none of its jobs.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import cast

from belljar import batch
from belljar.errors import BadOption
from belljar.pool.terms import (
    UNFIT_CODE,
    JobId,
    JobState,
    JobView,
    Member,
    NamedJob,
    NodeState,
    NodeView,
    PilotJob,
    Pilots,
    Pool,
    Revoked,
    machine_of,
    node_of,
)  # fmt: skip

__all__ = ["UNFIT_CODE", "JobId", "JobState", "JobView", "Member", "NamedJob", "NodeState", "NodeView", "PilotJob", "Pilots", "Pool", "Revoked", "load", "machine_of",
           "node_of", "pilots_of"]  # fmt: skip


def load(name: str) -> Pool:
    """The jobs and nodes of this system. Raises BadOption where belljar cannot add worker nodes to it."""
    return cast("Pool", _module(name, "nodes", "belljar adds no worker nodes to this system").POOL)


def pilots_of(name: str) -> Pilots:
    """How jobs of our own are started in this system. Raises BadOption where that is not built."""
    return cast("Pilots", _module(name, "pilots", "it cannot run pilots yet").PILOTS)


def _module(name: str, file: str, lack: str) -> ModuleType:
    able = batch.systems_in(__name__, __path__, f"{file}.py")
    if name not in able:
        batch.load(name)  # says so where there is no such system at all
        raise BadOption(f"{name}: {lack}", hint=f"Known are {', '.join(sorted(able))}.")
    return import_module(f"{able[name]}.{file}")
