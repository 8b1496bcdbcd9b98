"""How a machine's guest is contextualized, decided and prepared: the image's own init instead of belljar's, a disc, a layer.

The usual way, belljar's ramdisk, needs nothing of this and is not looked at here: see `Planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from belljar.context import Chosen, Means, Seed, choose, cloud_init_seed, user_seed
from belljar.errors import ContextImpossible
from belljar.host.threads import in_thread
from belljar.hypervisor import DomainSpec, guest_uuid
from belljar.image import SSH_WORD, BootFiles, Image, ImageStore, agent_digest, agent_source, agent_unit
from belljar.machine import RAMDISK
from belljar.machine.planning.layers import Layers
from belljar.model import Context, NetworkMode, Request

if TYPE_CHECKING:
    from belljar.machine.planning.ssh import SshHouse, SshWay

AWAITED = {
    Context.CLOUD_INIT: "the guest's cloud-init to end, and then its agent to answer",
    Context.INJECT: "the guest's own init to start the agent that was put into it, and the agent to answer",
    Context.SSH: "the guest's ssh server to let belljar in, and then its agent to answer (how far it came is in"
    " `belljar logs ID --journal`)",
    Context.NONE: "the agent that the image has to start itself to answer",
}


# Where nobody answers a guest's DHCP requests its own init would wait two minutes for a network (seen with Debian 12 and 13): it has
# none, or the agent gives the card its address.
UNANSWERED = (NetworkMode.NONE, NetworkMode.ISOLATED)
NO_WAITING = "systemd.mask=systemd-networkd-wait-online.service systemd.mask=NetworkManager-wait-online.service"

# How long a boot may take is belljar's to say (`qemu.boot_timeout`). By systemd's own 90 s for a device an emulated guest on a
# host with seven processes for each processor had no /boot/efi yet, and went into emergency mode (seen with Debian 13).
PATIENCE = "systemd.default_timeout_start_sec=3600 systemd.default_device_timeout_sec=3600"


@dataclass(frozen=True)
class Way:
    """A context, with all that a domain needs for it."""

    chosen: Chosen
    files: BootFiles
    image: Image  # whose disk is the one the machine's own stands on
    seed: Seed | None = None
    layer: str = ""  # digest of what was put into the image's disk, or will be over ssh
    ssh: SshWay | None = None
    private: str = ""  # why it is of use to one machine alone, so that there is no template; empty: it is not

    @property
    def digest(self) -> str:
        """Of what is booted, and part of a template's key."""
        more = [self.seed.digest if self.seed is not None else "", self.layer]
        return sha256("\n".join([self.files.digest, *more]).encode()).hexdigest() if any(more) else self.files.digest

    @property
    def awaited(self) -> str:
        """What a cold boot waits for, for a person who waited in vain."""
        return AWAITED.get(self.chosen.context, "the guest's agent to answer")

    def ramdisk(self, folder: Path) -> Path | None:
        """Where the ramdisk lies, or will, of a machine with this folder."""
        return folder / RAMDISK if self.ssh is not None and self.ssh.injects else self.files.initrd

    def make_seed(self, spec: DomainSpec) -> None:
        """The disc of a cold start or a template, where there is to be one and it is not there yet; a clone has its
        template's."""
        if self.ssh is not None and self.ssh.injects:
            assert spec.boot.initrd is not None and self.files.initrd is not None
            return self.ssh.write_ramdisk(spec.boot.initrd, self.files.initrd)
        if self.ssh is not None and spec.seed is not None:
            spec.seed.unlink(missing_ok=True)  # one that was made for a template has other keys
            self.ssh.seed().write(spec.seed)
            return
        if self.seed is not None and spec.seed is not None and not spec.seed.exists():
            self.seed.write(spec.seed)


async def decide(
    request: Request,
    image: Image,
    images: ImageStore,
    layers: Callable[[], Layers],
    ssh: Callable[[], SshHouse] | None = None,
) -> Way:
    """The way for a request. Raises ContextImpossible, SshMissing; WorkshopFailed where the agent could not be put into the
    disk."""
    work = request.work
    if not work.has_agent:
        return by_itself(request, image, images)
    if image.is_disc:
        raise ContextImpossible(
            f"image {request.machine.image} is a disc whose guests know their own work: no command can be run in one",
            hint="Give it user data with --user-data, and no command.",
        )
    chosen = choose(request.machine.context, means_of(image), request.machine.image)
    files = patient(images.boot_files(image, chosen.context), image)
    grows = (request.machine.disk or 0) > image.virtual_size
    if chosen.context is Context.SSH:
        from belljar.machine.planning.ssh import make

        way, agent = make(ssh, image, files, grows=grows), agent_digest()
        if not way.injects:
            return Way(chosen, files, image, way.seed(), layer=agent, ssh=way)
        # The ramdisk is the machine's own: belljar's, with the keys behind it.
        return Way(
            chosen, replace(files, append=f"{files.append} {SSH_WORD}"), image, layer=f"{SSH_WORD} {agent}", ssh=way
        )
    if files.init and request.machine.network in UNANSWERED:
        files = replace(files, append=f"{files.append} {NO_WAITING}")
    if chosen.context is Context.CLOUD_INIT:
        python = await in_thread(lambda: images.python_for(image))
        unit = agent_unit(is_carried=python is not None)
        seed = cloud_init_seed(agent_source(), unit, work.user_data or b"", grows=grows, python=python)
        return Way(chosen, files, image, seed, private="" if work.user_data is None else "it has user data of its own")
    if chosen.context is Context.INJECT and not files.init:
        image, layer = await layers().get(image)
        return Way(chosen, files, image, layer=layer)
    return Way(chosen, files, image)


def by_itself(request: Request, image: Image, images: ImageStore) -> Way:
    """The way of a guest that knows its own work: its own init, without the agent; a disc brings its user data."""
    chosen = Chosen(Context.NONE, "it knows its own work")
    seed = None
    if request.work.user_data is not None:
        seed = user_seed(request.work.user_data, guest_uuid(request.id), f"belljar-{request.id}")
    files = patient(images.boot_files(image, Context.NONE), image)
    return Way(chosen, files, image, seed, private="it knows its own work")


def patient(files: BootFiles, image: Image) -> BootFiles:
    """The same, where an init of the image's own is started directly: it does not give up before belljar does."""
    is_systemd = files.init and image.facts.get("init_system") == "systemd"
    return replace(files, append=f"{files.append} {PATIENCE}") if is_systemd else files


def means_of(image: Image) -> Means:
    """What is known of an image, in the words of `choose`."""
    return means_by(image.facts, image.kernel is not None)


def means_by(facts: Mapping[str, Any], has_kernel: bool) -> Means:
    """The same of one that is not in a store yet."""
    own = facts.get("context") or Context.AUTO.value
    return Means(
        ramdisk=has_kernel and bool(facts.get("agent_in_initrd")),
        init=str(facts.get("init_system") or ""),
        cloud_init=bool(facts.get("cloud_init")),
        sshd=bool(facts.get("sshd")),
        agent=bool(facts.get("agent")),
        is_known="python" in facts,  # the least an import tells of a root it has looked into
        own=Context(own) if own in {one.value for one in Context} else Context.AUTO,
    )
