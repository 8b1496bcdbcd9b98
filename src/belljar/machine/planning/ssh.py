"""The ssh context of a machine: its keys, its card, and the guest the agent is brought to. Imported by machines that take this way."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from belljar.context import Seed, ssh_seed
from belljar.errors import ContextImpossible
from belljar.guest import Guest, SshKeys
from belljar.host.files import write_whole
from belljar.host.guard.egress import Egress, rule
from belljar.hypervisor import Domain, Nic
from belljar.image import BootFiles, Image, ssh_part
from belljar.machine.life.life import Life
from belljar.machine.parts import MakeSshGuest, Parts
from belljar.model import NetworkMode
from belljar.network import Link
from belljar.network import plan as plan_link
from belljar.records import dataclass, replace

PORT = 22
SAME_CARD = "000000000000"
EVERYWHERE = rule("0.0.0.0/0")
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class SshContext:
    """The way into one guest that boots. A clone has no use for it: its agent is there."""

    user: str
    grows: bool
    injects: bool  # belljar's ramdisk puts the keys in; else the image's cloud-init
    make_guest: MakeSshGuest
    fresh_keys: Callable[[str], SshKeys]

    @cached_property
    def keys(self) -> SshKeys:
        """Of one boot. Drawn when they are first asked for, as that takes longer than all else of a clone. Raises SshMissing."""
        return self.fresh_keys(self.user)

    def seed(self) -> Seed:
        """Raises SshMissing."""
        keys = self.keys
        return ssh_seed(self.user, keys.public, keys.host_private, keys.host_public, grows=self.grows)

    def write_ramdisk(self, path: Path, base: Path) -> None:
        """The image's ramdisk with the keys behind it."""
        keys = self.keys
        part = ssh_part(keys.public, keys.host_private, keys.host_public, keys.host_dropbear)
        write_whole(path, base.read_bytes() + part)

    def guest(self, life: Life, *, is_draft: bool) -> Callable[[Domain], Guest]:
        """How the agent is brought to a guest that boots, and then spoken to. What becomes of each try is in the journal."""
        return lambda domain: self.make_guest(
            domain, self.keys, lambda what: life.record.tell("ssh", seen=what), is_draft
        )

    def card(self, link: Link) -> Nic:
        """The card by which ssh comes in at the boot; without a network it leads to belljar alone."""
        if link.mode is NetworkMode.NONE:
            own = plan_link(NetworkMode.USER, SAME_CARD)
            return Nic(own.mode, own.mac, Egress(deny=(EVERYWHERE,)), forward=PORT, is_shut=True)
        if link.mode is not NetworkMode.USER or link.has_line:
            raise ContextImpossible(
                f"--context ssh reaches its guest through QEMU's own user network, not by --network {link.mode.value}"
            )
        return Nic(link.mode, link.mac, link.egress or Egress(allow=(EVERYWHERE,)), forward=PORT)


def card_of_clone(nic: Nic, link: Link) -> Nic:
    """The same card where nobody comes in by it any more; so it needs no guard, but the one its machine's network has."""
    return replace(nic, forward=0, egress=link.egress)


def make(parts: Parts, image: Image, files: BootFiles, *, grows: bool) -> SshContext:
    """For this image. belljar's ramdisk brings the keys if cloud-init would not. Raises ContextImpossible."""
    user = str(image.facts.get("ssh_user") or "root")
    if parts.ssh is None or not USER.fullmatch(user):
        raise ContextImpossible(f"image {image.called}: ssh as {user!r} is not possible")
    injects = not image.facts.get("cloud_init")
    if injects and (not files.init or user != "root"):
        raise ContextImpossible(
            f"image {image.digest[:12]}: --context ssh is not possible: nothing in it takes belljar's key (no cloud-init),"
            " and it is not started by belljar's own ramdisk"
        )
    house = parts.ssh()
    return SshContext(user, grows, injects, house.make_guest, house.fresh_keys)
