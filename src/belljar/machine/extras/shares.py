"""The shares of a machine: folders of the host, exports of file servers.

A server is looked for before the machine is started, and a payload never starts with a mount missing.
"""

from __future__ import annotations

from collections.abc import Mapping

from belljar.errors import ShareMissing
from belljar.guest import Guest
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Life
from belljar.model import FileServer, MachineSpec, Payload, Request, Share, ShareKind
from belljar.network import find_server
from belljar.network import plan as plan_link
from belljar.records import replace


def host_folders(machine: MachineSpec) -> list[tuple[str, Share]]:
    """(tag, share) of those that are devices of the machine."""
    folders = (share for share in machine.shares if share.kind is not ShareKind.NFS)
    return [(f"share{number}", share) for number, share in enumerate(folders)]


def has_virtiofs(machine: MachineSpec) -> bool:
    return any(share.kind is ShareKind.VIRTIOFS for share in machine.shares)


def warm_for(machine: MachineSpec) -> tuple[str, ...]:
    """What a template's guest is to have loaded for such machines."""
    return (*(("nfs",) if has_nfs(machine) else ()), *(("virtiofs",) if has_virtiofs(machine) else ()))


def has_nfs(machine: MachineSpec) -> bool:
    return any(share.kind is ShareKind.NFS for share in machine.shares)


def no_way_to_the_server(request: Request) -> ShareMissing:
    """The refusal of an export in a machine without a network, in the words of whoever asked."""
    share = next(one for one in request.machine.shares if one.kind is ShareKind.NFS)
    asked, hint = "batch.shares:", 'The site sets `machine.network = "user"`, or shares a folder of the host.'
    if request.requester == "cli":
        asked, hint = "--share", "Add `--network user`, or share a folder of the host."
    return ShareMissing(f"{asked} {share.source}: a machine without a network cannot reach a file server", hint=hint)


class Shares(Extra):
    """All of a machine's. Each server has answered before the machine is started."""

    async def prepare(self, life: Life, there: Equipment) -> Equipment:
        """Raises ShareMissing, ServerSilent."""
        self._life, machine = life, life.request.machine
        link = plan_link(machine.network, life.request.id)
        self._servers: dict[str, FileServer] = {}  # by the place where its export is mounted
        for share in machine.shares:
            if share.kind is ShareKind.NFS:
                self._servers[share.target] = server = await find_server(share.source, link)
                life.record.tell("server", share=share.source, guest_sees=server.address)
        return replace(there, servers=tuple(self._servers.values()))

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """Every share in its place, outer ones first, for one may lie in another."""
        machine = self._life.request.machine
        tags = {share.target: tag for tag, share in host_folders(machine)}
        for share in sorted(machine.shares, key=lambda one: one.target):
            if share.kind is ShareKind.NFS:
                with self._life.phase("mount"):
                    await guest.mount_nfs(self._servers[share.target], share.target, readonly=share.readonly)
            else:
                await guest.mount(share, tags[share.target])
