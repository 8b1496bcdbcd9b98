"""What Python programs and our own code may say of a machine. Type checkers want it, and the API; no job imports it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from belljar.host.values import duration, size
from belljar.jobs.shares import port_of
from belljar.model import Context, NetworkMode, Pages, Pin, Port, Share, Start, Topology


class Asked(TypedDict, total=False):
    """What may be said of a machine. None, or nothing: the settings decide."""

    image: str | None
    cpus: int | None
    memory: int | str | None  # bytes, or text such as 2G; so are all sizes
    disk: int | str | None
    network: NetworkMode | str | None
    network_name: str
    allow: tuple[str, ...]  # as `--allow` has it
    secrets: tuple[str, ...]  # as `--secret` has it
    shares: tuple[Share, ...]
    devices: tuple[str, ...]  # as `--device` has it
    start: Start | str | None
    context: Context | str | None
    pin: Pin | str | None
    topology: Topology | str | None
    pages: Pages | str | None
    scratch: int | str | None
    cache: int | str | None
    name: str
    requester: str
    timeout: float | str | None  # seconds, or text such as 5m
    grace: float | str | None  # between TERM and the end
    keep: bool
    labels: Mapping[str, str]
    ports: Sequence[Port | str]  # as `--publish` takes them
    collect: tuple[str, ...]
    collect_limit: int | str


READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("memory", "disk", "scratch", "cache", "collect_limit"), size),
    **{"timeout": duration, "grace": duration, "network": NetworkMode, "start": Start, "context": Context},
    **{"pin": Pin, "topology": Topology, "pages": Pages},
}


def understood(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The same with texts read as on the command line. Raises ValueError."""
    read = {key: READ[key](value) if key in READ and isinstance(value, str) else value for key, value in asked.items()}
    ports = (port_of(port) if isinstance(port, str) else port for port in read.get("ports", ()))
    return {**read, "ports": tuple(ports)}
