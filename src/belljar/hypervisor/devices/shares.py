"""Shared folders, of whatever kind: where they are on the bus, and the processes that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from belljar.hints import TYPE_CHECKING, Any
from belljar.hypervisor import DomainSpec, Settings
from belljar.hypervisor.devices import Kind, Server, joined, served, share_kind, share_kinds

if TYPE_CHECKING:
    from belljar.hypervisor.qemu.process.launch import Launch

LAST_RESORT = 10.0  # seconds SIGKILL may take


class Shares(Kind):
    """Those that are served have a port each, which is free in a template."""

    def check(self, spec: DomainSpec, settings: Settings) -> None:
        for kind in share_kinds(spec):
            kind.check(settings)

    def words(self, launch: Launch) -> list[str]:
        spec = launch.spec
        words = [word for share in spec.shares for word in share_kind(share.kind).words(share)]
        for number, _ in enumerate(served(spec)):
            words += ["-device", f"pcie-root-port,id=port{number},chassis={number + 1},io-reserve=0"]
        devices = self.plugged(spec) if launch.folders else []  # nobody serves a template's
        for number, (device, fd) in enumerate(zip(devices, launch.folders, strict=True)):
            words += ["-chardev", f"socket,id=folder{number},fd={fd}"]
            words += ["-device", joined(device)] if launch.incoming < 0 else []
        return words

    def plugged(self, spec: DomainSpec) -> list[dict[str, Any]]:
        return [
            {**share_kind(share.kind).plug(share), "chardev": f"folder{number}", "bus": f"port{number}"}
            for number, share in enumerate(served(spec))
        ]

    def xml(self, spec: DomainSpec, ends: object, place: Callable[[], str]) -> Iterator[str]:
        return (share_kind(share.kind).xml(share, place()) for share in spec.shares)


async def serve(spec: DomainSpec, settings: Settings) -> list[Server]:
    """A server for each folder that needs one, all running. Raises NotPermitted, HostError, CommandMissing; then none is left."""
    servers: list[Server] = []
    try:
        for share in served(spec):
            servers.append(share_kind(share.kind).serve(spec, share, settings))
        for server in servers:
            await server.ready()
    except BaseException:
        await asyncio.shield(end(servers))
        raise
    return servers


async def end(servers: Sequence[Server], *, grace: float = 0.0) -> None:
    """Kill them, and wait until they are gone. In the *grace* they end by themselves: their line is closed."""
    for seconds in (grace, LAST_RESORT):
        if seconds and servers:
            await asyncio.wait({server.over for server in servers}, timeout=seconds)
        for server in servers:
            server.kill()


SHARES = Shares()
