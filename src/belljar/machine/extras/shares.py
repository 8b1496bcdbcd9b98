"""The shares of a machine: folders of the host. A payload never starts with one missing."""

from __future__ import annotations

from collections.abc import Mapping

from belljar.guest import Guest
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Life
from belljar.model import MachineSpec, Payload, Share


def host_folders(machine: MachineSpec) -> list[tuple[str, Share]]:
    """(tag, share) of each."""
    return [(f"share{number}", share) for number, share in enumerate(machine.shares)]


class Shares(Extra):
    """All of a machine's."""

    async def prepare(self, life: Life, there: Equipment) -> Equipment:
        self._machine = life.request.machine
        return there

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """Every share in its place, outer ones first, for one may lie in another."""
        for tag, share in sorted(host_folders(self._machine), key=lambda tagged: tagged[1].target):
            await guest.mount(share, tag)
