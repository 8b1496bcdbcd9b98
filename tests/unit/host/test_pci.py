"""What sysfs tells of a host's devices, and how a site sorts them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes import sysfs

from belljar.host.devices.binding import in_the_way, is_bound
from belljar.host.devices.pci import FUNCTION, MEDIATED, DeviceClass, class_of, read

UUID = "c73f1fa6-489e-4834-9476-d70dabd98c40"
GPUS = DeviceClass("gpu", ("vendor=10de class=03*",))


def test_a_node_of_eight_gpus(tmp_path: Path) -> None:
    known = read(sysfs.make(tmp_path, sysfs.DGX))
    gpus = GPUS.devices(known.values())
    assert [gpu.address[5:7] for gpu in gpus] == ["1b", "43", "52", "61", "9d", "c3", "d1", "df"]
    assert [gpu.node for gpu in gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    first = gpus[0]
    assert (first.vendor, first.device, first.class_, first.driver, first.group) == (
        "10de",
        "2330",
        "0302",
        "nvidia",
        "20",
    )
    assert (first.resets, first.kind, first.windows) == (
        ("flr", "bus"),
        FUNCTION,
        (16 << 20, (128 << 30) + (32 << 20)),
    )
    assert in_the_way(first, known.values()) == [], "the bridge above it is nobody's"


def test_virtual_functions_are_a_kind_of_their_own(tmp_path: Path) -> None:
    known = read(sysfs.make(tmp_path, sysfs.INFINIBAND))
    virtual = DeviceClass("ib", ("vendor=15b3 kind=virtual",)).devices(known.values())
    assert [device.address for device in virtual] == ["0000:81:00.1", "0000:81:00.2", "0000:81:00.3"]
    assert class_of(known["0000:81:00.0"], (DeviceClass("ib", ("vendor=15b3 kind=virtual",)),)) is None


def test_what_a_gpu_shares_its_group_with_is_in_the_way(tmp_path: Path) -> None:
    known = read(sysfs.make(tmp_path, sysfs.WORKSTATION))
    assert in_the_way(known["0000:01:00.0"], known.values()) == ["0000:01:00.1"]
    assert in_the_way(known["0000:03:00.0"], known.values()) == []


def test_a_host_without_iommu_or_devices(tmp_path: Path) -> None:
    assert read(tmp_path) == {}
    known = read(sysfs.make(tmp_path, sysfs.WORKSTATION, has_iommu=False))
    assert {device.group for device in known.values()} == {""}


def test_a_mediated_device_is_its_drivers(tmp_path: Path) -> None:
    root = sysfs.make(tmp_path, sysfs.DGX)
    sysfs.add_mediated(root, "0000:43:00.0", UUID, 99)
    slice = read(root)[UUID]
    assert (slice.kind, slice.group, slice.vendor) == (MEDIATED, "99", "10de")
    assert is_bound(slice) and slice.resets
    assert class_of(slice, (DeviceClass("slice", ("kind=mediated",)), GPUS)) == DeviceClass("slice", ("kind=mediated",))


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("vendor=10de", True), ("vendor=10DE device=2684", True), ("address=0000:01:*", True), ("class=0300", True),
        ("class=02*", False), ("vendor=10de kind=virtual", False), ("address=0000:01:00.1", False),
    ],
)  # fmt: skip
def test_every_word_of_a_pattern_counts(tmp_path: Path, pattern: str, fits: bool) -> None:
    assert read(sysfs.make(tmp_path, sysfs.WORKSTATION))["0000:01:00.0"].fits(pattern) is fits
