"""PCI devices of this host that a machine has for itself, by VFIO. Who may have which is for `machine.extras.devices` to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from belljar.errors import DeviceBusy, HostError, UsageError
from belljar.hints import TYPE_CHECKING
from belljar.hypervisor import DomainSpec
from belljar.hypervisor.devices import Kind, joined
from belljar.hypervisor.devices.disk import FUNCTIONS
from belljar.model import MIB

if TYPE_CHECKING:
    from belljar.hypervisor.qemu.process.launch import Launch

FIRST_SLOT, MOST_DEVICES = 0x1B, 16  # of the guest's bus: two slots of eight ports each
WINDOWS = ("mem-reserve", "pref64-reserve")  # of a port: firmware keeps 2 MiB by itself


class HostDevices(Kind):
    """A port for each, which a template has free; a clone's device is plugged into it when the device state is loaded."""

    complaints = (
        (r"vfio.*(busy|in use)", DeviceBusy, None),
        (r"vfio|VFIO", HostError, "`belljar device check` says what is in the way."),
    )

    def words(self, launch: Launch) -> list[str]:
        """Windows of a bus are powers of two."""
        words: list[str] = []
        for number, device in enumerate(launch.spec.devices):
            place = port(number).removeprefix("0000:00:") + (",multifunction=on" if number % FUNCTIONS == 0 else "")
            sizes = zip(WINDOWS, device.windows, strict=True)
            kept = "".join(f",{name}={1 << (size - 1).bit_length()}" for name, size in sizes if size > MIB)
            words += [
                "-device",
                f"pcie-root-port,id=given{number},chassis={number + 64},io-reserve=0{kept},addr={place}",
            ]
        given = self.plugged(launch.spec) if launch.incoming < 0 and not launch.is_draft else ()
        return [*words, *(word for device in given for word in ("-device", joined(device)))]

    def plugged(self, spec: DomainSpec) -> list[dict[str, str]]:
        """A mediated one has a UUID."""
        mediated = "/sys/bus/mdev/devices/"
        addresses = (device.address for device in spec.devices)
        places = [{"host": name} if ":" in name else {"sysfsdev": mediated + name} for name in addresses]
        return [{"driver": "vfio-pci", **place, "id": f"host{n}", "bus": f"given{n}"} for n, place in enumerate(places)]

    def xml(self, spec: DomainSpec, ends: object, place: Callable[[], str]) -> Iterator[str]:
        hint = 'Let the site set `machine.hypervisor = "qemu"`.'
        raise UsageError("--device: not with machines by libvirt", hint=hint)


def port(number: int) -> str:
    """The guest's address of the port of its n-th device."""
    return f"0000:00:{FIRST_SLOT + number // FUNCTIONS:02x}.{number % FUNCTIONS}"


DEVICES = HostDevices()
