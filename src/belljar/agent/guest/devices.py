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
    """As long as one has no driver, each event of the kernel's is waited for. Modules are loaded here where nobody else does it."""
    program, loaded = next(filter(os.path.exists, MODPROBES), ""), set[bytes]()
    events = kernel_events()  # listen first, then look
    write_quietly(RESCAN, b"1")
    try:
        while True:
            seen = [at_port(bus + port) for port in ports]
            missing, left = [address for address, driver in seen if not driver], deadline - time.monotonic()
            if not missing or left <= 0:
                return [word.encode() for pair in seen for word in pair]
            fresh = {read_file(f"{bus}{address}/modalias").strip() for address in missing if address} - loaded
            loaded |= fresh
            for alias in fresh if program else ():
                os.spawnv(os.P_WAIT, program, ["modprobe", "-q", alias.decode("ascii", "replace")])
            if not fresh:
                events.settimeout(left)
                try:
                    events.recv(8192)
                except OSError:
                    pass
    finally:
        events.close()


def at_port(port: str) -> tuple[str, str]:
    """(address, driver) of the device in the folder of its port; "" for what is not there."""
    for name in os.listdir(port) if os.path.isdir(port) else ():
        if os.path.exists(f"{port}/{name}/vendor"):
            link = f"{port}/{name}/driver"
            return name, os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
    return "", ""
