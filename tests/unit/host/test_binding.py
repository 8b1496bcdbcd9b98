"""Devices go to vfio-pci and one user, and come back, whoever dies between two steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fakes import sysfs
from tests.fakes.sysfs import driver_of

from belljar.errors import DeviceBusy, HostError, NotPermitted
from belljar.host.devices.binding import Bindings, open_group
from belljar.host.devices.pci import NONE_ACCEPTED, DeviceClass, read

CARD, GPU, SOUND, PLAIN = "0000:03:00.0", "0000:01:00.0", "0000:01:00.1", "0000:02:00.0"
SITE = (DeviceClass("card", ("class=0200",)), DeviceClass("gpu", ("vendor=10de",)))
NATIVES = {slot.address: slot.driver for slot in sysfs.WORKSTATION}
MINE = (os.geteuid(), os.getegid())


class Killed(BaseException):
    """As by SIGKILL: nothing is done after it."""


class Host:
    def __init__(self, folder: Path) -> None:
        self.root = sysfs.make(folder / "root", sysfs.WORKSTATION)
        self.kernel = sysfs.Kernel(self.root, NATIVES)
        self.folder = folder / "devices"

    @property
    def bindings(self) -> Bindings:
        return Bindings(self.folder, self.root, self.kernel.write)

    def driver(self, address: str = CARD) -> str:
        return driver_of(self.root, address)

    def bind(self, *addresses: str, job: str = "slurm:7") -> None:
        self.bindings.bind(addresses, MINE, job, SITE)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_device_goes_to_its_user_and_back(host: Host) -> None:
    host.bind(CARD)
    assert host.driver() == "vfio-pci" and (host.root / "dev/vfio/13").stat().st_uid == MINE[0]
    (kept,) = host.bindings.all()
    assert (kept.address, kept.driver, kept.job, kept.is_whole) == (CARD, "e1000e", "slurm:7", True)
    assert host.bindings.release(job="slurm:7") == [CARD]
    assert host.driver() == "e1000e" and [*host.bindings.all()] == []
    assert host.kernel.written == [
        f"devices/{CARD}/driver/unbind {CARD}", f"devices/{CARD}/driver_override vfio-pci", f"drivers_probe {CARD}",
        f"devices/{CARD}/reset 1",
        f"devices/{CARD}/driver/unbind {CARD}", f"devices/{CARD}/driver_override", f"drivers/e1000e/bind {CARD}",
    ]  # fmt: skip


def test_it_is_written_down_before_anything_is_done(host: Host) -> None:
    host.kernel.stop = lambda: seen.append([it.address for it in host.bindings.all()])
    seen = list[list[str]]()
    host.bind(CARD)
    assert seen and all(addresses == [CARD] for addresses in seen)


@pytest.mark.parametrize("act", ["bind", "release"])
def test_whoever_is_killed_at_any_step_the_device_comes_back(tmp_path: Path, act: str) -> None:
    steps = 0
    while True:
        host = Host(tmp_path / f"{act}{steps}")
        if act == "release":
            host.bind(CARD)
        left = steps

        def stop() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        host.kernel.stop = stop
        try:
            host.bind(CARD) if act == "bind" else host.bindings.release([CARD])
            break
        except Killed:
            host.kernel.stop = lambda: None
        assert [it.address for it in host.bindings.left()] == [CARD]
        host.bindings.release([CARD])
        assert host.driver() == "e1000e" and [*host.bindings.all()] == [], f"killed at step {steps}"
        steps += 1
    assert steps >= 6, "each write has a step before and after"


def test_half_of_a_group_is_refused_and_the_whole_of_it_is_not(host: Host) -> None:
    with pytest.raises(HostError, match=r"group 2 holds 0000:01:00\.1, which the host uses"):
        host.bind(GPU)
    assert host.kernel.written == [] and [*host.bindings.all()] == []
    host.bind(GPU, SOUND)
    assert (host.driver(GPU), host.driver(SOUND)) == ("vfio-pci", "vfio-pci")
    host.bindings.release([GPU, SOUND])
    assert (host.driver(GPU), host.driver(SOUND)) == ("nouveau", "snd_hda_intel")


def test_one_that_cannot_be_reset_is_refused_unless_the_site_accepts_it(host: Host) -> None:
    with pytest.raises(HostError, match="cannot be reset"):
        host.bind(PLAIN)
    accepted = (DeviceClass("card", ("class=0200",), reset=NONE_ACCEPTED),)
    host.bindings.bind([PLAIN], MINE, "slurm:7", accepted)
    host.bindings.release([PLAIN])
    assert host.driver(PLAIN) == "r8169" and not any("reset" in line for line in host.kernel.written)


def test_one_whose_reset_fails_stays_with_root(host: Host) -> None:
    host.bind(CARD)
    (host.root / "sys/bus/pci/devices" / CARD / "reset").unlink()
    with pytest.raises(HostError, match="stays with root"):
        host.bindings.release([CARD])
    assert host.driver() == "vfio-pci" and [it.address for it in host.bindings.all()] == [CARD]


def test_what_another_job_has_is_busy_and_what_is_not_the_sites_is_refused(host: Host) -> None:
    host.bind(CARD)
    with pytest.raises(DeviceBusy, match="for slurm:7"):
        host.bind(CARD, job="slurm:8")
    with pytest.raises(NotPermitted, match="not one that the site gives"):
        host.bind("0000:00:01.0")
    with pytest.raises(NotPermitted, match="no such device"):
        host.bind("0000:ff:00.0")


def test_one_that_a_driver_does_not_let_go_is_given_back_with_the_others(host: Host) -> None:
    write = host.kernel.write

    def stubborn(path: Path, text: str) -> None:
        if path.name == "drivers_probe" and text == SOUND:
            raise OSError(16, "Device or resource busy", str(path))
        write(path, text)

    with pytest.raises(HostError, match=r"was not bound: .*Device or resource busy"):
        Bindings(host.folder, host.root, stubborn).bind([GPU, SOUND], MINE, "slurm:7", SITE)
    assert (host.driver(GPU), host.driver(SOUND)) == ("nouveau", "snd_hda_intel") and [*host.bindings.all()] == []


def test_one_that_was_bound_at_boot_stays_so(host: Host) -> None:
    host.kernel.drive(CARD, "vfio-pci")
    host.bind(CARD)
    host.bindings.release([CARD])
    assert host.driver() == "vfio-pci" and host.kernel.written == [f"devices/{CARD}/reset 1"]


def test_one_that_was_taken_out_of_the_host_is_forgotten(host: Host) -> None:
    host.bind(CARD)
    (host.root / "sys/bus/pci/devices" / CARD).unlink()
    assert host.bindings.release([CARD]) == [CARD] and [*host.bindings.all()] == []


def test_a_group_that_a_machine_has_open_is_not_given_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.bind(CARD)
    opened = os.open

    def busy(path: object, *rest: object, **more: object) -> int:
        if str(path).endswith("dev/vfio/13"):
            raise OSError(16, "Device or resource busy")
        return opened(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(DeviceBusy, match="another process has it"):
        open_group(read(host.root)[CARD], host.root)
    with pytest.raises(DeviceBusy):
        host.bindings.release([CARD])
    assert host.driver() == "vfio-pci" and host.bindings.left() == [], "nothing was begun"
