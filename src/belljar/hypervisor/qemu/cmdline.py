"""QEMU's command line: a pure function of a domain's spec and the descriptors it is plugged into.

One small function per device; `command_line` reads as the parts list. Whatever changes what the guest sees is part of
`hardware`, which a template and its clones must have in common; what the two have of their own is in `Plugs`.
https://www.qemu.org/docs/master/system/invocation.html
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from belljar.hints import Any
from belljar.hypervisor import Accelerator, Boot, DomainSpec, Frame, Layout, Node, guest_uuid
from belljar.hypervisor.devices import kinds_of, served, share_kinds
from belljar.hypervisor.devices.disk import compact
from belljar.hypervisor.qemu.abilities import FEW_THREADS, FILE_MIGRATION, MONITOR_OBJECT, READONLY_RAM, Abilities
from belljar.hypervisor.qemu.process.launch import Launch, reopened
from belljar.model import MIB, MachineId
from belljar.records import replace

TRANSLATIONS = 64  # MiB of TCG's buffer
PORT_NAME = "org.belljar.agent"
MARK = "guest=belljar-"  # by which anybody finds our processes

# Nothing of these is of use to a batch job, and each costs time at start.
MACHINE = "q35,usb=off,smbus=off,sata=off,vmport=off,hpet=off,mem-merge=off,dump-guest-core=off"
SLOTS = 8  # for memory that is plugged in
TIMES = 8  # so many times what is there can one piece of memory be: its bookkeeping then takes an eighth of that
NO_WRITES: dict[str, Any] = {"readonly": True, "rom": "off"}
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def command_line(launch: Launch, abilities: Abilities, cpu: str) -> list[str]:
    """The parts list of a domain."""
    spec = launch.spec
    return [
        abilities.binary,
        *bare(),
        *("-name", f"{MARK}{spec.id}", "-uuid", spec.uuid),
        *("-sandbox", SANDBOX),
        *machine(launch, abilities, cpu),
        *(grown(launch, abilities, cpu) if launch.is_grown else []),
        *kernel(launch),
        *few_workers(launch.workers, abilities),
        *monitor(launch.monitor, abilities),
        *console(launch.console),
        *notifiers(abilities),
        *entropy(),
        *agent_port(launch.channel),
        *(device_state(launch, abilities) if launch.incoming >= 0 else []),
        *(word for kind in kinds_of(spec) for word in kind.words(launch)),
    ]


def hardware(spec: DomainSpec, abilities: Abilities, cpu: str) -> list[str]:
    """What the guest sees, written down: equal for a template and its clones, different from every other machine."""
    return command_line(Launch(replace(nobodys(spec), disks=()), layers=(0,), ram=0), abilities, cpu)


def hardware_now(spec: DomainSpec, abilities: Abilities, cpu: str) -> list[str]:
    """The same with all that a machine has beyond its template: equal for it and one that goes on from its memory, on any host."""
    boot = Boot(Path() if spec.boot.kernel else None, firmware=spec.boot.firmware, is_disc=spec.boot.is_disc)
    here = replace(nobodys(spec), boot=boot, seed=Path() if spec.seed else None)
    launch = Launch(here, layers=(0,), disks=((0,),) * len(spec.disks), incoming=0, is_stream=True, is_grown=True)
    return command_line(launch, abilities, cpu)[1:]


def nobodys(spec: DomainSpec) -> DomainSpec:
    """The machine without a name, and without a place on any host."""
    return replace(
        spec, id="", nic=replace(spec.nic, mac="", egress=None, fd=-1) if spec.nic else None,
        shares=tuple(replace(share, source="", target="", readonly=False) for share in spec.shares),
        devices=tuple(replace(device, address="") for device in spec.devices),
    )  # fmt: skip


def bare() -> list[str]:
    return ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]


def marked(argv: list[bytes]) -> MachineId | None:
    """The machine whose QEMU has this command line; None for any other process. By libvirt anybody may have a domain of such a
    name, but it has another UUID. setpriv is what a QEMU of ours is for the millisecond before it is QEMU."""
    program, options = b"".join(argv[:1]).rpartition(b"/")[2], dict(pairwise(argv))
    name = options.get(b"-name", b"").decode("ascii", "replace").partition(",")[0]
    if not program.startswith((b"qemu", b"setpriv")) or not name.startswith(MARK):
        return None
    id = name.removeprefix(MARK)
    uuid = guest_uuid(id).encode()
    return id if options.get(b"-uuid", uuid) == uuid else None


def machine(launch: Launch, abilities: Abilities, cpu: str) -> list[str]:
    """Board, processors, memory. A clone maps its template's memory: what it writes stays its own, unless others map it too."""
    spec, frame = launch.spec, launch.spec.frame
    booted = spec.of_template
    most, room = booted.cpus, ""
    if frame is not None:
        most, room = frame.most_cpus, f",slots={SLOTS},maxmem={frame.most_memory // MIB}M"
    count = f"cpus={booted.cpus}," + (f"maxcpus={most}," if frame else "")
    layout = spec.layout or Layout(1, most, 1)
    # Without this feature a guest takes AMD's threads for cores; other processors ignore it.
    siblings = ",topoext=on" if layout.threads > 1 and spec.accelerator is Accelerator.KVM else ""
    words = ["-accel", accelerator(spec.accelerator, spec.cpus), "-cpu", cpu + siblings]
    words += ["-smp", f"{count}sockets={layout.sockets},cores={layout.cores},threads={layout.threads}"]
    words += ["-m", f"{booted.memory // MIB}M{room}"]
    if layout.nodes:
        return [*words, *numa(spec, layout.nodes), "-M", MACHINE]
    backend = memory_backend(launch, abilities, "ram", booted.memory, launch.ram)
    return [*words, "-object", compact(backend), "-M", f"{MACHINE},memory-backend=ram"]


