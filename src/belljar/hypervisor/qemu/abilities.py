"""What this QEMU is and can do. Asked once, then remembered for as long as the binary's file is the same.

No version is a condition: what a QEMU has is read from its own lists of devices and of what its monitor understands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from belljar.errors import HostError
from belljar.hints import Any
from belljar.host.commands import program, run
from belljar.host.files import read_json, write_whole
from belljar.model import dumps
from belljar.records import dataclass

NAMES = ("qemu-system-x86_64", "qemu-kvm")
PLACES = ("/usr/libexec",)  # where EL keeps qemu-kvm
TRIED = ((7, 2), (10, 0), (11, 1))  # what the tests clone with; others may do as well
QUESTION_TIMEOUT = 30.0
DEVICES = (
    "virtio-blk-pci-non-transitional", "virtio-serial-pci-non-transitional", "virtio-rng-pci-non-transitional",
    "virtio-net-pci-non-transitional", "virtio-9p-pci-non-transitional", "vmgenid", "pvpanic-pci",
    "vhost-user-fs-pci", "pcie-root-port", "pc-dimm",
)  # fmt: skip
NEEDED = DEVICES[:3]
# For what its monitor understands: migration to and from `file:`, which later versions want for files; a RAM file that QEMU
# need not be allowed to write (`rom`); a bound on its threads; processors that can be plugged in, and what they are called.
FILE_MIGRATION, READONLY_RAM, FEW_THREADS, PLUGGED_CPUS = FEATURES = (
    "file-migration", "readonly-ram", "few-threads", "plugged-cpus",
)  # fmt: skip
SCHEMA = b'{"execute": "qmp_capabilities"}{"execute": "query-qmp-schema"}{"execute": "quit"}'


@dataclass(frozen=True)
class Abilities:
    """One QEMU binary."""

    binary: str
    identity: str  # of the file: a new package is another QEMU
    version: tuple[int, int, int]
    name: str  # the whole version line, packaging included
    devices: frozenset[str]  # those of DEVICES that it has
    features: frozenset[str]  # those of FEATURES

    @property
    def readonly_ram(self) -> bool:
        """Can a clone map its RAM file without the right to write it?"""
        return READONLY_RAM in self.features


def find(binary: str) -> str:
    """The path of the QEMU to use. Raises CommandMissing."""
    names = [path for name in NAMES for path in (name, *(f"{place}/{name}" for place in PLACES))]
    hint = "Install QEMU: `apt install qemu-system-x86`, `dnf install qemu-kvm`."
    return program(binary, names, key="qemu.binary", missing=NAMES[0], hint=hint)


def identity(binary: str) -> str:
    """The file behind this path, as long as nobody replaced it."""
    facts = os.stat(binary)
    return f"{os.path.realpath(binary)}:{facts.st_size}:{facts.st_mtime_ns}"


def ask(binary: str, memory: Path) -> Abilities:
    """What *binary* can do, from the file *memory* when that speaks of the same binary."""
    known = identity(binary)
    try:
        said = read_json(memory)
        if said["identity"] == known and said["asked"] == [*DEVICES, *FEATURES] and said["whole"]:
            major, minor, micro = map(int, said["version"])
            has = (frozenset(said["devices"]), frozenset(said["features"]))
            return Abilities(binary, known, (major, minor, micro), str(said["name"]), *has)
    except (OSError, ValueError, KeyError, TypeError, HostError):
        pass  # nothing worth remembering
    found, is_whole = _ask(binary, known)
    if is_whole:
        facts = {
            "identity": known,
            "asked": [*DEVICES, *FEATURES],
            "whole": True,
            "version": found.version,
            "name": found.name,
        }
        write_whole(memory, dumps({**facts, "devices": sorted(found.devices), "features": sorted(found.features)}))
    return found


def _ask(binary: str, known: str) -> tuple[Abilities, bool]:
    """Its abilities, and is that all? A QEMU that could not be asked to the end may have more."""
    line = run([binary, "--version"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace").partition("\n")[0].strip()
    version = read_version(line)
    if version is None:
        raise HostError(
            f"{binary}: does not say which QEMU it is: {line[:80]!r}", hint="Set `qemu.binary` to a qemu-system-x86_64."
        )
    listing = run([binary, "-device", "help"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace")
    devices = read_devices(listing)
    missing = [name for name in NEEDED if name not in devices]
    if missing:
        raise HostError(f"{binary}: has no {', '.join(missing)}", hint="Install your distribution's full QEMU package.")
    asking = [binary, "-nodefaults", "-no-user-config", "-display", "none", "-M", "none", "-qmp", "stdio"]
    said = run(asking, timeout=QUESTION_TIMEOUT, stdin=SCHEMA, check=False, hasty=True)  # it quits, read or not
    return Abilities(binary, known, version, line, devices, read_schema(said.out)), said.code == 0


def read_version(line: str) -> tuple[int, int, int] | None:
    """Read `QEMU emulator version 7.2.22 (Debian ...)`."""
    found = re.match(r"QEMU emulator version (\d+)\.(\d+)\.(\d+)", line)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def read_devices(listing: str) -> frozenset[str]:
    """Read `-device help`: lines of the form `name "vmgenid", bus ...`."""
    there = set(re.findall(r'^name "([^"]+)"', listing, re.MULTILINE))
    return frozenset(name for name in DEVICES if name in there)


def read_schema(said: bytes) -> frozenset[str]:
    """Read the answers to SCHEMA. What cannot be read has none of the features, as QEMU had none of them once.
    https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#qapidoc-qmp-schema"""
    has: set[str] = set()
    for names in _members(said):
        if {"socket", "exec", "file"} <= names:  # where a migration can go to
            has.add(FILE_MIGRATION)
        if {"mem-path", "rom"} <= names:  # of a memory-backend-file
            has.add(READONLY_RAM)
        if "thread-pool-max" in names:  # of the main loop
            has.add(FEW_THREADS)
        if {"vcpus-count", "qom-path", "props"} <= names:  # what query-hotpluggable-cpus tells of each
            has.add(PLUGGED_CPUS)
    return frozenset(has)


def _members(said: bytes) -> Iterator[set[str]]:
    """The names within each type of the schema: the values of an enumeration, the members of a structure."""
    for line in said.splitlines():
        try:
            answer: Any = json.loads(line)["return"]
            for entry in answer if isinstance(answer, list) else ():
                yield {*entry.get("values", ()), *(one["name"] for one in entry.get("members", ()) if "name" in one)}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a greeting, an event, or no QMP at all
