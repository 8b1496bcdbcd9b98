"""What Python programs and our own code may say of a machine. Type checkers want it, and the API; no job imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from belljar.model import Context, NetworkMode, Share, Start


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
