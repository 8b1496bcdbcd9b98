"""`belljar bait check`: is everything there that a bait needs? One line each, before the first job comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from belljar.bait import Settings
from belljar.bait.machines.keeper import LARGEST_CONF, secret
from belljar.bait.networks.classes import FAMILIES, TABLE
from belljar.batch import Need, Pool
from belljar.errors import BelljarError
from belljar.host.commands import run, which
from belljar.host.files import read_capped

LEAST_SECRET = 32  # bytes, as munge has it


def needs(settings: Settings, pool: Pool, image: Callable[[str], str], *, has_addresses: bool) -> Iterator[Need]:
    """*image*: what is wrong with an image of this name; *has_addresses*: `network.bridge_addresses` is set."""
    packages = " ".join(pool.nodes.packages) or "..."
    for name in settings.images:
        yield Need(f"image {name}", image(name), f"belljar image build debian --name {name} --packages {packages}")
    for kind, bridge in settings.networks:
        wrong = "" if os.access(f"/sys/class/net/{bridge}/bridge", os.F_OK) else "this host has none"
        yield Need(f"bridge {bridge}", wrong, f"Make it, or correct `networks.{kind}`.")
    if len(settings.networks) > 1 or settings.closed:
        yield Need("network classes", _apart(), "belljar bait rules | nft -f - (docs/bait.md)")
    wrong = "" if has_addresses else "none are set, and machines ask nobody for one"
    yield Need("addresses of machines", wrong, "Set `network.bridge_addresses` in belljar.toml (docs/networks.md).")
    if settings.key != Path():
        yield Need("key", _key(settings), "Name the pool's key in bait.toml: `key`.")
    text = wrong = ""
    try:
        text = read_capped(settings.conf, LARGEST_CONF).decode("utf-8", "replace")
    except OSError as exc:
        wrong = f"{settings.conf}: {exc.strerror}"
    yield Need("conf", wrong, "Name the system's settings in bait.toml: `conf`.")
    ask: Callable[..., str] = lambda *argv: run(argv, timeout=20.0).out.decode("utf-8", "replace")  # noqa: E731
    try:
        yield from pool.nodes.needs(ask, text, settings.names, settings.queue, settings.feature, settings.hosts)
    except (BelljarError, ValueError) as exc:
        said = str(getattr(exc, "message", exc)).replace("\n", " ")
        yield Need(settings.system, said, "Is it there, and does it answer on this host?")


def _apart() -> str:
    printed = run(["nft", "list", "tables"], timeout=20.0).out if which("nft") else b""
    tables = printed.decode("ascii", "replace").splitlines()
    missing = [family for family in FAMILIES if f"table {family} {TABLE}" not in tables]
    return f"no rules keep them apart: there is no table {missing[0]} {TABLE}" if missing else ""


def _key(settings: Settings) -> str:
    try:
        return "" if len(secret(settings)) >= LEAST_SECRET else f"{settings.key}: shorter than {LEAST_SECRET} bytes"
    except BelljarError as exc:
        return exc.message
