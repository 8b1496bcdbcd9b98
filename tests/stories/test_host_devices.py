"""Devices of the host in the life of a machine: refused before its start, had by one at a time, never missing in silence."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
from tests.fakes import sysfs
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.host.devices.pci import DeviceClass
from belljar.host.locks import try_lock
from belljar.model import Cause, Outcome, OutcomeClass, Start

FIRST, SECOND, CARD = "0000:1b:00.0", "0000:43:00.0", "0000:18:00.0"
SITE = (DeviceClass("gpu", ("vendor=10de class=03*",)), DeviceClass("ib", ("class=0207",)))
PORT = "0000:00:1b.0"


class Host:
    """A supervisor on a node of eight GPUs, two of them bound for its user."""

    def __init__(self, runtime: Runtime, folder: Path) -> None:
        self.runtime, self.root = runtime, sysfs.make(folder / "host", sysfs.DGX)
        self.kernel = sysfs.Kernel(self.root, {})
        runtime.site, runtime.root = SITE, self.root
        for address in (FIRST, SECOND):
            self.kernel.drive(address, "vfio-pci")

    def run(self, *words: str, start: Start = Start.AUTO) -> Outcome:
        return self.runtime.run(self.runtime.request(machine={"devices": words, "start": start}))

    def had(self) -> list[str]:
        return [device.address for device in self.runtime.domain().spec.devices]


@pytest.fixture
def host(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    play_limit(monkeypatch, resource.RLIM_INFINITY)
    return Host(runtime, tmp_path)


def play_limit(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Of locked memory; the tests' host may have a small one."""
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (size, size))


def refused(outcome: Outcome, error: str, klass: OutcomeClass, words: str) -> None:
    assert (outcome.error, outcome.klass) == (error, klass) and words in outcome.reason, outcome.reason


@pytest.mark.parametrize("start", [Start.COLD, Start.AUTO])
def test_a_job_has_the_device_that_it_asked_for(host: Host, start: Start) -> None:
    outcome = host.run(f"pci:{SECOND}", start=start)
    assert outcome.cause is Cause.FINISHED, outcome.reason
    assert host.had() == [SECOND] and f"await_devices {PORT}" in host.runtime.guests[-1].done
    events = host.runtime.journal()
    names = [event["event"] for event in events]
    assert names.index("device") < names.index("spawned") < names.index("device-seen") < names.index("payload")
    (seen,) = [event for event in events if event["event"] == "device-seen"]
    assert (seen["address"], seen["inside"], seen["driver"]) == (SECOND, "0000:01:00.0", "e1000e")
    assert host.runtime.leftovers() == []


def test_a_template_is_made_without_it_and_serves_every_other_of_its_kind(host: Host) -> None:
    assert host.run(f"pci:{FIRST}").start == host.run(f"pci:{SECOND}").start == "clone"
    assert len(host.runtime.hypervisor.templates()) == 1
    made, *clones = [domain.spec.devices for domain in host.runtime.hypervisor.domains]
    assert [devices[0].windows for devices in (made, *clones)] == [clones[0][0].windows] * 3


def test_so_many_of_a_class_are_the_first_that_are_free(host: Host) -> None:
    host.runtime.folders.devices.mkdir(parents=True, mode=0o700)
    lock = try_lock(host.runtime.folders.devices / f"{FIRST}.lock")
    assert lock is not None
    with lock:
        host.run("gpu:1")
        assert host.had() == [SECOND]
        refused(host.run("gpu:2"), "DeviceBusy", OutcomeClass.TRANSIENT, "1 more devices of the class gpu")
        refused(host.run(f"pci:{FIRST}"), "DeviceBusy", OutcomeClass.TRANSIENT, "another machine has it")
    host.run("gpu:2")
    assert host.had() == [FIRST, SECOND]


def test_it_is_free_again_when_the_machine_is_gone(host: Host) -> None:
    for _ in range(2):
        assert host.run(f"pci:{FIRST}").cause is Cause.FINISHED
    lock = try_lock(host.runtime.folders.devices / f"{FIRST}.lock")
    assert lock is not None
    lock.release()


