"""What this QEMU is and can do. Asked once, then remembered for as long as the binary's file is the same.

No version is a condition: what a QEMU has is read from its own lists of devices and of what its monitor understands.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from pathlib import Path

from belljar.errors import CommandMissing, HostError
from belljar.hints import Any
from belljar.host import commands
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
    "virtio-net-pci-non-transitional", "vmgenid", "pvpanic-pci", "pc-dimm",
)  # fmt: skip
NEEDED = DEVICES[:3]
FILE_MIGRATION, READONLY_RAM, FEW_THREADS, PLUGGED_CPUS, MONITOR_OBJECT, DIRTY_TCG = FEATURES = (
    "file-migration", "readonly-ram", "few-threads", "plugged-cpus", "monitor-object", "dirty-tcg",
)  # fmt: skip
SIGNS = {  # what its monitor understands, by the names within one type of its schema
    FILE_MIGRATION: {"socket", "exec", "file"},  # to and from `file:`, which later versions want for files
    READONLY_RAM: {"mem-path", "rom"},  # a memory-backend-file that QEMU need not be allowed to write
    FEW_THREADS: {"thread-pool-max"},  # a bound on the threads of its main loop
    PLUGGED_CPUS: {"vcpus-count", "qom-path", "props"},  # what query-hotpluggable-cpus tells of each
    MONITOR_OBJECT: {"monitor-qmp"},  # a monitor as an object: 11.1 warns of `-mon`
    # A migration sees all that an emulated guest writes to its first piece of memory since 9.0, which is the first with mapped-ram:
    # "physmem: Fix migration dirty bitmap coherency with TCG memory access". What it writes to memory that was plugged in is missed by
    # 10.0, too (an address within the piece is taken for one within all memory), or an assertion ends QEMU.
    DIRTY_TCG: {"mapped-ram"},
}
SCHEMA = b'{"execute": "qmp_capabilities"}{"execute": "query-qmp-schema"}{"execute": "quit"}'
# By default TCG takes a buffer of up to 1 GiB, which a job's limit on data may not have.
WITHOUT_GUEST = "-nodefaults -no-user-config -display none -M none -accel tcg,tb-size=8 -accel kvm -qmp stdio"


@dataclass(frozen=True)
class Abilities:
    """One QEMU binary."""

    binary: str
    identity: str  # of the file: a new package is another QEMU
    name: str  # the whole version line, packaging included
    devices: frozenset[str]  # those of DEVICES that it has
    features: frozenset[str]  # those of FEATURES


def find(binary: str) -> str:
    """The path of the QEMU to use. Raises CommandMissing."""
    names = [path for name in NAMES for path in (name, *(f"{place}/{name}" for place in PLACES))]
    try:
        return program(binary, names, key="qemu.binary", missing=NAMES[0], hint="")
    except CommandMissing as exc:
        exc.hint = exc.hint or f"As root: {commands.remedy(commands.QEMU)}"
        raise


def identity(binary: str) -> str:
    """The file behind this path, as long as nobody replaced it."""
    status = os.stat(binary)
    return f"{os.path.realpath(binary)}:{status.st_size}:{status.st_mtime_ns}"


def ask(binary: str, memory: Path) -> Abilities:
    """What *binary* can do, from the file *memory* when that speaks of the same binary. Raises HostError."""
    known, asked = identity(binary), [*DEVICES, *FEATURES]
    try:
        kept = read_json(memory)
        if kept["identity"] == known and kept["asked"] == asked:
            has = frozenset(kept["devices"]), frozenset(kept["features"])
            return Abilities(binary, known, kept["name"], *has)
    except (OSError, ValueError, KeyError, TypeError, HostError):
        pass  # nothing worth remembering
    name = name_of(binary)
    listing = run([binary, "-device", "help"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace")
    devices = read_devices(listing)
    if missing := [device for device in NEEDED if device not in devices]:
        raise HostError(f"{binary}: has no {', '.join(missing)}", hint="Install your distribution's full QEMU package.")
    asking = [binary, *WITHOUT_GUEST.split()]
    features = read_schema(run(asking, timeout=QUESTION_TIMEOUT, stdin=SCHEMA).out)
    answers = {"name": name, "devices": sorted(devices), "features": sorted(features)}
    write_whole(memory, dumps({"identity": known, "asked": asked, **answers}))
    return Abilities(binary, known, name, devices, features)


def name_of(binary: str) -> str:
    """Its version line: `QEMU emulator version 7.2.22 (Debian ...)`. Raises HostError for a program that is not QEMU."""
    line = run([binary, "--version"], timeout=QUESTION_TIMEOUT).out.decode(errors="replace").partition("\n")[0].strip()
    if not line.startswith("QEMU emulator version "):
        hint = "Set `qemu.binary` to a qemu-system-x86_64 or qemu-kvm."
        raise HostError(f"{binary}: is not QEMU: it calls itself {line[:60]!r}", hint=hint)
    return line


def read_devices(listing: str) -> frozenset[str]:
    """Read `-device help`: lines of the form `name "vmgenid", bus ...`."""
    there = set(re.findall(r'^name "([^"]+)"', listing, re.MULTILINE))
    return frozenset(name for name in DEVICES if name in there)


def read_schema(answers: bytes) -> frozenset[str]:
    """Read the answers to SCHEMA. What cannot be read has none of the features, as QEMU had none of them once.
    https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#qapidoc-qmp-schema"""
    features: set[str] = set()
    for line in answers.splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # a greeting, an event, or no QMP at all
            answer: Any = json.loads(line)["return"]
            for entry in answer if isinstance(answer, list) else ():
                # The values of an enumeration, the members of a structure.
                members = (member["name"] for member in entry.get("members", ()) if "name" in member)
                names = {*entry.get("values", ()), *members}
                features |= {feature for feature, signs in SIGNS.items() if signs <= names}
    return frozenset(features)
