"""Devices of the host's that were plugged in while the guest stood still: its kernel finds each, and then its driver does."""

from __future__ import annotations

import os
import time
from _collections_abc import Callable

from belljar.agent.guest.network import RESCAN
from belljar.agent.guest.system import MODPROBES, kernel_events, read_file, write_quietly
from belljar.agent.wire import Words, join

PCI_BUS = "/sys/bus/pci/devices/"


def await_devices(words: Words) -> tuple[int, Callable[[], bytes]]:
    """Answer with address and driver of the device at each of these ports, as soon as all have one, or the time is over."""
    seconds, ports = words.number(), [port.decode("ascii") for port in words.some()]
    return seconds + 2, lambda: join(*drivers_at(ports, time.monotonic() + seconds))


def drivers_at(ports: list[str], deadline: float, bus: str = PCI_BUS) -> list[bytes]:
    """As long as one has no driver, each event of the kernel's is waited for. Where nobody else loads modules, it is done here."""
    events, loaded = kernel_events(), set[bytes]()  # listen first, then look
    write_quietly(RESCAN, b"1")
    try:
        while True:
            seen = [at_port(port, bus) for port in ports]
            missing = [address for address, driver in seen if not driver]
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                return [word.encode() for pair in seen for word in pair]
            fresh = {read_file(f"{bus}{address}/modalias").strip() for address in missing if address} - loaded
            for alias in fresh - {b""}:
                load_for(alias)
            loaded |= fresh
            if not fresh:
                events.settimeout(left)
                try:
                    events.recv(8192)
                except OSError:
                    pass
    finally:
        events.close()


def at_port(port: str, bus: str) -> tuple[str, str]:
    """(address, driver) of the device behind it; "" for what is not there."""
    folder = bus + port
    names = os.listdir(folder) if os.path.isdir(folder) else []
    addresses = [name for name in names if name.count(":") == 2 and os.path.exists(f"{folder}/{name}/vendor")]
    if not addresses:
        return "", ""
    link = f"{folder}/{addresses[0]}/driver"
    return addresses[0], os.path.basename(os.readlink(link)) if os.path.islink(link) else ""


def load_for(alias: bytes) -> None:
    """As udev would by itself; of a device that no module is for, nothing is loaded."""
    program = next(filter(os.path.exists, MODPROBES), "")
    if program:
        os.spawnv(os.P_WAIT, program, ["modprobe", "-q", alias.decode("ascii", "replace")])
