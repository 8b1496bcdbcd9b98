"""Devices of this host that a machine has for itself: chosen, locked, and seen in the guest with their drivers."""

from __future__ import annotations

import grp
import os
import resource
from collections.abc import Mapping
from contextlib import ExitStack, suppress

from belljar.errors import BadOption, DeviceBusy, GuestRefused, HostError, NotPermitted
from belljar.guest import Guest
from belljar.host.devices.binding import CHECK, LIST, obstacle, of_site, open_group
from belljar.host.devices.pci import Device, DeviceClass, read
from belljar.host.files import private_folder
from belljar.host.locks import try_lock
from belljar.host.threads import in_thread
from belljar.hypervisor import HostDevice
from belljar.hypervisor.devices.pci import MOST_DEVICES, port
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.machine.services import Rules
from belljar.model import MIB, Payload
from belljar.records import replace

BESIDE = 64 * MIB  # of firmware and the like, which is locked with the guest's memory
LOCKED = (
    "Raise it: `memlock` in limits.conf, LimitMEMLOCK= of the batch system's daemon; Slurm hands on the submitter's."
)
NO_DRIVER = "Use an image with its driver (docs/batch/devices.md), or let the site raise `machine.device_timeout`."


class Devices(Extra):
    """All that were asked for; a payload never starts with one missing."""

    def __init__(self, words: tuple[str, ...], rules: Rules) -> None:
        self._words, self._rules, self._held = words, rules, ExitStack()
        self._devices: list[Device] = []

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Raises BadOption, NotPermitted, DeviceBusy, HostError, BadSetting."""
        self._life = life
        lock_memory(life.request.machine.memory)
        await in_thread(self._take, undo=lambda _: self.release())
        return replace(there, devices=tuple(HostDevice(device.address, device.windows) for device in self._devices))

    def _take(self) -> None:
        site, self._known = self._rules.devices(), read(self._rules.root)
        private_folder(self._life.folders.devices)
        for word in self._words:
            name, _, of = word.partition(":")
            if name == "pci":
                device, class_ = of_site(of, self._known, site)
                check_allowed(class_)
                self._lock(device, class_)
            else:
                classes = {class_.name: class_ for class_ in site}
                if name not in classes or not of.isdecimal():
                    hint = f"This site has the classes {', '.join(classes) or '(none: there is no devices.toml)'}."
                    raise BadOption(f"--device {word[:80]}: not pci:ADDRESS, nor CLASS:COUNT", hint=hint)
                check_allowed(classes[name])
                self._lock_some(classes[name], int(of))
        if len(self._devices) > MOST_DEVICES:
            raise BadOption(f"--device: {len(self._devices)} devices, and a machine takes at most {MOST_DEVICES}")

    def _lock_some(self, class_: DeviceClass, count: int) -> None:
        """So many that are free."""
        reason = HostError("this host has no others", hint=LIST)
        for device in class_.devices(self._known.values()):
            try:
                if count:
                    self._lock(device, class_)
                    count -= 1
            except HostError as error:
                reason = reason if isinstance(reason, DeviceBusy) else error
        if count:
            what = f"{count} more devices of the class {class_.name} were not free: {reason.message}"
            raise type(reason)(what, hint=reason.hint)

    def _lock(self, device: Device, class_: DeviceClass) -> None:
        if wrong := obstacle(device, self._known, class_):
            raise HostError(f"{device.address}: {wrong[0]}", hint=wrong[1])
        open_group(device, self._rules.root)
        if (lock := try_lock(self._life.folders.devices / f"{device.address}.lock")) is None:
            raise DeviceBusy(f"{device.address}: another machine has it")
        os.pwrite(self._held.enter_context(lock).descriptor, self._life.request.id.encode(), 0)
        self._life.record.write("device", address=device.address, group=device.group)
        self._devices.append(device)

    async def furnish(self, guest: Guest, payload: Payload, devices: Mapping[str, str]) -> None:
        """Raises HostError, GuestRefused."""
        timeout = self._rules.machine.device_timeout
        seen = await guest.await_devices([port(number) for number, _ in enumerate(self._devices)], timeout)
        for device, (address, driver) in zip(self._devices, seen, strict=True):
            self._life.record.write("device-seen", address=device.address, inside=address, driver=driver)
            what = f"the device {device.address} ({device.vendor}:{device.device}) within {timeout:g} s"
            if not address:
                raise HostError(f"the guest did not see {what}", hint=CHECK)
            if not driver:
                raise GuestRefused(f"no driver of the guest's took {what}", hint=NO_DRIVER)

    def release(self) -> None:
        self._held.close()


def lock_memory(memory: int) -> None:
    """A device keeps all of a guest's memory in its place: QEMU may lock so much. Raises HostError."""
    with suppress(ValueError):  # only root may raise it, and not everywhere
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard != resource.RLIM_INFINITY and hard < memory + BESIDE:
        needed = f"{memory // MIB} MiB and {BESIDE // MIB} MiB more"
        raise HostError(f"a device locks the guest's memory: {needed}; the limit is {hard // MIB} MiB", hint=LOCKED)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def check_allowed(class_: DeviceClass) -> None:
    """Raises NotPermitted for a user in none of its groups."""
    names = set[str]()
    for gid in {*os.getgroups(), os.getegid()}:
        with suppress(KeyError):
            names.add(grp.getgrgid(gid).gr_name)
    if class_.groups and os.geteuid() != 0 and not names & {*class_.groups}:
        raise NotPermitted(f"devices of the class {class_.name} are for the groups {', '.join(class_.groups)}")
