"""The door of the hypervisor room: starts, watches and stops a domain (a VM as the hypervisor knows it).

A `DomainSpec` is all a domain needs, a pure function of request, disk, nic and shares. What is made for a machine
can be unmade by its id alone: `discard(id)`, again and again, after a crash, knowing nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Set
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from belljar.errors import BadSetting, BelljarError, TemplateError
from belljar.host import processes
from belljar.model import MIB, Firmware, MachineId, NetworkMode, ShareKind, setting
from belljar.records import dataclass, field, replace

if TYPE_CHECKING:
    from belljar.host.guard.egress import Egress
    from belljar.host.traffic import Call, Refusal


class Accelerator(str, Enum):
    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


@dataclass(frozen=True)
class Settings:
    """`[qemu]` in the settings files."""

    binary: str = setting("", "QEMU's program; empty: qemu-system-x86_64 or qemu-kvm from PATH and /usr/libexec")
    accelerator: Accelerator = setting(
        Accelerator.AUTO, "auto boots a tiny guest to find out whether KVM works; kvm or tcg insist"
    )
    cpu: str = setting("auto", "CPU model of the guests; auto: host under KVM, a quick one under TCG")
    uefi: str = setting("", "OVMF's file, for images that boot by UEFI; empty: looked for in the usual places")
    virtiofsd: str = setting(
        "",
        "the program that serves folders shared by virtiofs; empty: virtiofsd from PATH, /usr/libexec and /usr/lib/qemu",
    )
    user: str = setting(
        "auto", "user QEMU runs as when belljar runs as root; auto: the payload's user, or `belljar`, or `nobody`"
    )
    boot_timeout: float = setting(180.0, "longest time from QEMU's start to the agent's answer", unit="seconds")
    qmp_timeout: float = setting(10.0, "longest time QEMU may take to answer one command", unit="seconds")
    proof_timeout: float = setting(20.0, "longest time the tiny guest that proves KVM may take", unit="seconds")
    template_days: int = setting(7, "templates older than this are rebuilt", unit="days")
    site_templates: bool = setting(
        True, "root's base templates can be read by all users of this host, whose machines are clones of them"
    )


@dataclass(frozen=True)
class LibvirtSettings:
    """`[libvirt]` in the settings files, for `machine.hypervisor = "libvirt:..."`."""

    timeout: float = setting(15.0, "longest time libvirt's daemon may take to answer a call", unit="seconds")
    start_timeout: float = setting(60.0, "longest time it may take to start a guest's process", unit="seconds")
    folder: str = setting(
        "",
        "folder of the sockets between belljar and QEMU, a short path;"
        " empty: /run/belljar-libvirt, for users /tmp/belljar-libvirt-UID",
    )
    log_folder: str = setting(
        "",
        "where libvirt writes a log of each domain, which goes with its machine;"
        " empty: /var/log/libvirt/qemu, for users ~/.cache/libvirt/qemu/log",
    )


@dataclass(frozen=True)
class Boot:
    """How the guest's kernel gets into memory. `kernel` None: firmware boots from the disk."""

    kernel: Path | None = None
    initrd: Path | None = None
    append: str = ""
    digest: str = ""  # of kernel + initrd, part of the template's key
    firmware: Firmware = Firmware.BIOS  # where there is no kernel
    is_disc: bool = False  # the machine's own disk is a CD-ROM, and the firmware boots from that


@dataclass(frozen=True)
class Nic:
    """A network card. Its MAC belongs to the machine; a clone's agent sets it, for a template's card has its own."""

    mode: NetworkMode
    mac: str
    egress: Egress | None = None  # user network: where the machine may go; None: wherever its host may
    has_line: bool = False  # its frames are carried by a descriptor
    fd: int = -1  # that descriptor, ours, lent to the domain: a tap, or a socket; -1 (a template's): nothing there
    forward: int = 0  # user network: a port of the guest that `Domain.dial` reaches; nobody else does
    is_shut: bool = False  # user network: nothing goes out


@dataclass(frozen=True)
class SharedFolder:
    """A host folder offered to the guest by 9p or virtiofs, as a device with this tag. That there is one is part of the
    device list; its path is not."""

    tag: str
    source: str
    readonly: bool
    kind: ShareKind = ShareKind.NINEP


