"""QEMU's command line: a pure function of a domain's spec and the descriptors it is plugged into.

One small function per device; `command_line` reads as the parts list. Whatever changes what the guest sees is part of
`hardware`, which a template and its clones must have in common; what the two have of their own is in `Plugs`.
https://www.qemu.org/docs/master/system/invocation.html
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from belljar.hints import Any
from belljar.hypervisor import (
    Accelerator,
    Boot,
    DomainSpec,
    Frame,
    Layout,
    Nic,
    Node,
    SharedFolder,
    device_port,
    guest_uuid,
)
from belljar.hypervisor.qemu.abilities import FEW_THREADS, FILE_MIGRATION, MONITOR_OBJECT, READONLY_RAM, Abilities
from belljar.hypervisor.qemu.process.launch import Launch, reopened
from belljar.model import MIB, MachineId, NetworkMode, ShareKind
from belljar.records import replace

TRANSLATIONS = 64  # MiB of TCG's buffer
PORT_NAME = "org.belljar.agent"
MARK = "guest=belljar-"
UPLINK = "uplink"  # what a warm image is prepared with

# Nothing of these is of use to a batch job, and each costs time at start.
MACHINE = "q35,usb=off,smbus=off,sata=off,vmport=off,hpet=off,mem-merge=off,dump-guest-core=off"
# Devices that a template never has sit at the far end of the bus, eight in a slot, so that all others keep their places.
LAST_SLOT = 0x1E  # the one behind it is the board's own
FUNCTIONS = 8
SLOTS = 8  # for memory that is plugged in
TIMES = 8  # so many times what is there can one piece of memory be: its bookkeeping then takes an eighth of that
CARD_SLOT = LAST_SLOT - 4  # of a card that its template did not have; further disks do not come so far down
WINDOWS = ("mem-reserve", "pref64-reserve")  # of a port: firmware keeps 2 MiB by itself
WRITTEN: dict[str, Any] = {"cache": {"no-flush": True}}  # what a machine writes is gone with it: no flush is needed
READ: dict[str, Any] = {"read-only": True}
NO_WRITES: dict[str, Any] = {"readonly": True, "rom": "off"}
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def command_line(launch: Launch, abilities: Abilities, cpu: str) -> list[str]:
    """The parts list of a domain."""
    spec = launch.spec
    return [
        abilities.binary,
        *bare(),
        *name(spec.id),
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
        *disk(launch),
        *(network_card(spec.nic, launch) if spec.nic else []),
        *shared_folders(launch),
        *host_devices(launch),
        *(seed_disc(launch.seed) if spec.seed else []),
        *further_disks(launch),
        *(device_state(launch, abilities) if launch.incoming >= 0 else []),
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
        shares=tuple(replace(share, source="", readonly=False) for share in spec.shares),
        devices=tuple(replace(device, address="") for device in spec.devices),
    )  # fmt: skip


def bare() -> list[str]:
    return ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]


def name(id: str) -> list[str]:
    """The mark by which anybody finds our processes, and the guest's UUID as its firmware tells it."""
    return ["-name", f"{MARK}{id}", "-uuid", guest_uuid(id)]


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
    if not (spec.pages or spec.served):
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


def node(name: str, format: str, fd: int, trait: dict[str, Any], **more: Any) -> list[str]:
    """A file that QEMU inherits, as the block node *name*. A descriptor's number is that of its file set, too."""
    file = {"driver": "file", "filename": f"/dev/fdset/{fd}", "node-name": f"{name}-file"} | trait
    whole = {"driver": format, "node-name": name, "file": f"{name}-file"} | more | trait
    return ["-add-fd", f"fd={fd},set={fd}", "-blockdev", compact(file), "-blockdev", compact(whole)]


def chain(name: str, fds: tuple[int, ...], trait: dict[str, Any]) -> list[str]:
    """A qcow2 disk, the overlay first, as the nodes *name*0 and so on; what it stands on is only read."""
    words: list[str] = []
    for level in reversed(range(len(fds))):
        backing = f"{name}{level + 1}" if level + 1 < len(fds) else None
        words += node(f"{name}{level}", "qcow2", fds[level], READ if level else trait, backing=backing)
    return words


