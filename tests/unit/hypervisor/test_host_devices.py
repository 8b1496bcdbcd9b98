"""Devices of the host: ports in the hardware of a template, plugged into its clones, there from the start otherwise."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, LAUNCH, QEMU, devices, words_of
from tests.unit.hypervisor.test_plugging import SPEC

from belljar.errors import DeviceBusy, HostError, UsageError
from belljar.hypervisor import HostDevice, LibvirtSettings, Settings
from belljar.hypervisor.devices.pci import MOST_DEVICES, port
from belljar.hypervisor.libvirt.driver import LibvirtHypervisor
from belljar.hypervisor.qemu.cmdline import hardware
from belljar.hypervisor.qemu.process.complaints import explain
from belljar.hypervisor.qemu.template.plugging import commands
from belljar.machine import Folders
from belljar.machine.planning.boot_plan import qemu_owner
from belljar.model import Account, MachineSpec, Payload, Request, RunPayload


def device(address: str, *windows: int) -> HostDevice:
    below, prefetched = windows
    return HostDevice(address, (below, prefetched))


GPU = device("0000:41:00.0", 16 << 20, (128 << 30) + (32 << 20))
CARD = device("0000:00:05.0", 128 << 10, 0)
SLICE = device("c73f1fa6-489e-4834-9476-d70dabd98c40", 0, 0)
WITH = replace(COLD, devices=(GPU, CARD, SLICE))
PORTS = [
    "pcie-root-port,id=given0,chassis=64,io-reserve=0,mem-reserve=16777216,pref64-reserve=274877906944,addr=1b.0,multifunction=on",
    "pcie-root-port,id=given1,chassis=65,io-reserve=0,addr=1b.1",
    "pcie-root-port,id=given2,chassis=66,io-reserve=0,addr=1b.2",
]


def given(words: list[str]) -> list[str]:
    return [word for word in devices(words) if "given" in word or "vfio" in word]


def test_a_template_has_the_ports_and_no_device() -> None:
    assert given(words_of(WITH, QEMU, replace(LAUNCH, ram=17, is_draft=True))) == PORTS


def test_a_clone_begins_with_its_templates_hardware_and_is_plugged_the_rest() -> None:
    assert given(words_of(WITH, QEMU, replace(LAUNCH, layers=(13, 14, 18), ram=17, incoming=23))) == PORTS
    assert commands(replace(SPEC, devices=WITH.devices), None) == [
        ("device_add", {"driver": "vfio-pci", "host": "0000:41:00.0", "id": "host0", "bus": "given0"}),
        ("device_add", {"driver": "vfio-pci", "host": "0000:00:05.0", "id": "host1", "bus": "given1"}),
        ("device_add", {"driver": "vfio-pci", "sysfsdev": f"/sys/bus/mdev/devices/{SLICE.address}", "id": "host2", "bus": "given2"}),
    ]  # fmt: skip


def test_a_cold_start_has_them_from_its_beginning() -> None:
    assert given(words_of(WITH, QEMU, LAUNCH)) == [
        *PORTS,
        "vfio-pci,host=0000:41:00.0,id=host0,bus=given0", "vfio-pci,host=0000:00:05.0,id=host1,bus=given1",
        f"vfio-pci,sysfsdev=/sys/bus/mdev/devices/{SLICE.address},id=host2,bus=given2",
    ]  # fmt: skip


def test_another_device_of_the_kind_is_the_same_hardware_and_a_larger_one_is_not() -> None:
    same, other = replace(GPU, address="0000:c1:00.0"), replace(GPU, windows=(0, 1 << 40))
    found = [hardware(replace(COLD, devices=(it,)), QEMU, "max") for it in (GPU, same, other)]
    assert found[0] == found[1] != found[2]
    assert hardware(COLD, QEMU, "max") not in found


def test_each_port_has_its_place_on_the_guests_bus() -> None:
    places = [port(number) for number in range(MOST_DEVICES)]
    assert places[0] == "0000:00:1b.0" and places[7:9] == ["0000:00:1b.7", "0000:00:1c.0"]
    assert len(set(places)) == MOST_DEVICES


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("vfio 0000:41:00.0: failed to open /dev/vfio/12: Device or resource busy", DeviceBusy),
        ("vfio 0000:41:00.0: group 12 is not viable\nPlease ensure all devices within the iommu_group are bound to their vfio bus driver.", HostError),
        ("-device vfio-pci,host=0000:41:00.0: vfio 0000:41:00.0: failed to setup container for group 12: VFIO_MAP_DMA failed: Cannot allocate memory", HostError),
    ],
)  # fmt: skip
def test_what_qemu_says_of_them_is_the_hosts_affair(words: str, kind: type[HostError]) -> None:
    assert (
        type(explain("qemu-system-x86_64: " + words.replace("\n", "\nqemu-system-x86_64: "), 256, "starting")) is kind
    )


def test_libvirt_has_none(tmp_path: Path) -> None:
    hypervisor = LibvirtHypervisor("libvirt:qemu:///system", Settings(), LibvirtSettings(), tmp_path)
    with pytest.raises(UsageError, match="not with machines by libvirt"):
        hypervisor.check(WITH)


def test_roots_own_machine_with_one_is_roots(tmp_path: Path) -> None:
    """Its group was given to root."""
    payload = Payload((b"true",), Account("root", 0, 0, "root"))
    request = Request("0" * 12, MachineSpec("debian12", 1, 1 << 28, devices=("gpu:1",)), RunPayload(payload))
    assert qemu_owner(request, "auto", 0) == (0, 0)
    assert qemu_owner(replace(request, machine=replace(request.machine, devices=())), "auto", 0) != (0, 0)
    assert Folders(tmp_path, tmp_path, tmp_path, tmp_path).devices == tmp_path / "devices" and os.sep