@dataclass(frozen=True)
class ExtraDisk:
    """A further disk of one machine. It is no part of a template's hardware: a clone starts with disks its template never
    had, and its agent lets the kernel look at the bus anew. The guest knows the disk by its serial, which is `name`."""

    name: str  # at most 20 of [a-z0-9-]
    path: Path
    format: str  # "raw" or "qcow2" without a backing file; never guessed
    readonly: bool
    chained: bool = False  # a qcow2 of belljar's own making on top of others, which are only read


@dataclass(frozen=True)
class Frame:
    """The size an image's base template is booted with, and how far its clones can grow: processors and memory are plugged
    into a clone, its disk is resized, its card is one the template never had."""

    cpus: int
    memory: int
    disk: int
    most_cpus: int
    most_memory: int
    has_card: bool = False  # the template has the card already: where the guest's own init looks after cards
    words: str = ""  # of the kernel's command line, for a guest that grows
    block: int = 128 * MIB  # in whole ones a guest takes memory: 128 MiB where it booted with less than 64 GiB


# What a clone may be given that its template had not, and which the template's guest said it can make use of.
CPUS, MEMORY, LESS_MEMORY, DISK_ROOM, CARD = GROWTHS = ("cpus", "memory", "less-memory", "disk", "card")


@dataclass(frozen=True)
class DomainSpec:
    """All a domain needs."""

    id: MachineId
    cpus: int
    memory: int  # bytes, a multiple of 2 MiB
    image_digest: str
    boot: Boot
    disk: Path  # a qcow2 overlay that belongs to this machine alone
    disk_size: int  # bytes, virtual
    accelerator: Accelerator  # kvm or tcg, never auto
    folder: Path  # the machine's folder: qemu.log is written here
    nic: Nic | None = None
    shares: tuple[SharedFolder, ...] = ()
    owner: tuple[int, int] = (0, 0)  # uid and gid QEMU runs as; different from ours only when we are root
    warm: tuple[
        str, ...
    ] = ()  # what a template's guest has loaded beyond the usual ("nfs", "virtiofs"); its clones ask for the same
    disks: tuple[ExtraDisk, ...] = ()
    # A read-only disc the guest's own init reads at its first boot (NoCloud, CD-ROM of a CernVM). Part of the hardware: a
    # template keeps a copy, and its clones have that copy in the drive.
    seed: Path | None = None
    image_stored: float = 0.0  # when; a repaired image has another time, and no template of the damaged one
    frame: Frame | None = None  # its template has this size, whatever its own; None: its own

    @property
    def of_template(self) -> DomainSpec:
        """What its template is booted as."""
        frame = self.frame
        if frame is None:
            return self
        boot = self.boot
        if boot.kernel is not None and frame.words and not boot.append.endswith(frame.words):
            boot = replace(boot, append=f"{boot.append} {frame.words}")
        card = self.nic if frame.has_card else None
        return replace(self, cpus=frame.cpus, memory=frame.memory, disk_size=frame.disk, nic=card, boot=boot)

    @property
    def plugged(self) -> int:
        """Bytes of memory that are plugged into a clone of its template."""
        block = self.frame.block if self.frame else 1
        return -(-max(self.memory - self.of_template.memory, 0) // block) * block

    @property
    def surplus(self) -> int:
        """Bytes of memory that such a clone has and that were not asked for."""
        return self.of_template.memory + self.plugged - self.memory

    @property
    def growth(self) -> frozenset[str]:
        """In what it differs from its template."""
        then = self.of_template
        said = (
            self.cpus > then.cpus, self.plugged > 0, self.surplus > 0,
            self.disk_size > then.disk_size, (self.nic is None) != (then.nic is None),
        )  # fmt: skip
        return frozenset(name for name, differs in zip(GROWTHS, said, strict=True) if differs)


class EventKind(str, Enum):
    """What a domain may do by itself."""

    SHUTDOWN = "shutdown"  # the guest powered off
    RESET = "reset"  # the guest asked for a reboot (it is not given one)
    PANICKED = "panicked"  # the guest's kernel crashed
    DISK_FULL = "disk-full"  # a write to the overlay found no space; the guest is stopped
    DISK_ERROR = "disk-error"
    SHARE_LOST = "share-lost"  # what serves a folder to the guest ended
    EXITED = "exited"  # the process is gone; always the last event


@dataclass(frozen=True)
class DomainEvent:
    kind: EventKind
    detail: str = ""
    status: int | None = None  # EXITED: wait status
    why: BelljarError | None = None  # EXITED, SHARE_LOST: what the last words mean, where they are known


class Domain(Protocol):
    """One running domain. Its process is a child of this one and dies with it. The two sockets belong to the caller, who
    closes them: what the guest said last can be read from them after its end."""

    pid: int
    argv: tuple[str, ...]  # how the process was started; for the record
    channel: socket.socket  # the agent's channel, our end, non-blocking
    console: socket.socket  # the serial console, our end, non-blocking

    async def connect(self) -> None:
        """Make sure that the monitor answers. Raises QmpTimeout, QmpError or DomainDied."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def press_power(self) -> None:
        """Press the guest's power button (ACPI). What comes of it is the guest's affair."""

    async def quit(self, *, grace: float) -> int:
        """Bring the domain down, by SIGKILL after *grace* seconds. Returns the wait status. Quitting twice is fine."""

    def kill(self) -> None:
        """SIGKILL now. Does not wait."""

    def events(self) -> AsyncIterator[DomainEvent]:
        """What happens to the domain, from its start on, whenever one asks; ends after EXITED."""

    def traffic(self) -> AsyncIterator[Call | Refusal]:
        """What the guard of a user network has to tell, from the start on, to one listener; ends with the domain. A
        domain without a guard tells nothing. Calls that nobody takes are closed with the domain."""

    async def dial(self) -> socket.socket:
        """A connection to the port of the guest that its card forwards, non-blocking. Whether the guest
        answers there is seen when it speaks. Raises OSError."""

    def usage(self) -> tuple[float, float, int]:
        """User seconds, system seconds, peak resident bytes of the QEMU process so far (final once it ended)."""


@dataclass(frozen=True)
class Template:
    """A booted guest, frozen: RAM file, device state, disk."""

    key: str
    folder: Path
    size: int = field(compare=False)  # bytes on disk by now
    created: float
    facts: Mapping[str, Any]  # what the key was made of
    grows: frozenset[str] = frozenset()  # of GROWTHS: what its clones can be given


@dataclass(frozen=True)
class Traces:
    """What a machine's journal tells of its processes. Anybody may write a machine's name on a command line: whose a
    process is decides."""

    owners: frozenset[int] = frozenset()  # uids they run as, beside the caller's own
    processes: frozenset[tuple[int, int]] = frozenset()  # pid and start time of those that were started

    def name(self, pid: int) -> bool:
        """Was this very process started for the machine?"""
        return (pid, processes.start_time(pid)) in self.processes and os.geteuid() in (0, processes.owner(pid))

    def fit(self, pid: int) -> bool:
        """Can this process be what it says, the machine's?"""
        return processes.owner(pid) in {os.geteuid(), *(self.owners if os.geteuid() == 0 else ())}


NO_TRACES = Traces()


class Templates(Protocol):
    """Makes templates, and what a clone of one starts from. Of drivers that can freeze a guest."""

    def frame(self, spec: DomainSpec, *, memory: int, disk: int) -> Frame | None:
        """The size of a base template of so much memory and disk from which this domain can be cloned; None where clones
        cannot be given more than their templates had, or not so much."""

    def find_template(self, spec: DomainSpec) -> Template | str:
        """A template that fits this spec exactly and is whole and trusted, or the reason why there is none."""

    def clone_disk(self, template: Template, spec: DomainSpec) -> None:
        """Put a fresh overlay over the template's disk at `spec.disk`."""

    def template_lock(self, spec: DomainSpec) -> Path:
        """The lock file under which a template for this spec is built by one process at a time."""

    def template_draft(self, spec: DomainSpec) -> Path:
        """Where the template for this spec is being made; removed by `discard` if it was never finished."""

    async def adopt_template(self, spec: DomainSpec) -> Template | None:
        """A copy of the site's own template for this spec, where it has one; for who holds the template's lock, as for
        `prepare_template`. Raises TemplateError, NoSpace."""

    async def prepare_template(self, spec: DomainSpec, image_disk: Path) -> None:
        """Make the folder of a template in the making (journal it before: `template_draft`)."""

    def start_template(self, spec: DomainSpec) -> Domain:
        """Start cold in a way that `save_template` can follow. `spec.disk` is ignored: the template brings its own,
        an overlay on *spec.image_disk* made by `prepare_template`."""

    async def save_template(self, spec: DomainSpec, domain: Domain, grows: Set[str] = frozenset()) -> Template:
        """Freeze a ready guest into a template whose clones can be given *grows*. The domain has ended afterwards, whatever
        happens."""

    def abandon_template(self, spec: DomainSpec) -> None:
        """Remove what `prepare_template` and a start after it have made, for who holds the template's lock."""


class Hypervisor(Protocol):
    """Starts domains, cold or as clones of a template, and keeps the templates there are in order."""

    @property
    def cloning(self) -> Templates | str:
        """Who makes and clones templates for it; or why every domain is booted."""

    def accelerator(self, boot: Boot) -> tuple[Accelerator, str]:
        """The accelerator to use for guests of this kernel, and why. Proved once, then remembered. May block for
        `proof_timeout` the first time. Raises NoAccelerator when the settings insist on one that does not work."""

    def check(self, spec: DomainSpec) -> None:
        """Refuse, before anything is made, what this driver or this host cannot give a machine. Raises DriverLacks,
        CommandMissing, HostError."""

    async def launch(self, spec: DomainSpec, template: Template | None) -> Domain:
        """Start cold, or as a clone: then the guest goes on where the template stood. Returns as soon as the process runs, and
        does not hold the event loop for longer than a process takes to spawn. Cancelled, it leaves nothing that
        `discard` does not find. Raises NotPermitted and NoFolderServer, too."""

    def abandoned_templates(self) -> list[Path]:
        """Folders of templates in the making whose maker is dead."""

    def templates(self) -> list[Template]: ...
    def verify_template(self, template: Template) -> list[str]:
        """What is wrong with it (digests, owner, mode, versions); empty: nothing."""

    def remove_template(self, key: str) -> None: ...
    def expire_templates(self, now: float) -> list[str]:
        """Remove templates past their age, and drafts nobody holds the lock of. Returns the keys."""

    def alive(self) -> list[tuple[MachineId, int]]:
        """(machine, pid) of every process of this host that says it is a domain's: whose it is, is another question."""

    def is_kept(self, id: MachineId, pid: int) -> bool:
        """Does the supervisor that started this process live? Of one that is gone already: any answer."""

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        """Leave no process of this machine: none that *traces* name, and of those that say they are the machine's none
        that is the caller's or of an owner they tell. Finding none is success. Raises DomainDied for one that does not go
        away within *patience* seconds."""


def cloning_of(hypervisor: Hypervisor) -> Templates:
    """Who makes and clones its templates. Raises TemplateError where there are none."""
    cloning = hypervisor.cloning
    if isinstance(cloning, str):
        raise TemplateError(cloning)
    return cloning


def guest_uuid(id: MachineId) -> str:
    """The UUID of a machine, as its firmware tells it to a guest that was not cloned."""
    from belljar.hypervisor.qemu.cmdline import machine_uuid

    return machine_uuid(id)


def mistakes(driver: str) -> Iterator[tuple[str, BadSetting]]:
    """(key of `[machine]`, what is wrong) where *driver* is none that machines of this host could run by."""
    if driver == "qemu":
        return
    from belljar.hypervisor.libvirt.driver import read_driver

    try:
        read_driver(driver)
    except BadSetting as exc:
        yield "hypervisor", exc


def wrong_values(settings: Settings) -> Iterator[tuple[str, BadSetting]]:
    """(key of `[qemu]`, what is wrong) of each value that names something this host does not have."""
    from belljar.hypervisor.qemu.values import wrong_values

    return wrong_values(settings)


def find_virtiofsd(settings: Settings) -> str:
    """The program that serves folders by virtiofs. Raises CommandMissing."""
    from belljar.hypervisor.qemu.virtiofs.virtiofsd import find

    return find(settings.virtiofsd)


def load(
    settings: Settings,
    store: Path,
    driver: str = "qemu",
    libvirt: LibvirtSettings | None = None,
    site_store: Path | None = None,
) -> Hypervisor:
    """The hypervisor of these settings. *store* is a folder of this user's own: templates and remembered answers go there.
    *site_store*: root's, whose templates serve this user too; None: *store* is the site's itself. *driver*: `qemu`, or `libvirt:` and a URI. Raises BadSetting."""
    if driver != "qemu":
        from belljar.hypervisor.libvirt.driver import LibvirtHypervisor

        return LibvirtHypervisor(driver, settings, libvirt or LibvirtSettings(), store)
    from belljar.hypervisor.qemu.driver import QemuHypervisor

    return QemuHypervisor(settings, store, site_store)