def memory_backend(launch: Launch, abilities: Abilities, name: str, size: int, fd: int) -> dict[str, Any]:
    """Memory in a file, or QEMU's own. The name is in the state that a template or a checkpoint is made of."""
    if fd < 0:
        return laid_out(launch.spec, name, size)
    is_private = launch.incoming >= 0 and not launch.folders and not launch.is_draft
    backend = {
        "qom-type": "memory-backend-file",
        "id": name,
        "size": size,
        "mem-path": reopened(fd),
        "share": not is_private,
    }
    return backend | (NO_WRITES if is_private and READONLY_RAM in abilities.features else {})


def laid_out(spec: DomainSpec, name: str, size: int) -> dict[str, Any]:
    """QEMU's own memory. All the reserved pages that it consists of are promised to it by the kernel when it maps them."""
    if not (spec.pages or served(spec)):
        return {"qom-type": "memory-backend-ram", "id": name, "size": size}
    backend = {"qom-type": "memory-backend-memfd", "id": name, "size": size, "share": True}
    return backend | ({"hugetlb": True, "hugetlbsize": spec.pages} if spec.pages else {})


def numa(spec: DomainSpec, nodes: Sequence[Node]) -> list[str]:
    """The guest's nodes. `preferred`: where a node of this host is full, others help out; `bind` would have the guest killed."""
    words, first = list[str](), 0
    for number, node in enumerate(nodes):
        backend = {**laid_out(spec, f"ram{number}", node.memory), "host-nodes": [node.host], "policy": "preferred"}
        cpus = f"cpus={first}-{first + node.cpus - 1}"
        words += ["-object", compact(backend), "-numa", f"node,nodeid={number},memdev=ram{number},{cpus}"]
        first += node.cpus
    return words


def grown(launch: Launch, abilities: Abilities, cpu: str) -> list[str]:
    """What a clone is given by commands otherwise (template/plugging.py), under the same names and in the same order."""
    spec, booted, words = launch.spec, launch.spec.of_template, list[str]()
    for number, size in enumerate(pieces(spec.plugged, booted.memory)):
        fd = launch.more[number] if launch.more else -1
        words += ["-object", compact(memory_backend(launch, abilities, f"more{number}", size, fd))]
        words += ["-device", f"pc-dimm,id=dimm{number},memdev=more{number}"]
    kind = f"{cpu.partition(',')[0]}-x86_64-cpu"
    for number in range(1, spec.cpus - booted.cpus + 1):
        place = f"socket-id=0,core-id={booted.cpus + number - 1},thread-id=0"
        words += ["-device", f"{kind},id=cpu{number},{place}"]
    return words


