"""Trees of /sys and /dev as kernels show them, by hand, and a kernel that obeys what is written there.

The hosts are ordinary ones of their kind, with the addresses, ids and groups that such hosts have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from belljar.records import dataclass

GIB = 1 << 30
GPU_BARS = f"""\
0x00000000d0000000 0x00000000d0ffffff 0x0000000000040200
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x{0x380000000000:016x} 0x{0x380000000000 + 128 * GIB - 1:016x} 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x{0x382000000000:016x} 0x{0x382000000000 + (32 << 20) - 1:016x} 0x000000000014220c
"""
CARD_BARS = "0x00000000febc0000 0x00000000febdffff 0x0000000000040200\n"


@dataclass(frozen=True)
class Slot:
    address: str
    id: str  # vendor:device
    class_: str
    driver: str
    group: int
    node: int = 0
    resets: str = "flr bus"
    physfn: str = ""
    bars: str = CARD_BARS


DGX = (
    *(
        Slot(f"0000:{bus}:00.0", "10de:2330", "030200", "nvidia", 20 + number, number // 4, bars=GPU_BARS)
        for number, bus in enumerate(("1b", "43", "52", "61", "9d", "c3", "d1", "df"))
    ),
    *(
        Slot(f"0000:{bus}:00.0", "10de:22a3", "068000", "nvidia-nvswitch", 40 + n, 1)
        for n, bus in enumerate(("07", "08"))
    ),
    Slot("0000:18:00.0", "15b3:1021", "020700", "mlx5_core", 50),
    Slot("0000:29:00.0", "144d:a824", "010802", "nvme", 51),
    Slot("0000:02:00.0", "1a03:2000", "030000", "ast", 52, resets=""),
    Slot("0000:1a:00.0", "8086:352a", "060400", "pcieport", 20),
)
INFINIBAND = (
    Slot("0000:81:00.0", "15b3:101b", "020700", "mlx5_core", 60, 1),
    *(Slot(f"0000:81:00.{n}", "15b3:101c", "020700", "mlx5_core", 60 + n, 1, "flr", "0000:81:00.0") for n in (1, 2, 3)),
    Slot("0000:01:00.0", "8086:1521", "020000", "igb", 70, resets="flr pm bus"),
)
WORKSTATION = (
    Slot("0000:00:01.0", "8086:460d", "060400", "pcieport", 2, -1, ""),
    Slot("0000:01:00.0", "10de:2684", "030000", "nouveau", 2, -1, "bus", bars=GPU_BARS),
    Slot("0000:01:00.1", "10de:22ba", "040300", "snd_hda_intel", 2, -1, "bus"),
    Slot("0000:02:00.0", "10ec:8125", "020000", "r8169", 12, -1, ""),
    Slot("0000:03:00.0", "8086:10d3", "020000", "e1000e", 13, -1, "pm"),
)


def make(root: Path, slots: tuple[Slot, ...], *, has_iommu: bool = True) -> Path:
    bus = root / "sys/bus/pci"
    for name in ("devices", "drivers/vfio-pci"):
        (bus / name).mkdir(parents=True)
    (root / "dev/vfio").mkdir(parents=True)
    (root / "dev/vfio/vfio").touch()
    for slot in slots:
        real = root / "sys/devices/pci0000:00" / slot.address
        real.mkdir(parents=True)
        vendor, device = slot.id.split(":")
        texts = {
            "vendor": f"0x{vendor}", "device": f"0x{device}", "class": f"0x{slot.class_}",
            "numa_node": str(slot.node), "resource": slot.bars, "driver_override": "(null)",
        }  # fmt: skip
        if slot.resets:
            texts |= {"reset_method": slot.resets, "reset": ""}
        for name, text in texts.items():
            (real / name).write_text(f"{text}\n")
        (bus / "devices" / slot.address).symlink_to(os.path.relpath(real, bus / "devices"))
        if slot.driver:
            (bus / "drivers" / slot.driver).mkdir(exist_ok=True)
            (real / "driver").symlink_to(bus / "drivers" / slot.driver)
        if has_iommu:
            group = root / "sys/kernel/iommu_groups" / str(slot.group)
            group.mkdir(parents=True, exist_ok=True)
            (real / "iommu_group").symlink_to(group)
    for slot in slots:
        if slot.physfn:
            (bus / "devices" / slot.address / "physfn").symlink_to(f"../{slot.physfn}")
    return root


def add_mediated(root: Path, parent: str, uuid: str, group: int) -> None:
    """A slice of a GPU, as its driver makes one."""
    real = root / "sys/bus/pci/devices" / parent / uuid
    real.mkdir()
    (real / "driver").symlink_to(root / "sys/bus/mdev/drivers/nvidia-vgpu-vfio")
    (real / "iommu_group").symlink_to(root / "sys/kernel/iommu_groups" / str(group))
    folder = root / "sys/bus/mdev/devices"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / uuid).symlink_to(real.resolve())
    (root / "dev/vfio" / str(group)).touch()


class Kernel:
    """Obeys what is written to the tree, and lists it. *stop* is called before each of it is done, and after."""

    def __init__(self, root: Path, natives: dict[str, str], stop: Callable[[], None] = lambda: None) -> None:
        self.root, self.natives, self.stop, self.written = root, natives, stop, list[str]()

    def write(self, path: Path, text: str) -> None:
        self.stop()
        relative = path.relative_to(self.root / "sys/bus/pci")
        self.written.append(f"{relative} {text.strip()}".strip())
        match relative.parts:
            case ("devices", address, "driver", "unbind"):
                self.drive(address, "")
            case ("devices", _, "driver_override"):
                path.write_text(text)
            case ("devices", _, "reset"):
                if not path.exists():
                    raise OSError(25, "Inappropriate ioctl for device")
            case ("drivers_probe",):
                override = (self.root / "sys/bus/pci/devices" / text / "driver_override").read_text().strip()
                self.drive(text, self.natives.get(text, "") if override in ("", "(null)") else override)
            case ("drivers", driver, "bind"):
                if not path.parent.exists():
                    raise OSError(2, "No such file or directory")
                self.drive(text, driver)
            case _:
                raise AssertionError(f"no file of the kernel's: {relative}")
        self.stop()

    def drive(self, address: str, driver: str) -> None:
        device = self.root / "sys/bus/pci/devices" / address
        (device / "driver").unlink(missing_ok=True)
        group = self.root / "dev/vfio" / os.path.basename(os.readlink(device / "iommu_group"))
        if driver:
            (device / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)
        if driver == "vfio-pci":
            group.touch(0o600)
        else:
            group.unlink(missing_ok=True)


def driver_of(root: Path, address: str) -> str:
    path = root / "sys/bus/pci/devices" / address / "driver"
    return os.path.basename(os.readlink(path)) if path.is_symlink() else ""
