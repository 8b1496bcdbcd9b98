"""A domain as libvirt reads it: a pure function of its spec and of what the host offers it.

https://libvirt.org/formatdomain.html
"""

from __future__ import annotations

import re
from itertools import count
from xml.sax.saxutils import escape

from belljar.errors import UsageError
from belljar.hypervisor import Accelerator, DomainSpec
from belljar.hypervisor.devices import LACKS, MODERN, kinds_of
from belljar.hypervisor.libvirt import Ends
from belljar.hypervisor.qemu.cmdline import PORT_NAME, TRANSLATIONS
from belljar.model import KIB

NAME = "belljar-"
FIRST_SLOT, LAST_SLOT = 2, 0x1E  # below it the host bridge's and by custom the screen's, above it the board's own
QEMU_NAMES = {"host": "host-passthrough", "max": "maximum"}  # QEMU's words for processors, and libvirt's
UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


def domain_xml(spec: DomainSpec, ends: Ends) -> str:
    """The document for a transient domain. Nobody is given a reboot; a guest that crashed stays for the event to be heard.
    Raises UsageError for what cannot be written in it."""
    if spec.pages:
        raise UsageError("--pages 2M, 1G: not with machines by libvirt", hint="Ask for `--pages thp`, or `default`.")
    is_tcg = spec.accelerator is Accelerator.TCG
    place = map(address, count(FIRST_SLOT)).__next__
    things = [element for kind in kinds_of(spec) for element in kind.xml(spec, ends, place)]
    buffer = f'<tcg><tb-cache unit="MiB">{TRANSLATIONS}</tb-cache></tcg>' if is_tcg else ""
    text = f"""<domain type="{"qemu" if is_tcg else "kvm"}">
  <name>{NAME}{spec.id}</name>
  <uuid>{spec.uuid}</uuid>
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
    {"".join(things)}
    <controller type="usb" index="0" model="none"/>
    <controller type="virtio-serial" index="0" model="{MODERN}" ports="2">{place()}</controller>
    <serial type="pty"><target type="isa-serial" port="0"><model name="isa-serial"/></target></serial>
    <channel type="unix">
      <target type="virtio" name="{PORT_NAME}"/>
      <address type="virtio-serial" controller="0" bus="0" port="1"/>
    </channel>
    <video><model type="none"/></video>
    <memballoon model="none"/>
    <rng model="{MODERN}"><backend model="builtin"/>{place()}</rng>
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


def address(slot: int) -> str:
    """On the root bus: a port for each device would cost a second of boot time under emulation."""
    if slot > LAST_SLOT:
        raise UsageError("so many disks and shares: by libvirt there is room for some 25 together", hint=LACKS)
    return f'<address type="pci" domain="0x0000" bus="0x00" slot="{slot:#04x}" function="0x0"/>'


def label(owner: tuple[int, int] | None) -> str:
    """The process's user. Nothing is given to it: what belljar made for it belongs to it already."""
    if owner is None:
        return ""
    ids = f"<label>+{owner[0]}:+{owner[1]}</label>"
    return f'<seclabel type="static" model="dac" relabel="no">{ids}</seclabel>'
