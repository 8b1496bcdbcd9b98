"""`belljar bait check`: is everything there that a bait needs? One line each, before the first job comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar import api
from belljar.bait import Settings
from belljar.bait.acts import command
from belljar.bait.machines.keeper import GRACE, LARGEST_CONF, joining_request, last_line, line_of, secret, why_ended
from belljar.bait.networks.classes import FAMILIES, TABLE
from belljar.errors import BelljarError
from belljar.findings import Finding, fail_if
from belljar.host.commands import run, which
from belljar.host.files import read_capped
from belljar.model import MIB, Share
from belljar.pool import Member, NodeState, Pool
from belljar.records import replace

LEAST_SECRET = 32  # bytes, as munge has it
TINY = 256 * MIB


def needs(
    settings: Settings, pool: Pool, image: Callable[[str], str], shares: tuple[Share, ...] = (), *, has_addresses: bool
) -> Iterator[Finding]:
    """*image*: what is wrong with an image of this name; *has_addresses*: `network.bridge_addresses` is set."""
    packages = " ".join(pool.packages) or "..."
    for name in settings.images:
        yield fail_if(f"image {name}", image(name), f"belljar image build debian --name {name} --packages {packages}")
    for kind, bridge in settings.networks:
        wrong = "" if os.access(f"/sys/class/net/{bridge}/bridge", os.F_OK) else "this host has none"
        yield fail_if(f"bridge {bridge}", wrong, f"Make it, or correct `networks.{kind}`.")
    if len(settings.networks) > 1 or settings.closed:
        yield fail_if("network classes", _apart(), "belljar bait rules | nft -f - (docs/batch/bait/guide.md)")
    wrong = "" if has_addresses else "none are set, and machines ask nobody for one"
    yield fail_if("addresses of machines", wrong, "Set `network.bridge_addresses` (docs/jobs/networks.md).")
    for share in shares:
        wrong = "" if os.path.isdir(share.source) else "this host has no such folder"
        yield fail_if(f"share {share.source}", wrong, "Make it, or correct `shares` in bait.toml.")
    wrong = "" if settings.max_cpus <= (most := os.cpu_count() or 1) else f"{settings.max_cpus}: this host has {most}"
    yield fail_if("max_cpus", wrong, "Correct `max_cpus` in bait.toml, or leave it out.")
    if settings.key != Path():
        yield fail_if("key", _key(settings), "Name the pool's key in bait.toml: `key`.")
    text = wrong = ""
    try:
        text = read_capped(settings.conf, LARGEST_CONF).decode("utf-8", "replace")
    except OSError as exc:
        wrong = f"{settings.conf}: {exc.strerror}"
    yield fail_if("conf", wrong, "Name the system's settings in bait.toml: `conf`.")
    ask: Callable[..., str] = lambda *argv: run(argv, timeout=20.0).out.decode("utf-8", "replace")  # noqa: E731
    try:
        yield from pool.needs(ask, text, settings.names, settings.queue, settings.feature, settings.hosts)
    except (BelljarError, ValueError) as exc:
        why = str(getattr(exc, "message", exc)).replace("\n", " ")
        yield fail_if(settings.system, why, "Is it there, and does it answer on this host?")


async def joins(settings: Settings, pool: Pool, shares: tuple[Share, ...]) -> Finding:
    """A tiny machine becomes a node, and goes. So image, key, addresses, hosts, shares and feature prove themselves."""
    why, id = "", pool.new_machine(())
    name = pool.name_of(id)
    try:
        member = Member(name, 1, TINY, (settings.feature,), (), "\n".join(settings.hosts))
        request = joining_request(
            member, settings, pool, image=settings.images[0], shares=shares, requester="bait check"
        )
        machine = await api.astart(replace(request, id=id), stdin=secret(settings))
        try:
            why = await _joined(machine, name, settings, pool)
        finally:
            with suppress(BelljarError):  # it may not have joined
                await command(pool.close(name, "it was only tried"))
            await machine.astop(GRACE)
            for argv in pool.remove(name):
                with suppress(BelljarError):
                    await command(argv)
    except (BelljarError, OSError, ValueError) as exc:
        why = line_of(exc)
    return fail_if("a machine joins", why, "The reason is the last line of what the machine wrote: `belljar logs ID`.")


async def _joined(machine: api.Machine, name: str, settings: Settings, pool: Pool) -> str:
    """Slurm tells nobody that a node has come: it is asked, as a bait does."""
    end = time.monotonic() + settings.join
    while time.monotonic() < end:
        with suppress(TimeoutError):
            await machine.await_end(settings.cycle)
            return why_ended(machine.view.outcome or {}, settings.images[0], machine.stderr)
        node = pool.nodes(await command(pool.query_nodes())).get(name)
        if node is not None and node.state is NodeState.IDLE:
            return "" if settings.queue in node.queues else f"its node is not in partition {settings.queue}"
    return f"{machine.id}: it did not join within {settings.join:.0f} s: {last_line(machine.stderr)}"


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