@pytest.mark.parametrize(
    ("word", "error", "klass", "words"),
    [
        ("pci:0000:ff:00.0", "NotPermitted", OutcomeClass.USER, "no such device"),
        ("pci:0000:29:00.0", "NotPermitted", OutcomeClass.USER, "not one that the site gives"),
        ("tpu:1", "BadOption", OutcomeClass.USER, "not pci:ADDRESS, nor CLASS:COUNT"),
        ("gpu:all", "BadOption", OutcomeClass.USER, "not pci:ADDRESS, nor CLASS:COUNT"),
        (f"pci:{CARD}", "HostError", OutcomeClass.NODE, "mlx5_core has it"),
        ("gpu:8", "HostError", OutcomeClass.NODE, "6 more devices of the class gpu were not free"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_starts(
    host: Host, word: str, error: str, klass: OutcomeClass, words: str
) -> None:
    refused(host.run(word), error, klass, words)
    assert host.runtime.hypervisor.domains == [] and host.runtime.leftovers() == []


def test_the_sites_groups_count(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.runtime.site = (DeviceClass("gpu", ("vendor=10de",), groups=("no-such-group",)),)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (-1, -1))
    monkeypatch.setattr("belljar.machine.extras.devices.private_folder", lambda path: path.mkdir(exist_ok=True))
    for word in ("gpu:1", f"pci:{FIRST}"):
        refused(host.run(word), "NotPermitted", OutcomeClass.USER, "for the groups no-such-group")


def test_a_group_that_the_host_uses_too_is_refused(host: Host) -> None:
    group = host.root / "sys/bus/pci/devices" / CARD / "iommu_group"
    group.unlink()
    group.symlink_to(host.root / "sys/kernel/iommu_groups/20")
    refused(host.run(f"pci:{FIRST}"), "HostError", OutcomeClass.NODE, f"group 20 holds {CARD}")


def test_one_that_another_process_has_open_is_busy(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def busy(path: object, *rest: object, **more: object) -> int:
        if "dev/vfio/20" in str(path):
            raise OSError(16, "Device or resource busy")
        return opened(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", busy)
    refused(host.run(f"pci:{FIRST}"), "DeviceBusy", OutcomeClass.TRANSIENT, "another process has it")


def test_too_little_locked_memory_is_said_with_the_numbers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    play_limit(monkeypatch, 8 << 20)
    outcome = host.run(f"pci:{FIRST}")
    refused(outcome, "HostError", OutcomeClass.NODE, "64 MiB and 64 MiB more; the limit is 8 MiB")


@pytest.mark.parametrize(
    ("seen", "error", "klass", "words"),
    [
        (("", ""), "HostError", OutcomeClass.NODE, "did not see the device 0000:1b:00.0 (10de:2330) within 60 s"),
        (("0000:01:00.0", ""), "GuestRefused", OutcomeClass.USER, "no driver of the guest's took the device"),
    ],
)
def test_no_payload_starts_without_its_device(
    host: Host, seen: tuple[str, str], error: str, klass: OutcomeClass, words: str
) -> None:
    host.runtime.plan(Script(devices={PORT: seen}))
    outcome = host.run(f"pci:{FIRST}")
    refused(outcome, error, klass, words)
    assert not outcome.payload_ran and host.runtime.guests[-1].payloads == [] and host.runtime.leftovers() == []


def test_a_machine_with_one_is_neither_frozen_nor_forked(host: Host) -> None:
    request = host.runtime.request(machine={"devices": (f"pci:{FIRST}",)}, checkpointable=True)
    refused(host.runtime.run(request), "BadOption", OutcomeClass.USER, "it has devices of this host")


def test_what_is_known_of_its_size_goes_to_the_hypervisor(host: Host) -> None:
    host.run(f"pci:{FIRST}")
    (device,) = host.runtime.domain().spec.devices
    assert (device.address, device.windows) == (FIRST, (16 << 20, (128 << 30) + (32 << 20)))
