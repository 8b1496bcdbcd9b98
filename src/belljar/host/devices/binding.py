"""Devices on their way to a machine and back: from the host's driver to vfio-pci, to one user, and back again.
https://docs.kernel.org/driver-api/vfio.html

What was bound is written down before it is done, in a file for each device, so that whoever comes later can give it back. Root's
work but for `obstacle`. The files lie below /run: a restart of the host gives all devices back by itself.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError, DeviceBusy, HostError, NotPermitted
from belljar.host.devices.pci import MEDIATED, PCI, REQUIRED, Device, DeviceClass, Site, class_of, read
from belljar.host.files import private_folder, read_json, write_whole
from belljar.host.locks import Lock, locked, try_lock
from belljar.model import dumps
from belljar.reading import from_json
from belljar.records import dataclass, replace

DRIVER, GROUPS = "vfio-pci", "dev/vfio"
BRIDGE = "0604"  # the kernel does not mind in whose hands those of a group are
TURN, PATIENCE = "turn.lock", 30.0  # seconds for others who bind or release
CHECK, LIST = "`belljar device check` says more.", "`belljar device list` shows those that there are."
IOMMU = "Turn on VT-d or AMD-Vi in the firmware; on Intel also `intel_iommu=on` on the kernel's command line."
GROUP = "Bind all of the group, or leave its drivers out; another slot, or ACS in the firmware, may divide it."
RESET = '`reset = "none-accepted"` in devices.toml allows that.'
BIND = "As root `belljar device bind ADDRESS --user NAME` binds it; in batch jobs the site's prolog does."


@dataclass(frozen=True)
class Binding:
    """One device that was taken from the host, and how it was before."""

    address: str
    driver: str  # that it goes back to; "": none
    can_reset: bool
    job: str = ""  # slurm:4711; "": until somebody releases it by hand
    is_whole: bool = False  # nobody works on it, or was killed over it


class Bindings:
    """What root has bound on this host. *write* puts a text into a file of sysfs."""

    def __init__(self, folder: Path, root: Path, write: Callable[[Path, str], object] = Path.write_text) -> None:
        self._folder, self._root, self._write = folder, root, write

    def all(self) -> Iterator[Binding]:
        """By address."""
        for path in sorted(self._folder.glob("*.json")):
            with suppress(FileNotFoundError):
                yield from_json(Binding, read_json(path))

    def left(self) -> list[Binding]:
        """Those that somebody was killed over."""
        if not self._folder.exists() or (turn := try_lock(self._folder / TURN)) is None:
            return []
        with turn:
            return [binding for binding in self.all() if not binding.is_whole]

    def bind(self, addresses: Sequence[str], owner: tuple[int, int], job: str, site: Site) -> None:
        """Take these from the host and give them to a user, all or none. Raises NotPermitted, DeviceBusy, HostError."""
        done: list[Binding] = []
        with self._turn():
            known, held = read(self._root), {binding.address: binding for binding in self.all()}
            for address in addresses:
                device, class_ = of_site(address, known, site)
                if address in held:
                    raise DeviceBusy(f"{address}: bound already, for {held[address].job or 'somebody'}")
                if wrong := obstacle(device, known, class_, addresses):
                    raise HostError(f"{address}: {wrong[0]}", hint=wrong[1])
                done.append(Binding(address, class_.driver or device.driver, bool(device.resets), job))
            try:
                for binding in done:
                    device = known[binding.address]
                    self._keep(binding)
                    if not is_bound(device):
                        self._drive(device, DRIVER)
                    os.chown(self._root / GROUPS / device.group, *owner)
            except (OSError, BelljarError) as exc:
                for binding in done:
                    self._release(binding)
                raise HostError(f"the device {binding.address} was not bound: {exc}", hint=CHECK) from exc
            for binding in done:
                self._keep(replace(binding, is_whole=True))

    def release(self, addresses: Sequence[str] = (), job: str = "") -> list[str]:
        """Reset these, or those of this job, and give them back to the host. Returns which; what is not bound is not a mistake.
        Raises DeviceBusy, HostError."""
        if not self._folder.exists():
            return []
        with self._turn():
            chosen = [binding for binding in self.all() if binding.address in addresses or (job and binding.job == job)]
            for binding in chosen:
                self._release(binding)
        return [binding.address for binding in chosen]

    def _release(self, binding: Binding) -> None:
        device = read(self._root).get(binding.address)
        if device is not None:  # it may have been taken out of the host
            path = self._root / GROUPS / device.group
            if has_group := is_bound(device) and path.exists():
                open_group(device, self._root)
            self._keep(replace(binding, is_whole=False))
            if has_group:
                os.chown(path, os.geteuid(), os.getegid())  # root
            if is_bound(device) and binding.can_reset and device.kind != MEDIATED:
                try:
                    self._write(device.folder / "reset", "1")
                except OSError as exc:
                    what = f"{device.address}: it cannot be reset ({exc.strerror}), and stays with root"
                    raise HostError(what, hint="See the kernel's log; a restart of the host may be needed.") from exc
            if device.kind != MEDIATED and device.driver != binding.driver:
                self._drive(device, binding.driver)
        (self._folder / f"{binding.address}.json").unlink(missing_ok=True)

    def _drive(self, device: Device, driver: str) -> None:
        """Have this driver, or none, drive it. Raises HostError, OSError."""
        if device.driver:
            self._write(device.folder / "driver/unbind", device.address)
        self._write(device.folder / "driver_override", driver if driver == DRIVER else "\n")
        if driver:
            path = "drivers_probe" if driver == DRIVER else f"drivers/{driver}/bind"
            self._write(self._root / PCI / path, device.address)
        if (now := read(self._root)[device.address].driver) != driver:
            raise HostError(f"{device.address}: driven by {now or 'nobody'}, not {driver or 'nobody'}", hint=CHECK)

    def _turn(self) -> Lock:
        return locked(private_folder(self._folder) / TURN, timeout=PATIENCE, what="bind or release devices")

    def _keep(self, binding: Binding) -> None:
        write_whole(self._folder / f"{binding.address}.json", dumps(binding), durable=True)


def obstacle(
    device: Device, known: Mapping[str, Device], class_: DeviceClass, asked: Sequence[str] = ()
) -> tuple[str, str] | None:
    """Why no machine can have it, whoever binds it (with the others that are *asked* for), and what to do about it."""
    if not device.group:
        return "this host has no IOMMU in use", IOMMU
    if others := [address for address in in_the_way(device, known.values()) if address not in asked]:
        return f"its IOMMU group {device.group} holds {', '.join(others)}, which the host uses", GROUP
    if not device.resets and class_.reset == REQUIRED:
        return "it cannot be reset between jobs", RESET
    return None


def is_loaded(root: Path) -> bool:
    return (root / PCI / "drivers" / DRIVER).exists() and (root / GROUPS / "vfio").exists()


def is_bound(device: Device) -> bool:
    """Can QEMU take it, as far as its driver is concerned?"""
    return device.driver.startswith("vfio") or device.kind == MEDIATED


def in_the_way(device: Device, known: Iterable[Device]) -> list[str]:
    """Others of its group that drivers of the host have: the kernel gives a group to one user as a whole."""
    others = (other for other in known if other.group == device.group and other.address != device.address)
    return [other.address for other in others if other.driver and not is_bound(other) and other.class_ != BRIDGE]


def open_group(device: Device, root: Path) -> None:
    """Raises DeviceBusy where another process has it open, HostError where this one may not, or vfio-pci has not got it."""
    hint = BIND.replace("ADDRESS", device.address)
    if not is_bound(device):
        raise HostError(f"{device.address}: {device.driver or 'no driver'} has it, and not {DRIVER}", hint=hint)
    path = root / GROUPS / device.group
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            raise DeviceBusy(f"{device.address}: another process has it ({path})") from exc
        raise HostError(f"{device.address}: {path}: {exc.strerror}", hint=hint) from exc


def of_site(address: str, known: Mapping[str, Device], site: Site) -> tuple[Device, DeviceClass]:
    device = known.get(address)
    class_ = class_of(device, site) if device else None
    if device is None or class_ is None:
        what = "not one that the site gives to machines" if device else "no such device on this host"
        raise NotPermitted(f"{address}: {what}", hint=LIST)
    return device, class_
