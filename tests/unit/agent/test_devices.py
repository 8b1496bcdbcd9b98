"""The guest's side of a device that was plugged in: found behind its port, its module loaded, its driver awaited."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.agent.guest import devices, mounts
from belljar.agent.guest.devices import await_devices, drivers_at
from belljar.agent.wire import Words

PORT, OTHER = "0000:00:1b.0", "0000:00:1b.1"
ALIAS = "pci:v00008086d000010D3sv00008086sd00000000bc02sc00i00"


class Bus:
    """A guest's bus. What is in *coming* happens at the kernel's next events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.loaded, self.coming = folder, list[str](), list[Callable[[], None]]()
        for port in (PORT, OTHER):
            (folder / port / "power").mkdir(parents=True)
            (folder / port / f"{port}:pcie004").mkdir()  # the port's own service

    def plug(self, port: str, address: str) -> None:
        device = self.folder / port / address
        device.mkdir()
        (device / "vendor").write_text("0x8086\n")
        (device / "modalias").write_text(f"{ALIAS}\n")
        (self.folder / address).symlink_to(device)

    def drive(self, address: str, driver: str = "e1000e") -> None:
        (self.folder / address / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")

    def settimeout(self, seconds: float) -> None:
        assert 0 < seconds <= 30

    def recv(self, size: int) -> bytes:
        if not self.coming:
            raise TimeoutError
        self.coming.pop(0)()
        return b"add@/devices/pci"

    def close(self) -> None:
        pass

    def seen(self, *ports: str, within: float = 30.0) -> list[bytes]:
        return drivers_at([*ports], within, f"{self.folder}/")


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bus:
    made = Bus(tmp_path)
    monkeypatch.setattr(mounts, "kernel_events", lambda: made)
    monkeypatch.setattr(mounts, "write_quietly", lambda path, data: True)
    monkeypatch.setattr(devices, "MODPROBES", ("/",))
    monkeypatch.setattr(os, "spawnv", lambda how, program, argv: made.loaded.append(argv[-1]))
    return made


def test_a_device_with_its_driver_is_told_at_once(bus: Bus) -> None:
    bus.plug(PORT, "0000:01:00.0")
    bus.drive("0000:01:00.0")
    assert bus.seen(PORT) == [b"0000:01:00.0", b"e1000e"] and bus.loaded == []


def test_each_event_is_waited_for_and_its_module_is_loaded_once(bus: Bus) -> None:
    bus.coming = [lambda: None, lambda: bus.plug(PORT, "0000:01:00.0"), lambda: None, lambda: bus.drive("0000:01:00.0")]
    assert bus.seen(PORT) == [b"0000:01:00.0", b"e1000e"] and bus.loaded == [ALIAS]


def test_the_job_waits_for_the_last_of_them(bus: Bus) -> None:
    bus.plug(OTHER, "0000:02:00.0")
    bus.drive("0000:02:00.0", "nvidia")
    bus.coming = [lambda: bus.plug(PORT, "0000:01:00.0"), lambda: bus.drive("0000:01:00.0")]
    assert bus.seen(PORT, OTHER) == [b"0000:01:00.0", b"e1000e", b"0000:02:00.0", b"nvidia"]


@pytest.mark.parametrize("is_there", [False, True])
def test_what_never_comes_is_told_as_missing(bus: Bus, is_there: bool) -> None:
    if is_there:
        bus.plug(PORT, "0000:01:00.0")
    assert bus.seen(PORT, within=0.01) == ([b"0000:01:00.0", b""] if is_there else [b"", b""])


def test_the_call_takes_a_time_and_ports(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "drivers_at", lambda ports, deadline: [b"a", b"b"] * len(ports))
    seconds, work = await_devices(Words([b"60", b"2", PORT.encode(), OTHER.encode()]))
    assert seconds > 60 and work() == b"a\0b\0a\0b"