def disk(launch: Launch) -> list[str]:
    """The overlay on its base. A template's is synced when it is saved. A full host disk stops the guest. A guest that only becomes a
    template reads none."""
    boot, size = launch.spec.boot, launch.spec.disk_size
    nothing = ["-blockdev", compact({"driver": "null-co", "node-name": "disk0", "size": size})]
    words = chain("disk", launch.layers, WRITTEN) or nothing
    if boot.is_disc:  # on a controller that every firmware boots from, and guests with nothing there need no driver for
        return [*words, "-device", "ich9-ahci,id=discs", "-device", "ide-cd,bus=discs.0,drive=disk0,bootindex=1"]
    order = "" if boot.kernel else ",bootindex=1"
    return [*words, "-device", f"virtio-blk-pci-non-transitional,drive=disk0,werror=enospc,rerror=report{order}"]


def seed_disc(fd: int) -> list[str]:
    """A read-only disc that every guest has a driver for, because its own disk needs the same one."""
    words = node("seed", "raw", fd, READ)
    return [*words, "-device", "virtio-blk-pci-non-transitional,drive=seed,serial=seed"]


def further_disks(launch: Launch) -> list[str]:
    """Disks of one machine alone, each an inherited descriptor, known to the guest by its serial."""
    words: list[str] = []
    for number, (disk, fds) in enumerate(zip(launch.spec.disks, launch.disks, strict=True)):
        name, trait = f"x-{disk.name}-", READ if disk.readonly else {**WRITTEN, "discard": "unmap"}
        words += chain(name, fds, trait) if disk.format == "qcow2" else node(f"{name}0", disk.format, fds[0], trait)
        device = f"virtio-blk-pci-non-transitional,drive={name}0,serial={disk.name},werror=enospc,rerror=report"
        words += ["-device", f"{device},{place_at_the_end(number)}"]
    return words


def place_at_the_end(number: int) -> str:
    """The bus address of the n-th device that a template does not have."""
    slot, function = LAST_SLOT - number // FUNCTIONS, number % FUNCTIONS
    return f"addr={slot:#x}.{function:#x}" + (",multifunction=on" if function == 0 else "")


def network_card(nic: Nic, launch: Launch) -> list[str]:
    """The card is the same whatever it is plugged into. One that its template does not have is in a slot at the end."""
    place = f",addr={CARD_SLOT:#x}" if launch.spec.of_template.nic is None else ""
    backend = ["-netdev", network_backend(nic, launch.network, is_draft=launch.is_draft)]
    return [
        *(uplink() if launch.has_uplink else backend),
        *("-device", f"virtio-net-pci-non-transitional,netdev=net,mac={nic.mac},romfile={place}"),
    ]


def network_backend(nic: Nic, line: int, *, is_draft: bool = False) -> str:
    """QEMU's own user network, a tap, a socket that carries frames, or, without a *line*, a hub with nobody else."""
    if not nic.has_line:
        return "user,id=net,ipv6=off" + (",restrict=on" if is_draft else "")
    if line < 0:
        return "hubport,id=net,hubid=0"
    kind = "tap,id=net,vhost=off" if nic.mode is NetworkMode.BRIDGE else "socket,id=net"
    return f"{kind},fd={line}"


def uplink() -> list[str]:
    """A user network that can be taken away from its card, by a hub between them: QEMU 10 keeps what a card is plugged into until the
    card goes, too."""
    backends = ("hubport,id=net,hubid=0", f"user,id={UPLINK},ipv6=off", f"hubport,id=wire,hubid=0,netdev={UPLINK}")
    return [word for backend in backends for word in ("-netdev", backend)]


