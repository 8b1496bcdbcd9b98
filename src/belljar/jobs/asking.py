"""The one place where a request is made by the settings of this host: for the command line, for Python programs, and for the
machines that belljar itself wants. What a batch job asks for is read in `belljar.batch.job.request`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack

from belljar.model import Context, MachineSpec, NetworkMode, Request, Share, Start, Work
from belljar.records import fields


class Asked(TypedDict, total=False):
    """What may be said of a machine. None, or nothing: the settings decide."""

    image: str | None
    cpus: int | None
    memory: int | None  # bytes
    disk: int | None  # bytes
    network: NetworkMode | None
    network_name: str
    shares: tuple[Share, ...]
    start: Start | None
    context: Context | None
    scratch: int | None  # bytes
    cache: int | None  # bytes
    name: str
    requester: str
    timeout: float | None  # seconds
    grace: float | None  # seconds between TERM and the end
    keep: bool
    labels: Mapping[str, str]
    collect: tuple[str, ...]
    collect_limit: int


def make_request(settings: Any, work: Work, **asked: Unpack[Asked]) -> Request:
    """A new request for this work."""
    ours = settings.machine
    usual = {name: getattr(ours, name) for name in ("cpus", "memory", "network", "start", "context", "grace")}
    said = {name: value for name, value in asked.items() if value is not None}
    facts: dict[str, Any] = {"image": settings.image.default, **usual, **said}
    facts["labels"] = tuple(asked.get("labels", {}).items())
    machine = {one.name: facts.pop(one.name) for one in fields(MachineSpec) if one.name in facts}
    return Request(os.urandom(6).hex(), MachineSpec(**machine), work, created=time.time(), **facts)
