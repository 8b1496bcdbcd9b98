"""What Python programs and our own code may say of a machine. Type checkers want it, and the API; no job imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from belljar.model import Context, NetworkMode, Share, Start


class Asked(TypedDict, total=False):
    """What may be said of a machine. None, or nothing: the settings decide."""

    image: str | None
    cpus: int | None
    memory: int | str | None  # bytes, or text such as 2G; so are all sizes
    disk: int | str | None
    network: NetworkMode | str | None
    network_name: str
    shares: tuple[Share, ...]
    start: Start | str | None
    context: Context | str | None
    scratch: int | str | None
    cache: int | str | None
    name: str
    requester: str
    timeout: float | str | None  # seconds, or text such as 5m
    grace: float | str | None  # between TERM and the end
    keep: bool
    labels: Mapping[str, str]
    collect: tuple[str, ...]
    collect_limit: int | str
