"""The ssh context of a machine: its keys, its card, and the guest the agent is brought to. Imported by machines that take this way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from belljar.context import Seed, ssh_seed
from belljar.errors import BelljarError, ContextImpossible, GuestRefused
from belljar.guest import Guest, SshKeys
from belljar.host.files import private_folder, read_capped, write_whole
from belljar.host.guard.egress import Egress, rule
from belljar.hypervisor import Domain, Nic
from belljar.image import BootFiles, Image, ssh_part
from belljar.machine.life.life import Life
from belljar.model import NetworkMode
from belljar.network import Link
from belljar.network import plan as plan_link

MakeSshGuest = Callable[[Domain, SshKeys, Callable[[str], None], bool], Guest]  # the last: is it to become a template?

PORT = 22
SAME_CARD = "000000000000"
EVERYWHERE = rule("0.0.0.0/0")
LONGEST_REASON = 1000
REMEMBERED = 7 * 86400.0  # seconds; belljar and QEMU are renewed, and may do better
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class SshHouse:
    """What ssh ways are made with: a folder of this user's own, and how a guest is spoken to."""

    folder: Path
    make_guest: MakeSshGuest
    fresh_keys: Callable[[str], SshKeys]  # for this user. Raises SshMissing


@dataclass(frozen=True)
class SshWay:
    """The keys of one boot. A clone has no use for any: its agent is there."""

    keys: SshKeys
    grows: bool
    injects: bool  # belljar's ramdisk puts the keys in; else the image's cloud-init
    memory: Path  # what was learned about templates of such guests
    make_guest: MakeSshGuest

    @property
    def never_cloned(self) -> str:
        """Why a template of such a guest was refused by the guest itself, for some days; empty: there may be one."""
        with suppress(OSError):
            if time.time() - self.memory.stat().st_mtime < REMEMBERED:
                return read_capped(self.memory, LONGEST_REASON).decode("utf-8", "replace")
        return ""

    def remember(self, error: GuestRefused) -> None:
        """The guest would refuse again, after another boot."""
        with suppress(BelljarError, OSError):
            private_folder(self.memory.parent)
            write_whole(self.memory, error.message.encode()[:LONGEST_REASON])

    def seed(self) -> Seed:
        keys = self.keys
        return ssh_seed(keys.user, keys.public, keys.host_private, keys.host_public, grows=self.grows)

    def write_ramdisk(self, path: Path, base: Path) -> None:
        """The image's ramdisk with the keys behind it."""
        keys = self.keys
        part = ssh_part(keys.public, keys.host_private, keys.host_public, keys.host_dropbear)
        write_whole(path, base.read_bytes() + part)

    def guest(self, life: Life, *, is_draft: bool) -> Callable[[Domain], Guest]:
        """How the agent is brought to a guest that boots, and then spoken to. What becomes of each try is in the journal."""

        def tell(what: str) -> None:
            life.record.tell("ssh", seen=what)

        return lambda domain: self.make_guest(domain, self.keys, tell, is_draft)

    def card(self, link: Link) -> Nic:
        """The card of a machine that is entered by ssh when it boots. One that asked for no network has a card, too, behind
        which there is nothing but belljar. Raises ContextImpossible."""
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


def make(house: Callable[[], SshHouse] | None, image: Image, files: BootFiles, *, grows: bool) -> SshWay:
    """Fresh keys for a machine. Where cloud-init would not take them, belljar's ramdisk puts them in. Raises ContextImpossible, SshMissing."""
    user = str(image.facts.get("ssh_user") or "root")
    if house is None or not USER.fullmatch(user):
        raise ContextImpossible(f"image {image.names or image.digest[:12]}: ssh as {user!r} is not possible")
    injects = not image.facts.get("cloud_init")
    if injects and (not files.init or user != "root"):
        raise ContextImpossible(
            f"image {image.digest[:12]}: --context ssh is not possible: nothing in it takes belljar's key (no cloud-init),"
            " and it is not started by belljar's own ramdisk"
        )
    ours = house()
    return SshWay(ours.fresh_keys(user), grows, injects, ours.folder / f"{image.digest[:32]}.refused", ours.make_guest)
