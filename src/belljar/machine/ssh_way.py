"""The ssh context of a machine: its keys, its card, its guest. Imported by machines that take this way."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from belljar.context import Seed, ssh_seed
from belljar.errors import BelljarError, ContextImpossible
from belljar.guest import Guest, SshDelivery, SshKeys, ssh_delivery
from belljar.host.egress import Egress, rule
from belljar.host.files import private_folder, read_capped, write_whole
from belljar.hypervisor import Domain, Nic
from belljar.image import Image
from belljar.machine.life import Life
from belljar.model import MachineId, NetworkMode
from belljar.network import Link
from belljar.network import plan as plan_link

MakeSshGuest = Callable[[Callable[[], Awaitable[socket.socket]], SshKeys, Callable[[str], None]], Guest]

PORT = 22
EVERYWHERE = rule("0.0.0.0/0")
SECRET_SIZE = 32
RESEEDS_FROM = (5, 18)  # the kernels that draw new random numbers in a clone by themselves
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
    never_cloned: str  # why there is no template of such a guest; empty: there may be one
    make_guest: MakeSshGuest

    def seed(self, *, for_template: bool) -> Seed:
        one = self.templates if for_template else self.own
        return ssh_seed(one.keys.user, one.public, one.host_private, one.host_public, grows=self.grows)

    def guest_of(self, life: Life, *, of_template: bool) -> Callable[[Domain], Guest]:
        """How the guest of a domain is spoken to. What becomes of each try is in the journal."""
        keys = (self.templates if of_template else self.own).keys
        return lambda domain: self.make_guest(domain.dial, keys, teller(life))

    def card(self, link: Link, id: MachineId) -> tuple[Link, Nic]:
        """The link and the card of a machine that is reached by ssh. One that asked for no network has a card, too, behind
        which there is nothing but belljar. Raises ContextImpossible."""
        if link.mode is NetworkMode.NONE:
            link = replace(plan_link(NetworkMode.USER, id), egress=Egress(deny=(EVERYWHERE,)))
            return link, Nic(link.mode, link.mac, link.egress, forward=PORT, is_shut=True)
        if link.mode is not NetworkMode.USER or link.has_line:
            raise ContextImpossible(
                f"--context ssh reaches its guest through QEMU's own user network, not by --network {link.mode.value}"
            )
        return link, Nic(link.mode, link.mac, link.egress or Egress(allow=(EVERYWHERE,)), forward=PORT)


def make(house: Callable[[], SshHouse] | None, image: Image, *, grows: bool) -> SshWay:
    """Fresh keys for a machine. Raises ContextImpossible, SshMissing."""
    user = str(image.facts.get("ssh_user") or "root")
    if house is None or not USER.fullmatch(user):
        raise ContextImpossible(f"image {image.names or image.digest[:12]}: ssh as {user!r} is not possible")
    if not image.facts.get("cloud_init"):
        raise ContextImpossible(
            f"image {image.digest[:12]}: --context ssh is not possible: nothing in it takes belljar's key (no cloud-init)"
        )
    ours = house()
    own = ssh_delivery(os.urandom(SECRET_SIZE), "machine", user)
    return SshWay(
        own,
        ssh_delivery(ours.secret(), f"template {image.digest}", user),
        grows,
        why_not_cloned(image),
        ours.make_guest,
    )


def why_not_cloned(image: Image) -> str:
    """Why a guest of this image cannot be cloned and proved to be nobody's twin, as far as that is known; else empty."""
    release = str(image.facts.get("release") or "")
    found = re.match(r"(\d{1,3})\.(\d{1,4})", release)
    if found is None or (int(found[1]), int(found[2])) >= RESEEDS_FROM:
        return ""
    return f"its kernel {release} does not draw new random numbers in a clone (from 5.18 on kernels do)"


def teller(life: Life) -> Callable[[str], None]:
    """Journals how it goes with the guest's ssh server."""

    def tell(what: str) -> None:
        with suppress(BelljarError, OSError):  # a full disk costs a line, not the machine
            life.record.write("ssh", seen=what)

    return tell
