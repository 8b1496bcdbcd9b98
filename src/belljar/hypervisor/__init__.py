"""The door of the hypervisor room: starts, watches and stops a domain (a VM as the hypervisor knows it).

A `DomainSpec` is all a domain needs, a pure function of request, disk, nic and shares. What is made for a machine
can be unmade by its id alone: `discard(id)`, again and again, after a crash, knowing nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from functools import cached_property
from pathlib import Path

from belljar.errors import BelljarError, NotPermitted
from belljar.hints import TYPE_CHECKING, Any, Protocol
from belljar.host import processes
from belljar.host.quick_imports import sha256
from belljar.model import MIB, Firmware, MachineId, NetworkMode, Share, setting, to_json
from belljar.records import dataclass, field, replace

if TYPE_CHECKING:
    from belljar.host.guard.egress import Egress
    from belljar.host.guard.traffic import Call, Refusal


NOBODY = (65534, 65534)
LAST_RESORT = 10.0  # seconds SIGKILL may take; longer means a process in state D


class Accelerator(str, Enum):
    AUTO = "auto"
    KVM = "kvm"
    TCG = "tcg"


@dataclass(frozen=True)
class Settings:
    """`[qemu]` in the settings files."""

    binary: str = setting("", "QEMU's program; empty: qemu-system-x86_64 or qemu-kvm from PATH and /usr/libexec")
    accelerator: Accelerator = setting(Accelerator.AUTO, "auto: KVM if a tiny guest boots by it; kvm or tcg insist")
    cpu: str = setting("auto", "CPU model of the guests; auto: host under KVM, a quick one under TCG")
    uefi: str = setting("", "OVMF's file, for images that boot by UEFI; empty: looked for in the usual places")
    virtiofsd: str = setting("", "virtiofsd, the one in Rust; empty: from PATH, /usr/libexec and /usr/lib/qemu")
    user: str = setting("auto", "whom root's QEMU runs as; auto: the payload's user, or `belljar`, or `nobody`")
    boot_timeout: float = setting(180.0, "longest time from start to the agent's answer", unit="seconds", minimum=0.01)
    qmp_timeout: float = setting(10.0, "longest time QEMU may take to answer one command", unit="seconds", minimum=0.01)
    proof_timeout: float = setting(20.0, "longest time of the tiny guest that proves KVM", unit="seconds")
    template_days: int = setting(7, "templates older than this are rebuilt", unit="days")
    site_templates: bool = setting(True, "all users of this host can read root's base templates, and clone them")


@dataclass(frozen=True)
class LibvirtSettings:
    """`[libvirt]` in the settings files, for `machine.hypervisor = "libvirt:..."`."""

    timeout: float = setting(15.0, "longest time libvirt's daemon may take to answer a call", unit="seconds")
    start_timeout: float = setting(60.0, "longest time it may take to start a guest's process", unit="seconds")
    log_folder: str = setting(
        "", "of libvirt's logs of domains; empty: /var/log/libvirt/qemu, for users ~/.cache/libvirt/qemu/log"
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
    has_line: bool = False  # its frames are carried by a descriptor, where there is one, and not by QEMU itself
    fd: int = -1  # that descriptor, ours, lent to the domain: a tap, or a socket; -1 (a template's): nothing there


@dataclass(frozen=True)
class ExtraDisk:
    """A further disk of one machine, which its template does not have. The guest knows it by its serial, `name`."""

    name: str  # at most 20 of [a-z0-9-]
    path: Path
    format: str  # "raw" or "qcow2" without a backing file; never guessed
    readonly: bool
    is_late: bool = False  # the guest looks for it when it needs it, which takes a clone a while
    chained: bool = False  # a qcow2 of belljar's own making on top of others, which are only read


@dataclass(frozen=True)
class Frame:
    """The size of an image's base template, and how far its clones can grow."""

    cpus: int
    memory: int
    disk: int
    most_cpus: int
    most_memory: int
    has_card: bool = False  # the template has the card already: where the guest's own init looks after cards
    words: str = ""  # of the kernel's command line, for a guest that grows
    held: int = 0  # bytes of its memory that the template's guest holds back: more than most of its clones ask for
    block: int = 128 * MIB  # a guest takes memory in whole blocks; 128 MiB where it booted with less than 64 GiB


