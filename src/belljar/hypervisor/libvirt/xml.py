"""A domain as libvirt reads it: a pure function of its spec and of the host's ends it is plugged into.

https://libvirt.org/formatdomain.html
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, register_namespace, tostring

from belljar.errors import DriverLacks
from belljar.hypervisor import Accelerator, DomainSpec
from belljar.hypervisor.qemu.cmdline import PORT_NAME, TRANSLATIONS, compact, machine_uuid
from belljar.model import KIB
from belljar.records import dataclass

NAME = "belljar-"
NAMESPACE = "urn:belljar:machine:1"
PASSED_ON = "http://libvirt.org/schemas/domain/qemu/1.0"  # words for QEMU itself
FIRST_SLOT, LAST_SLOT = 2, 0x1E  # below it the host bridge's and by custom the screen's, above it the board's own
MODERN = "virtio-non-transitional"
MODERN_PCI = "virtio-net-pci-non-transitional"  # the same of a card, in QEMU's words
QEMU_NAMES = {"host": "host-passthrough", "max": "maximum"}  # QEMU's words for processors, and libvirt's

register_namespace("belljar", NAMESPACE)
register_namespace("qemu", PASSED_ON)


@dataclass(frozen=True)
class Ends:
    """The host's side of a domain. Every file by a path that the hypervisor's process can open."""

    accelerator: Accelerator
    channel: Path  # sockets on which we listen: QEMU connects when it starts, so nothing it says is missed
    console: Path
    layers: tuple[Path, ...]  # the disk, overlay first
    kernel: Path | None = None
    initrd: Path | None = None
    firmware: str = ""  # the file of the UEFI; empty: the BIOS that comes with QEMU
    emulator: str = ""  # empty: libvirt's choice
    cpu: str = "max"  # in QEMU's words
    below: tuple[tuple[Path, ...], ...] = ()  # what each further disk stands on, the upper ones first
    label: tuple[int, int] | None = None  # uid and gid of the process; None: libvirt's choice
    seed: Path | None = None
    card: Path | None = None  # where the frames of its card go to


def domain_xml(spec: DomainSpec, ends: Ends) -> str:
    """The document for a transient domain. Raises DriverLacks for what cannot be written in it."""
    domain = Element("domain", type="kvm" if ends.accelerator is Accelerator.KVM else "qemu")
    identity(domain, spec)
    SubElement(domain, "memory", unit="KiB").text = str(spec.memory // KIB)
    SubElement(domain, "vcpu", placement="static").text = str(spec.cpus)
    operating_system(domain, spec, ends)
    board(domain, spec, ends)
    endings(domain)
    words = devices(domain, spec, ends)
    if ends.label is not None:
        label(domain, ends.label)
    passed_on(domain, words)
    indent(domain)
    text = tostring(domain, encoding="unicode") + "\n"
    check(text)
    return text


def identity(domain: Element, spec: DomainSpec) -> None:
    """By its name anybody finds the process, by its metadata the machine."""
    SubElement(domain, "name").text = NAME + spec.id
    SubElement(domain, "uuid").text = machine_uuid(spec.id)
    machine = SubElement(SubElement(domain, "metadata"), f"{{{NAMESPACE}}}machine")
    machine.set("id", spec.id)


def operating_system(domain: Element, spec: DomainSpec, ends: Ends) -> None:
    system = SubElement(domain, "os")
    kind = SubElement(system, "type")
    kind.text = "hvm"
    kind.set("machine", "q35")
    kind.set("arch", "x86_64")
    if ends.firmware:
        SubElement(system, "loader", readonly="yes", type="rom").text = ends.firmware
    if ends.kernel is None:
        # firmware that finds nothing to boot resets at once, and the machine ends
        SubElement(system, "bios", rebootTimeout="0")
        return
    SubElement(system, "kernel").text = str(ends.kernel)
    if ends.initrd is not None:
        SubElement(system, "initrd").text = str(ends.initrd)
    SubElement(system, "cmdline").text = spec.boot.append


def board(domain: Element, spec: DomainSpec, ends: Ends) -> None:
    """Processors and what comes with the board."""
    features = SubElement(domain, "features")
    SubElement(features, "acpi")
    SubElement(features, "apic")
    SubElement(features, "vmport", state="off")
    if ends.accelerator is Accelerator.TCG:
        SubElement(SubElement(features, "tcg"), "tb-cache", unit="MiB").text = str(TRANSLATIONS)
    processor(domain, spec, ends.cpu)
    clock = SubElement(domain, "clock", offset="utc")
    SubElement(clock, "timer", name="hpet", present="no")


def processor(domain: Element, spec: DomainSpec, cpu: str) -> None:
    if "," in cpu:
        raise DriverLacks(f"the processor {cpu!r}: by libvirt only a model can be named, without features")
    if cpu in QEMU_NAMES:
        chosen = SubElement(domain, "cpu", mode=QEMU_NAMES[cpu], check="none")
    else:
        chosen = SubElement(domain, "cpu", mode="custom", match="exact", check="none")
        SubElement(chosen, "model", fallback="forbid").text = cpu
    SubElement(chosen, "topology", sockets="1", cores=str(spec.cpus), threads="1")


def endings(domain: Element) -> None:
    """Nobody is given a reboot. A guest that crashed stays for the event to be heard, then it is ended."""
    SubElement(domain, "on_poweroff").text = "destroy"
    SubElement(domain, "on_reboot").text = "destroy"
    SubElement(domain, "on_crash").text = "preserve"


def devices(domain: Element, spec: DomainSpec, ends: Ends) -> list[str]:
    """The parts list. Returns what libvirt has no words for, in those of QEMU."""
    every = SubElement(domain, "devices")
    slots = count(FIRST_SLOT)
    if ends.emulator:
        SubElement(every, "emulator").text = ends.emulator
    names = disk_names()
    bootable = ends.kernel is None
    if spec.boot.is_disc:
        disc(every, ends)
    else:
        own = disk(every, ends, next(names), "qcow2", ends.layers, bootable=bootable)
        place(own, slots)
    for extra, below in zip(spec.disks, ends.below, strict=True):
        layers = (extra.path, *below)
        made = disk(every, ends, next(names), extra.format, layers, readonly=extra.readonly, serial=extra.name)
        place(made, slots)
    if ends.seed is not None:
        made = disk(every, ends, next(names), "raw", (ends.seed,), readonly=True, serial="seed")
        place(made, slots)
    controllers(every, slots)
    for share in spec.shares:
        shared_folder(every, share.tag, share.source, slots, readonly=share.readonly)
    words = network_card(spec, ends, slots)
    lines(every, ends)
    extras(every, slots)
    return words


def disk_names() -> Iterator[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return (f"vd{first}{second}" for first in ("", *letters) for second in letters)


def disk(
    every: Element,
    ends: Ends,
    name: str,
    format: str,
    layers: tuple[Path, ...],
    *,
    readonly: bool = False,
    bootable: bool = False,
    serial: str = "",
) -> Element:
    """A disk with its whole chain written down, so that libvirt reads no header. A full host disk stops the guest."""
    made = SubElement(every, "disk", type="file", device="disk")
    driver = SubElement(made, "driver", name="qemu", type=format)
    driver.set("cache", "writeback" if readonly else "unsafe")
    driver.set("error_policy", "enospace")
    driver.set("rerror_policy", "report")
    SubElement(made, "source", file=str(layers[0]))
    chain(made, layers[1:])
    SubElement(made, "target", dev=name, bus="virtio")
    made.set("model", MODERN)
    if serial:
        SubElement(made, "serial").text = serial
    if readonly:
        SubElement(made, "readonly")
    if bootable:
        SubElement(made, "boot", order="1")
    return made


def disc(every: Element, ends: Ends) -> None:
    """A machine's own disk that is a CD-ROM, on a controller that every firmware boots from."""
    made = SubElement(every, "disk", type="file", device="cdrom")
    SubElement(made, "driver", name="qemu", type="qcow2")
    SubElement(made, "source", file=str(ends.layers[0]))
    chain(made, ends.layers[1:])
    SubElement(made, "target", dev="sda", bus="sata")
    SubElement(made, "readonly")
    SubElement(made, "boot", order="1")