def pieces(missing: int, there: int, block: int = Frame.block) -> list[int]:
    """How *missing* bytes are plugged into a guest that has *there*, in whole blocks. For each page of new memory the kernel needs
    1/64 of it in the old: that bounds how much one piece can bring."""
    sizes: list[int] = []
    left = -(-max(missing, 0) // block) * block
    while left > 0:
        sizes.append(min(left, there * TIMES))
        there, left = there + sizes[-1], left - sizes[-1]
    return sizes


def few_workers(most: int, abilities: Abilities) -> list[str]:
    """By itself QEMU takes up to 64 threads for disk requests, with 8 MiB of stack each."""
    is_bounded = most and FEW_THREADS in abilities.features
    return ["-object", f"main-loop,id=main-loop,thread-pool-max={most}"] if is_bounded else []


def accelerator(kind: Accelerator, cpus: int) -> str:
    """TCG's buffer of translations is given a size: its own choice, a gigabyte, would not fit into a job's limits. Where there is one
    processor it needs no locks between several."""
    one_thread = ",thread=single" if cpus == 1 else ""
    return f"tcg,tb-size={TRANSLATIONS}{one_thread}" if kind is Accelerator.TCG else kind.value


def kernel(launch: Launch) -> list[str]:
    """A clone has its kernel in memory already: 9 ms of reading it are saved (docs/develop/decisions/0003-a-quick-start.md). Firmware that
    finds nothing to boot resets at once, which ends QEMU; left alone it would wait for ever."""
    boot = launch.spec.boot
    if boot.kernel is None:
        return [*(["-bios", launch.firmware] if launch.firmware else []), "-boot", "reboot-timeout=0"]
    if launch.incoming >= 0:
        return []
    return ["-kernel", launch.kernel, *(["-initrd", launch.initrd] if launch.initrd else []), "-append", boot.append]


def monitor(fd: int, abilities: Abilities) -> list[str]:
    words = ["-mon", "chardev=monitor,mode=control"]
    if MONITOR_OBJECT in abilities.features:
        words = ["-object", "monitor-qmp,id=qmp,chardev=monitor"]
    return ["-chardev", f"socket,id=monitor,fd={fd}", *words]


def device_state(launch: Launch, abilities: Abilities) -> list[str]:
    """The state is loaded by command, from where `state_address` says. A guest that becomes a template does not run on."""
    fd, is_file = launch.incoming, FILE_MIGRATION in abilities.features and not launch.is_stream
    words = ["-add-fd", f"fd={fd},set={fd}"] if is_file else []
    return [*words, *(["-S"] if launch.is_draft else []), "-incoming", "defer"]


def state_address(fd: int | str, abilities: Abilities, *, is_stream: bool = False) -> str:
    """What a migration calls the file of a set or descriptor. Newer QEMU takes `fd:` for pipes and sockets alone."""
    return f"file:/dev/fdset/{fd}" if FILE_MIGRATION in abilities.features and not is_stream else f"fd:{fd}"


def console(fd: int) -> list[str]:
    return ["-chardev", f"socket,id=console,fd={fd}", "-serial", "chardev:console"]


def notifiers(abilities: Abilities) -> list[str]:
    """For a kernel's panic; and a kernel is notified that it has become a clone, so that it reseeds even before the agent does."""
    panic = ["-device", "pvpanic-pci"] if "pvpanic-pci" in abilities.devices else []
    return [*panic, *(["-device", "vmgenid,guid=auto"] if "vmgenid" in abilities.devices else [])]


def entropy() -> list[str]:
    return ["-object", "rng-builtin,id=entropy", "-device", "virtio-rng-pci-non-transitional,rng=entropy"]


def agent_port(fd: int) -> list[str]:
    return [
        *("-device", "virtio-serial-pci-non-transitional,max_ports=2"),
        *("-chardev", f"socket,id=agent,fd={fd}"),
        *("-device", f"virtserialport,chardev=agent,name={PORT_NAME}"),
    ]


def capabilities(spec: DomainSpec) -> tuple[str, ...]:
    """Root stays root only for root's own shares, with what their kinds need."""
    kinds = share_kinds(spec) if spec.owner[0] == 0 else ()
    return tuple(name for kind in kinds for name in kind.capabilities)


def tiny_guest(abilities: Abilities, cpu: str, append: str, *, kernel: str, initrd: str) -> list[str]:
    """A guest that only shows that KVM runs it: no disk, no monitor, its console is QEMU's output. Without a kernel the
    firmware greets there, where it has no graphics."""
    words = [abilities.binary, *bare(), "-sandbox", SANDBOX, "-accel", "kvm", "-cpu", cpu, "-m", "512M"]
    words += ["-serial", "stdio"]
    if not kernel:
        return [*words, "-M", f"{MACHINE},graphics=off"]
    return [*words, "-M", MACHINE, "-kernel", kernel, *(["-initrd", initrd] if initrd else []), "-append", append]