# What a clone may be given that its template did not have, where the template's guest said that it can use it.
CPUS, MEMORY, LESS_MEMORY, DISK_ROOM, CARD = GROWTHS = ("cpus", "memory", "less-memory", "disk", "card")


@dataclass(frozen=True)
class Node:
    """A NUMA node of a guest: its next cpus, and memory that is on a node of this host as long as there is any."""

    cpus: int
    memory: int
    host: int


@dataclass(frozen=True)
class HostDevice:
    """A device of this host that a guest has for itself."""

    address: str  # 0000:41:00.0; of a mediated device its UUID; "": a template keeps its place free
    windows: tuple[int, int]  # bytes of address space: below 4 GiB, and prefetchable


@dataclass(frozen=True)
class Layout:
    """What a guest sees of this host's processors."""

    sockets: int
    cores: int  # of a socket
    threads: int  # of a core
    nodes: tuple[Node, ...] = ()  # none: no NUMA


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
    shares: tuple[Share, ...] = ()
    owner: tuple[int, int] = (0, 0)  # uid and gid QEMU runs as; different from ours only when we are root
    disks: tuple[ExtraDisk, ...] = ()
    # A read-only disc for the guest's own init (NoCloud, CD-ROM of a CernVM). Clones have their template's copy in the drive.
    seed: Path | None = None
    image_stored: float = 0.0  # when; a repaired image has another time, and no template of the damaged one
    frame: Frame | None = None  # its template has this size, whatever its own; None: its own
    uplink: Nic | None = None  # the card with which a warm image is prepared, in whose place its clones have theirs
    layout: Layout | None = None  # of a cold boot; None: one socket
    pages: int = 0  # bytes of a reserved large page, of which the memory of a cold boot consists; 0: of others
    devices: tuple[HostDevice, ...] = ()  # of this host; the address space that each takes is part of the hardware
    fork: str = ""  # by which the fork is known that it is cloned from: its guest, as that stood, has all it is to have

    @cached_property
    def of_template(self) -> DomainSpec:
        """What its template is booted as."""
        frame = self.frame
        if frame is None:
            return self
        boot = self.boot
        if boot.kernel is not None and frame.words and not boot.append.endswith(frame.words):
            boot = replace(boot, append=f"{boot.append} {frame.words}")
        card = self.uplink or (self.nic if frame.has_card else None)
        return replace(self, cpus=frame.cpus, memory=frame.memory, disk_size=frame.disk, nic=card, boot=boot)

    @property
    def uuid(self) -> str:
        return guest_uuid(self.id)

    @property
    def of_fork(self) -> Mapping[str, Any]:
        """In what the clones of a fork are as their parent is, and cannot know by themselves."""
        sizes = {"cpus": self.cpus, "memory": self.memory, "disk_size": self.disk_size, "owner": [*self.owner]}
        return {"fork": self.fork, **sizes, "frame": to_json(self.frame), "boot": self.boot.digest}

    @property
    def plugged(self) -> int:
        """Bytes of memory that are plugged into a clone of its template."""
        block = self.frame.block if self.frame else 1
        return -(-max(self.memory - self.of_template.memory, 0) // block) * block

    @property
    def surplus(self) -> int:
        """Bytes of memory that this clone has and that were not asked for."""
        return self.of_template.memory + self.plugged - self.memory

    @property
    def growth(self) -> frozenset[str]:
        """In what it differs from its template."""
        if self.fork:
            return frozenset()
        then = self.of_template
        differences = (
            self.cpus > then.cpus, self.plugged > 0, self.surplus > 0,
            self.disk_size > then.disk_size, (self.nic is None) != (then.nic is None),
        )  # fmt: skip
        return frozenset(name for name, differs in zip(GROWTHS, differences, strict=True) if differs)

    @property
    def is_like_template(self) -> bool:
        """Has its guest nothing to take into use, or to give back? Who it is shows whether it has its card."""
        held = self.frame.held if self.frame else 0
        return bool(self.fork) or (self.growth <= {LESS_MEMORY, CARD} and self.surplus == held)


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
    """One running domain, which dies with this process. Its two sockets are the caller's to close, after its end."""

    pid: int
    argv: tuple[str, ...]  # how the process was started; for the record
    channel: socket.socket  # the agent's channel, our end, non-blocking
    console: socket.socket  # the serial console, our end, non-blocking

    async def connect(self) -> None:
        """Make sure that the monitor answers. Raises QmpTimeout, QmpError or DomainDied."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def pin(self, cpus: Sequence[int]) -> Mapping[str, int]:
        """Have each virtual processor run on one of these alone; returns the cpu of each thread. Raises HostError, QmpError."""

    async def press_power(self) -> None:
        """Press the guest's power button (ACPI)."""

    async def quit(self, *, grace: float) -> int:
        """Bring the domain down, by SIGKILL after *grace* seconds. Returns the wait status. Quitting twice is fine."""

    def kill(self) -> None:
        """SIGKILL now. Does not wait."""

    def events(self) -> AsyncIterator[DomainEvent]:
        """What happens to the domain, from its start on, whenever one asks; ends after EXITED."""

    def traffic(self) -> AsyncIterator[Call | Refusal]:
        """What its guard tells, where its user network has one, to one listener, until its end. Untaken calls are closed."""

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

    @property
    def disk(self) -> Path:
        """What the overlays of its clones stand on."""
        return self.folder / "disk.qcow2"


@dataclass(frozen=True)
class Traces:
    """What a machine's journal tells of its processes. Their names prove nothing: anybody may write one on a command line."""

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
    """Makes templates, and the disks of their clones. Of drivers that can freeze a guest."""

    def frame(self, spec: DomainSpec, *, memory: int, disk: int) -> Frame | None:
        """A base template of so much memory and disk from which this domain can be cloned; None: there can be none."""

    def find_template(self, spec: DomainSpec) -> Template | None:
        """A template that fits this spec exactly and is whole and trusted."""

    def clone_disk(self, template: Template, spec: DomainSpec) -> None:
        """Put a fresh overlay over the template's disk at `spec.disk`."""

    def template_lock(self, spec: DomainSpec) -> Path:
        """The lock file under which one process at a time builds a template for this spec."""

    def template_draft(self, spec: DomainSpec) -> Path:
        """Where the template for this spec is being made: a folder, for whoever holds the lock to remove."""

    async def adopt_template(self, spec: DomainSpec) -> Template | None:
        """For who holds the lock: a copy of the site's template, where there is one. Raises TemplateError, NoSpace."""

    async def prepare_template(self, spec: DomainSpec, image_disk: Path) -> None:
        """Make the folder of a template in the making (journal it before: `template_draft`)."""

    def start_template(self, spec: DomainSpec) -> Domain:
        """Start cold, on the disk that `prepare_template` made. `save_template` can follow."""

    async def fork(
        self, domain: Domain, spec: DomainSpec, layer: Path, point: Callable[[str], None]
    ) -> tuple[Template, float]:
        """A running domain becomes a template; returns that, and for how many seconds the domain stood still. It goes on, also after
        an error. *spec*: its own, with the name of the fork, whose lock is held and whose draft is journaled, and with the disc that is
        in its drive. Its disk is only read from then on, and the *layer* is its disk; it is not there where that failed. *point* is
        called with the name of each step. Raises HypervisorError, NoSpace, ImageCorrupt."""

    def fork_lock(self, key: str) -> Path:
        """The lock file of this fork: it is there as long as somebody holds that. Raises TemplateError."""

    def of_fork(self, spec: DomainSpec, key: str) -> DomainSpec:
        """The domain as a clone of this fork, of the size of its parent. Raises TemplateError."""

    async def save_template(self, spec: DomainSpec, domain: Domain, grows: Set[str] = frozenset()) -> Template:
        """Freeze a ready guest into a template whose clones can be given *grows*. The domain has ended then, in any case."""

    def traits(self, spec: DomainSpec) -> Mapping[str, str]:
        """What two hosts must have in common where one goes on from memory that the other wrote."""

    async def write_memory(self, domain: Domain, pipe: int, *, timeout: float) -> None:
        """Write memory and device state of a guest that stands still; its disks are whole then. It goes on by `resume`. Raises
        HypervisorError."""

    def restore(self, spec: DomainSpec, memory: int) -> Domain:
        """Start a domain that has all that *spec* says, with the memory and device state that come by this pipe; the guest then
        goes on where it stood. Raises as `launch`."""


class Hypervisor(Protocol):
    """Starts domains, cold or as clones of a template, and keeps the templates there are in order."""

    can_pin: bool  # does `Domain.pin` work?

    @property
    def cloning(self) -> Templates:
        """Makes and clones templates for it. Raises TemplateError where every domain is booted cold."""

    def accelerator(self, boot: Boot) -> tuple[Accelerator, str]:
        """The accelerator for guests of this kernel, and why. The first time it may block for `proof_timeout`. Raises
        HostError when the settings insist on one that does not work."""

    def check(self, spec: DomainSpec) -> None:
        """Refuse what this driver or this host cannot give a machine. Raises UsageError, CommandMissing, HostError."""

    async def launch(self, spec: DomainSpec, template: Template | None) -> Domain:
        """Start cold, or as a clone: then the guest goes on where the template stood. Returns as soon as the process runs.
        Cancelled, it leaves nothing that `discard` does not find. Raises NotPermitted and HostError, too."""

    def abandoned_templates(self) -> list[Path]:
        """Folders of templates in the making whose maker is dead."""

    def templates(self) -> list[Template]: ...
    def verify_template(self, template: Template) -> list[str]:
        """What is wrong with it (size, times, owner, mode, versions); empty: nothing."""

    def remove_template(self, key: str) -> None: ...
    def expire_templates(self, now: float) -> list[str]:
        """Remove templates past their age, and drafts nobody holds the lock of. Returns the keys."""

    def alive(self) -> list[tuple[MachineId, int]]:
        """(machine, pid) of every process of this host that says it is a domain's."""

    def is_kept(self, id: MachineId, pid: int) -> bool:
        """Does the supervisor that started this process live? Of one that is gone already: any answer."""

    def discard(self, id: MachineId, traces: Traces = NO_TRACES, *, patience: float = 5.0) -> None:
        """End all processes of this machine: those that *traces* name, and those that say they are the machine's and that
        belong to the caller or to an owner the traces tell. Raises DomainDied for one that outlives *patience* seconds."""


def guest_uuid(id: MachineId) -> str:
    """The UUID of a machine, as its firmware tells it to a guest that was not cloned."""
    digits = sha256(b"belljar uuid " + id.encode("ascii", "replace")).hexdigest()
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-8{digits[17:20]}-{digits[20:32]}"


def account(setting: str) -> tuple[int, int]:
    """Who root's QEMU is where it is no job's user: the one of `qemu.user`, or one with no rights. Raises NotPermitted."""
    import pwd

    is_set = setting not in ("", "auto")
    for name in [setting] if is_set else ["belljar", "nobody"]:
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return entry.pw_uid, entry.pw_gid
    if is_set:
        hint = 'Create the user, or set `qemu.user = "auto"`.'
        raise NotPermitted(f"qemu.user = {setting!r}: no such user on this host", hint=hint)
    return NOBODY


def load(
    settings: Settings, store: Path, driver: str = "qemu", libvirt: LibvirtSettings | None = None,
    site_store: Path | None = None,
) -> Hypervisor:  # fmt: skip
    """The hypervisor of these settings. *store*: this user's folder for templates; *site_store*: root's, whose templates serve
    him too; None: *store* is the site's. *driver*: `qemu`, or `libvirt:` and a URI. Raises BadSetting."""
    if driver != "qemu":
        from belljar.hypervisor.libvirt.driver import LibvirtHypervisor

        return LibvirtHypervisor(driver, settings, libvirt or LibvirtSettings(), store)
    from belljar.hypervisor.qemu.driver import QemuHypervisor

    return QemuHypervisor(settings, store, site_store)