def chain(parent: Element, layers: tuple[Path, ...]) -> None:
    """What a disk stands on; an empty element ends it."""
    for layer in layers:
        parent = SubElement(parent, "backingStore", type="file")
        SubElement(parent, "format", type="qcow2")
        SubElement(parent, "source", file=str(layer))
    SubElement(parent, "backingStore")


def place(device: Element, slots: Iterator[int]) -> None:
    """On the root bus: a port for each device would cost a second of boot time under emulation."""
    slot = free(slots)
    SubElement(device, "address", type="pci", domain="0x0000", bus="0x00", slot=f"{slot:#04x}", function="0x0")


def free(slots: Iterator[int]) -> int:
    if (slot := next(slots)) > LAST_SLOT:
        raise DriverLacks("so many disks and shares: by libvirt there is room for some 25 together")
    return slot


def controllers(every: Element, slots: Iterator[int]) -> None:
    SubElement(every, "controller", type="usb", index="0", model="none")
    serial = SubElement(every, "controller", type="virtio-serial", index="0", model=MODERN, ports="2")
    place(serial, slots)


def shared_folder(every: Element, tag: str, source: str, slots: Iterator[int], *, readonly: bool) -> None:
    """A 9p export. `squash`: files the guest makes are the process's user's."""
    export = SubElement(every, "filesystem", type="mount", accessmode="squash", multidevs="remap", model=MODERN)
    SubElement(export, "driver", type="path")
    SubElement(export, "source", dir=source)
    SubElement(export, "target", dir=tag)
    if readonly:
        SubElement(export, "readonly")
    place(export, slots)


