"""Devices of the host's that were plugged in while the guest stood still: its kernel finds each, and then its driver does."""

from __future__ import annotations

import errno
import os
from _collections_abc import Callable
from contextlib import suppress

from belljar.agent.guest.mounts import awaited
from belljar.agent.guest.system import MODPROBES, read_file
from belljar.agent.wire import Words, join

PCI_BUS = "/sys/bus/pci/devices/"


def await_devices(words: Words) -> tuple[int, Callable[[], bytes]]:
    """Answer with address and driver of the device at each of these ports, as soon as all have one, or the time is over."""
    seconds, ports = words.number(), [port.decode("ascii") for port in words.some()]
    return seconds + 2, lambda: join(*drivers_at(ports, seconds))


def drivers_at(ports: list[str], patience: float, bus: str = PCI_BUS) -> list[bytes]:
    """As soon as all have one. Modules are loaded here where nobody else does it."""
    program, loaded, seen = next(filter(os.path.exists, MODPROBES), ""), set[bytes](), list[tuple[str, str]]()

    def look() -> None:
        seen[:] = [at_port(bus + port) for port in ports]
        missing = [address for address, driver in seen if not driver]
        fresh = {read_file(f"{bus}{address}/modalias").strip() for address in missing if address} - loaded
        loaded.update(fresh)
        for alias in fresh if program else ():
            os.spawnv(os.P_WAIT, program, ["modprobe", "-q", alias.decode("ascii", "replace")])
        if missing:
            raise OSError(errno.ENXIO, "no driver yet")

    with suppress(OSError):  # what is missing is told
        awaited(look, patience)
    return [word.encode() for pair in seen for word in pair]


def at_port(port: str) -> tuple[str, str]:
    """(address, driver) of the device in the folder of its port; "" for what is not there."""
    for name in os.listdir(port) if os.path.isdir(port) else ():
        if os.path.exists(f"{port}/{name}/vendor"):
            link = f"{port}/{name}/driver"
            return name, os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
    return "", ""
