"""A domain as libvirt reads it: a pure function of its spec and of what the host offers it.

https://libvirt.org/formatdomain.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from belljar.errors import UsageError
from belljar.hypervisor import Accelerator, DomainSpec, guest_uuid
from belljar.hypervisor.qemu.cmdline import PORT_NAME, TRANSLATIONS
from belljar.model import KIB, NetworkMode
from belljar.records import dataclass

NAME = "belljar-"
FIRST_SLOT, LAST_SLOT = 2, 0x1E  # below it the host bridge's and by custom the screen's, above it the board's own
MODERN = "virtio-non-transitional"
QEMU_NAMES = {"host": "host-passthrough", "max": "maximum"}  # QEMU's words for processors, and libvirt's
UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")
LACKS = "Ask for a machine without it; docs/batch/libvirt.md tells what libvirt's machines lack."
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Ends:
    """The host's side of a domain. Every file by a path that QEMU's user can open."""

    layers: tuple[Path, ...]  # the disk, overlay first
    below: tuple[tuple[Path, ...], ...] = ()  # what each further disk stands on, the upper ones first
    firmware: str = ""  # the file of the UEFI; empty: the BIOS that comes with QEMU
    emulator: str = ""  # empty: libvirt's choice
    cpu: str = "max"  # in QEMU's words
    label: tuple[int, int] | None = None  # uid and gid of the process; None: libvirt's choice


def domain_xml(spec: DomainSpec, ends: Ends) -> str:
    """The document for a transient domain. Nobody is given a reboot; a guest that crashed stays for the event to be heard.
    Raises UsageError for what cannot be written in it."""
    is_tcg, slots = spec.accelerator is Accelerator.TCG, count(FIRST_SLOT)
    buffer = f'<tcg><tb-cache unit="MiB">{TRANSLATIONS}</tb-cache></tcg>' if is_tcg else ""
    text = f"""<domain type="{"qemu" if is_tcg else "kvm"}">
  <name>{NAME}{spec.id}</name>
  <uuid>{guest_uuid(spec.id)}</uuid>
  <metadata><belljar:machine xmlns:belljar="urn:belljar:machine:1" id="{spec.id}"/></metadata>
  <memory unit="KiB">{spec.memory // KIB}</memory>
  <vcpu placement="static">{spec.cpus}</vcpu>
  {system(spec, ends)}
  <features><acpi/><apic/><vmport state="off"/>{buffer}</features>
  {processor(ends.cpu, spec.cpus)}
  <clock offset="utc"><timer name="hpet" present="no"/></clock>
  <on_poweroff>destroy</on_poweroff>
  <on_reboot>destroy</on_reboot>
  <on_crash>preserve</on_crash>
  <devices>
    {f"<emulator>{escape(ends.emulator)}</emulator>" if ends.emulator else ""}
    {"".join(disks(spec, ends, slots))}
    <controller type="usb" index="0" model="none"/>
    <controller type="virtio-serial" index="0" model="{MODERN}" ports="2">{place(slots)}</controller>
    {"".join(shares(spec, slots))}
    {card(spec, slots)}
    <serial type="pty"><target type="isa-serial" port="0"><model name="isa-serial"/></target></serial>
    <channel type="unix">
      <target type="virtio" name="{PORT_NAME}"/>
      <address type="virtio-serial" controller="0" bus="0" port="1"/>
    </channel>
    <video><model type="none"/></video>
    <memballoon model="none"/>
    <rng model="{MODERN}"><backend model="builtin"/>{place(slots)}</rng>
    <panic model="isa"/>
  </devices>
  {label(ends.label)}
</domain>
"""
    if UNWRITABLE.search(text):
        raise UsageError("a path with control characters, or not in UTF-8: libvirt cannot be given it", hint=LACKS)
    return text


def system(spec: DomainSpec, ends: Ends) -> str:
    """Firmware that finds nothing to boot resets at once, and the machine ends."""
    boot = spec.boot
    loader = f'<loader readonly="yes" type="rom">{escape(ends.firmware)}</loader>' if ends.firmware else ""
    how = '<bios rebootTimeout="0"/>'
    if boot.kernel is not None:
        initrd = f"<initrd>{escape(str(boot.initrd))}</initrd>" if boot.initrd else ""
        how = f"<kernel>{escape(str(boot.kernel))}</kernel>{initrd}<cmdline>{escape(boot.append)}</cmdline>"
    return f'<os><type machine="q35" arch="x86_64">hvm</type>{loader}{how}</os>'


def processor(cpu: str, count: int) -> str:
    if "," in cpu:
        raise UsageError(f"the processor {cpu!r}: by libvirt only a model can be named, without features", hint=LACKS)
    topology = f'<topology sockets="1" cores="{count}" threads="1"/>'
    if cpu in QEMU_NAMES:
        return f'<cpu mode="{QEMU_NAMES[cpu]}" check="none">{topology}</cpu>'
    model = f'<model fallback="forbid">{escape(cpu)}</model>'
    return f'<cpu mode="custom" match="exact" check="none">{model}{topology}</cpu>'


def disks(spec: DomainSpec, ends: Ends, slots: Iterator[int]) -> Iterator[str]:
    """The machine's own, those it was given, its seed."""
    names = (f"vd{first}{second}" for first in ("", *LETTERS) for second in LETTERS)
    first = '<boot order="1"/>' if spec.boot.kernel is None else ""
    if spec.boot.is_disc:  # a CD-ROM, on a controller that every firmware boots from
        target = '<target dev="sda" bus="sata"/><readonly/><boot order="1"/>'
        yield f'<disk type="file" device="cdrom"><driver name="qemu" type="qcow2"/>{chain(ends.layers)}{target}</disk>'
    else:
        yield disk(ends.layers, "qcow2", first, next(names), slots)
    for extra, below in zip(spec.disks, ends.below, strict=True):
        traits = f"<serial>{extra.name}</serial>" + ("<readonly/>" if extra.readonly else "")
        yield disk((extra.path, *below), extra.format, traits, next(names), slots)
    if spec.seed is not None:
        yield disk((spec.seed,), "raw", "<serial>seed</serial><readonly/>", next(names), slots)


def disk(layers: tuple[Path, ...], format: str, traits: str, name: str, slots: Iterator[int]) -> str:
    """A full host disk stops the guest."""
    cache = "writeback" if "<readonly/>" in traits else "unsafe"
    driver = f'<driver name="qemu" type="{format}" cache="{cache}" error_policy="enospace" rerror_policy="report"/>'
    target = f'<target dev="{name}" bus="virtio"/>{traits}{place(slots)}'
    return f'<disk type="file" device="disk" model="{MODERN}">{driver}{chain(layers)}{target}</disk>'


def chain(layers: tuple[Path, ...]) -> str:
    """A disk's whole chain written down, so that libvirt reads no header; an empty element ends it."""
    text = "<backingStore/>"
    for layer in reversed(layers[1:]):
        text = f'<backingStore type="file"><format type="qcow2"/>{source(layer)}{text}</backingStore>'
    return source(layers[0]) + text


def source(path: Path) -> str:
    return f"<source file={quoteattr(str(path))}/>"


def shares(spec: DomainSpec, slots: Iterator[int]) -> Iterator[str]:
    """9p exports. `squash`: files the guest makes are the process's user's."""
    for share in spec.shares:
        ends = f"<source dir={quoteattr(share.source)}/><target dir={quoteattr(share.tag)}/>"
        words = f'<driver type="path"/>{ends}{"<readonly/>" if share.readonly else ""}{place(slots)}'
        yield f'<filesystem type="mount" accessmode="squash" multidevs="remap" model="{MODERN}">{words}</filesystem>'


def card(spec: DomainSpec, slots: Iterator[int]) -> str:
    """On QEMU's own user network."""
    if spec.nic is None:
        return ""
    assert spec.nic.mode is NetworkMode.USER
    mac = f'<mac address="{spec.nic.mac}"/>'
    return f'<interface type="user">{mac}<model type="{MODERN}"/><rom enabled="no"/>{place(slots)}</interface>'


def place(slots: Iterator[int]) -> str:
    """On the root bus: a port for each device would cost a second of boot time under emulation."""
    if (slot := next(slots)) > LAST_SLOT:
        raise UsageError("so many disks and shares: by libvirt there is room for some 25 together", hint=LACKS)
    return f'<address type="pci" domain="0x0000" bus="0x00" slot="{slot:#04x}" function="0x0"/>'


def label(owner: tuple[int, int] | None) -> str:
    """The process's user. Nothing is given to it: what belljar made for it belongs to it already."""
    if owner is None:
        return ""
    ids = f"<label>+{owner[0]}:+{owner[1]}</label>"
    return f'<seclabel type="static" model="dac" relabel="no">{ids}</seclabel>'
