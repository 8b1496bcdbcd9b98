"""The ssh context of a machine: its keys, its card, its guest. Imported by machines that take this way."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from belljar.context import Seed, ssh_seed
from belljar.errors import BelljarError, ContextImpossible, GuestRefused
from belljar.guest import OWN_SSH_PORT, Guest, SshDelivery, SshKeys, ssh_delivery
from belljar.host.files import private_folder, read_capped, write_whole
from belljar.host.guard.egress import Egress, rule
from belljar.hypervisor import Domain, Nic
from belljar.image import BootFiles, Image, ssh_part
from belljar.machine.life.life import Life
from belljar.model import NetworkMode
from belljar.network import Link
from belljar.network import plan as plan_link

MakeSshGuest = Callable[[Callable[[int], Awaitable[socket.socket]], SshKeys, Callable[[str], None]], Guest]

PORT = 22
SAME_CARD = "000000000000"
EVERYWHERE = rule("0.0.0.0/0")
SECRET_SIZE = 32
LONGEST_REASON = 1000
REMEMBERED = 7 * 86400.0  # seconds; belljar and QEMU are renewed, and may do better
USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")


@dataclass(frozen=True)
class SshHouse:
    """What ssh ways are made with: a folder of this user's own, and how a guest is spoken to."""

    folder: Path
    make_guest: MakeSshGuest

    def secret(self) -> bytes:
        """From which the keys of templates are made, so that nobody has to keep them. Made with the first one."""
        path = private_folder(self.folder) / "secret"
        if not path.exists():
            draft = path.with_suffix(f".{os.getpid()}")
            write_whole(draft, os.urandom(SECRET_SIZE), durable=True)
            with suppress(FileExistsError):
                os.link(draft, path)
            draft.unlink()
        return read_capped(path, SECRET_SIZE)


@dataclass(frozen=True)
class SshWay:
    """One machine's keys: its own, for a cold start, and those its template has or will have."""

    own: SshDelivery
    templates: SshDelivery
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
            write_whole(self.memory, error.message.encode()[:LONGEST_REASON])

    def seed(self, *, for_template: bool) -> Seed:
        one = self.templates if for_template else self.own
        return ssh_seed(one.keys.user, one.public, one.host_private, one.host_public, grows=self.grows)

    def write_ramdisk(self, path: Path, base: Path, *, for_template: bool) -> None:
        """The image's ramdisk with the keys behind it."""
        one = self.templates if for_template else self.own
        write_whole(
            path, base.read_bytes() + ssh_part(one.public, one.host_private, one.host_public, one.host_dropbear)
        )

    def guest_of(self, life: Life, *, of_template: bool) -> Callable[[Domain], Guest]:
        """How the guest of a domain is spoken to, one with its template's keys or its own. What becomes of each try is in the
        journal."""
        keys = replace(self.templates.keys, of_clone=True) if of_template else self.own.keys
        return lambda domain: self.make_guest(domain.dial, keys, teller(life))

    def first_guest(self, life: Life) -> Callable[[Domain], Guest]:
        """How the guest is spoken to that becomes a template."""
        return lambda domain: self.make_guest(domain.dial, self.templates.keys, teller(life))

    def card(self, link: Link) -> tuple[Link, Nic]:
        """The link and the card of a machine that is reached by ssh. One that asked for no network has a card, too, behind
        which there is nothing but belljar. All have the same MAC address: nobody else is on their networks, and a clone that
        took another one would lose its template's DHCP lease, and belljar with it. Raises ContextImpossible."""
        own = plan_link(NetworkMode.USER, SAME_CARD)
        if link.mode is NetworkMode.NONE:
            link = replace(own, egress=Egress(deny=(EVERYWHERE,)))
            return link, Nic(link.mode, link.mac, link.egress, forward=PORT, second=OWN_SSH_PORT, is_shut=True)
        if link.mode is not NetworkMode.USER:
            raise ContextImpossible(
                f"--context ssh reaches its guest through QEMU's own user network, not by --network {link.mode.value}"
            )
        link = replace(link, mac=own.mac)
        return link, Nic(
            link.mode, link.mac, link.egress or Egress(allow=(EVERYWHERE,)), forward=PORT, second=OWN_SSH_PORT
        )


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
    own = ssh_delivery(os.urandom(SECRET_SIZE), "machine", user)
    return SshWay(
        own,
        ssh_delivery(ours.secret(), f"template {image.digest}", user),
        grows,
        injects,
        ours.folder / f"{image.digest[:32]}.refused",
        ours.make_guest,
    )


def teller(life: Life) -> Callable[[str], None]:
    """Journals how it goes with the guest's ssh server."""
    return lambda what: life.record.tell("ssh", seen=what)