def shared_folders(launch: Launch) -> list[str]:
    """Those by 9p are hardware that every clone has. The device of one that a process beside QEMU serves takes part in no migration:
    the hardware is a port that is free, and a clone's device is plugged into it when the device state is loaded."""
    words = [word for share in launch.spec.shares if share.kind is ShareKind.NINEP for word in by_9p(share)]
    for number, _ in enumerate(launch.spec.served):
        words += ["-device", f"pcie-root-port,id=port{number},chassis={number + 1},io-reserve=0"]
    devices = served_devices(launch.spec) if launch.folders else []  # nobody serves a template's
    for number, (device, fd) in enumerate(zip(devices, launch.folders, strict=True)):
        words += ["-chardev", f"socket,id=folder{number},fd={fd}"]
        if launch.incoming < 0:
            words += ["-device", ",".join((str(device.pop("driver")), *(f"{key}={it}" for key, it in device.items())))]
    return words


def served_devices(spec: DomainSpec) -> list[dict[str, Any]]:
    """Those folders, as QMP's `device_add` takes them."""
    return [
        {"driver": "vhost-user-fs-pci", "tag": share.tag, "queue-size": 1024, "chardev": f"folder{number}", "bus": f"port{number}"}
        for number, share in enumerate(spec.served)
    ]  # fmt: skip


def host_devices(launch: Launch) -> list[str]:
    """A port for each, which a template has free; a clone's device is plugged into it when the device state is loaded. Windows of a
    bus are powers of two."""
    words: list[str] = []
    for number, device in enumerate(launch.spec.devices):
        place = device_port(number).removeprefix("0000:00:") + (",multifunction=on" if number % FUNCTIONS == 0 else "")
        sizes = zip(WINDOWS, device.windows, strict=True)
        kept = "".join(f",{name}={1 << (size - 1).bit_length()}" for name, size in sizes if size > MIB)
        words += ["-device", f"pcie-root-port,id=given{number},chassis={number + 64},io-reserve=0{kept},addr={place}"]
    for given in vfio_devices(launch.spec) if launch.incoming < 0 and not launch.is_draft else ():
        words += ["-device", ",".join((given.pop("driver"), *(f"{key}={value}" for key, value in given.items())))]
    return words


def vfio_devices(spec: DomainSpec) -> list[dict[str, str]]:
    """Those devices, as QMP's `device_add` takes them. A mediated one has a UUID."""
    mediated, bus = "/sys/bus/mdev/devices/", "given{}".format
    places = [{"host": it.address} if ":" in it.address else {"sysfsdev": mediated + it.address} for it in spec.devices]
    return [{"driver": "vfio-pci", **place, "id": f"host{n}", "bus": bus(n)} for n, place in enumerate(places)]


def by_9p(share: SharedFolder) -> list[str]:
    """`none`: files the guest makes are QEMU's user's."""
    path = share.source.replace(",", ",,")
    export = f"local,id={share.tag},path={path},security_model=none,multidevs=remap"
    return [
        *("-fsdev", export + (",readonly=on" if share.readonly else "")),
        *("-device", f"virtio-9p-pci-non-transitional,fsdev={share.tag},mount_tag={share.tag}"),
    ]


def capabilities(spec: DomainSpec) -> tuple[str, ...]:
    """Root stays root only for root's own shares by 9p, with what that needs to act for any user of the guest."""
    serves_root = spec.owner[0] == 0 and len(spec.shares) > len(spec.served)
    return ("chown", "dac_override", "dac_read_search", "fowner", "fsetid") if serves_root else ()


def tiny_guest(abilities: Abilities, cpu: str, append: str, *, kernel: str, initrd: str) -> list[str]:
    """A guest that only shows that KVM runs it: no disk, no monitor, its console is QEMU's output. Without a kernel the
    firmware greets there, where it has no graphics."""
    words = [abilities.binary, *bare(), "-sandbox", SANDBOX, "-accel", "kvm", "-cpu", cpu, "-m", "512M"]
    words += ["-serial", "stdio"]
    if not kernel:
        return [*words, "-M", f"{MACHINE},graphics=off"]
    return [*words, "-M", MACHINE, "-kernel", kernel, *(["-initrd", initrd] if initrd else []), "-append", append]


def compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))