def network_card(spec: DomainSpec, ends: Ends, slots: Iterator[int]) -> list[str]:
    """A line to a process of ours, in QEMU's words: libvirt has none for it."""
    if spec.nic is None:
        return []
    wire = {"server": False, "addr": {"type": "unix", "path": str(ends.card)}}
    device = f"{MODERN_PCI},netdev=net,mac={spec.nic.mac},romfile=,bus=pcie.0,addr={free(slots):#x}"
    return ["-netdev", compact({"type": "stream", "id": "net"} | wire), "-device", device]


def passed_on(domain: Element, words: list[str]) -> None:
    """https://libvirt.org/drvqemu.html#pass-through-of-arbitrary-qemu-commands"""
    if words:
        every = SubElement(domain, f"{{{PASSED_ON}}}commandline")
        for word in words:
            SubElement(every, f"{{{PASSED_ON}}}arg").set("value", word)


def lines(every: Element, ends: Ends) -> None:
    """Console and agent's channel, as sockets."""
    serial = SubElement(every, "serial", type="unix")
    SubElement(serial, "source", mode="connect", path=str(ends.console))
    SubElement(SubElement(serial, "target", type="isa-serial", port="0"), "model", name="isa-serial")
    channel = SubElement(every, "channel", type="unix")
    SubElement(channel, "source", mode="connect", path=str(ends.channel))
    SubElement(channel, "target", type="virtio", name=PORT_NAME)
    SubElement(channel, "address", type="virtio-serial", controller="0", bus="0", port="1")


def extras(every: Element, slots: Iterator[int]) -> None:
    """Entropy, the notice of a kernel that crashes, and nothing that libvirt would add by itself."""
    SubElement(SubElement(every, "video"), "model", type="none")
    SubElement(every, "memballoon", model="none")
    entropy = SubElement(every, "rng", model=MODERN)
    SubElement(entropy, "backend", model="builtin")
    place(entropy, slots)
    SubElement(every, "panic", model="isa")


def label(domain: Element, owner: tuple[int, int]) -> None:
    """The process's user. Nothing is given to it: what belljar made for it belongs to it already."""
    made = SubElement(domain, "seclabel", type="static", model="dac", relabel="no")
    SubElement(made, "label").text = f"+{owner[0]}:+{owner[1]}"


def check(text: str) -> None:
    """Names of files may hold bytes that no XML can."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise DriverLacks("a path that is not UTF-8: libvirt cannot be told it") from exc
    if any(ord(letter) < 32 and letter not in "\t\n\r" for letter in text):
        raise DriverLacks("a path with control characters: libvirt cannot be told it")
