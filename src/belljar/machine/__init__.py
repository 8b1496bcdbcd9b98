"""The door of the machine room: settings and folders, the names of a machine's files, and its view from outside.

Supervisor   keep(request, ...) -> Outcome                         supervisor.py
Machines     list, find: the machines of a set of folders    outside/registry.py
"""

from __future__ import annotations

import os
from pathlib import Path

from belljar.hints import Any
from belljar.model import MIB, SEED, Context, MachineId, NetworkMode, Pages, Pin, Start, Topology, setting
from belljar.records import dataclass

SMALLEST_MEMORY = 64 * MIB  # of any machine


@dataclass(frozen=True)
class Settings:
    """`[machine]` in the settings files."""

    hypervisor: str = setting("qemu",
        "qemu, or libvirt:URI such as libvirt:qemu:///system (docs/batch/libvirt.md)")  # fmt: skip
    cpus: int = setting(1, "virtual cpus of a machine that asks for none", minimum=1, maximum=4096)
    memory: int = setting(512 * MIB, "memory of a machine that asks for none", unit="bytes", minimum=SMALLEST_MEMORY)
    network: NetworkMode = setting(NetworkMode.NONE, "network of a machine that asks for none: none or user")
    start: Start = setting(Start.AUTO, "auto: clone a template where that is possible; clone and cold insist")
    pin: Pin = setting(Pin.AUTO,
        "auto: each virtual cpu on one that a batch job has to itself; cpus: on one that this process may use, or not at all")  # fmt: skip
    topology: Topology = setting(Topology.AUTO,
        "a guest sees sockets, siblings and NUMA nodes of the cpus it is pinned to, and boots cold; auto: where they are on several nodes; host; flat: never")  # fmt: skip
    pages: Pages = setting(Pages.DEFAULT,
        "memory in large pages, and a cold boot: thp, by the kernel; 2M or 1G, reserved; default: none of these")  # fmt: skip
    context: Context = setting(Context.AUTO,
        "how a guest gets the agent where nothing is asked for")  # fmt: skip
    grace: float = setting(10.0, "time between TERM and the machine's end", unit="seconds")
    clone_timeout: float = setting(30.0,
        "a clone that has not answered after this is booted cold instead", unit="seconds")  # fmt: skip
    device_timeout: float = setting(60.0,
        "how long the guest's drivers may take for devices of this host; the job does not start without", unit="seconds")  # fmt: skip
    pack_files: int = setting(1000,
        "a folder of --in with so many files and folders is packed as a disk; 0: not for their number")  # fmt: skip
    pack_size: int = setting(64 * MIB,
        "a folder of --in of this size is packed as a disk; 0: not for its size", unit="bytes")  # fmt: skip
    output_limit: int = setting(64 * MIB,
        "the latest part of a detached machine's stdout, and of its stderr, that is kept", unit="bytes", minimum=4096)  # fmt: skip
    keep_days: int = setting(7, "records and logs of ended machines are kept this long", unit="days")
    keep_count: int = setting(1000, "at most this many ended machines are kept with their logs")


@dataclass(frozen=True)
class Folders:
    """`run`: live machines, on a local disk; `scratch`: overlays; `store`: images, templates; `logs`: ended machines,
    ledger."""

    run: Path
    scratch: Path
    store: Path
    logs: Path

    @property
    def machines(self) -> Path:
        return self.run / "machines"

    @property
    def identities(self) -> Path:
        """One file per live guest, named by what its kernel drew: a second one of the same name cannot be made."""
        return self.run / "identities"

    def machine(self, id: MachineId) -> Path:
        return self.machines / id

    def overlay(self, id: MachineId) -> Path:
        return self.scratch / f"{id}.qcow2"

    def attachment(self, id: MachineId, name: str) -> Path:
        return self.scratch / f"{id}.{name}"

    def ended(self, id: MachineId) -> Path:
        return self.logs / id

    @property
    def devices(self) -> Path:
        """A lock for each device of this host that a machine has, with the machine's id in it; root's notes of what is bound."""
        return self.run / "devices"

    @property
    def begun(self) -> Path:
        """A folder per machine that has not ended, with request and journal: a reboot keeps it. Several hosts may have one `logs`."""
        return self.logs / f".begun-{os.uname().nodename}"


# files of a machine's folder, beside those that `model` names for the hypervisor
KEPT_DISK = "overlay.qcow2"  # after `run --keep`
JOBOUTPUTS = "joboutputs"  # a folder: what the guest put there
BASE_URL = "http://169.254.169.253"  # where a guest in a user network finds its features and leaves its outputs
CREDENTIALS = "credentials"  # a folder: what whoever asked for the machine renews for the guest; in no record
RESERVED = "reserved.json"  # what of the host is kept for it while it lives
DOUBTS = "doubts"  # in the folder of a template: a byte for each silent clone since the last one that came up
STDOUT_LOG, STDERR_LOG = "stdout.log", "stderr.log"  # of a detached machine's payload
KEEPER_LOG = "keeper.log"  # what its keeper itself says
DISK_NOT_WHOLE = "QEMU may not have written all of its disk"  # a trouble of a machine whose disk outlives it
REQUEST, OUTCOME, LOCK, CONTROL, CONSOLE_LOG, COLLECTED = (
    "request.json", "outcome.json", "lock", "control.sock", "console.log", "collect.tar",
)  # fmt: skip
NOT_KEPT = (SEED, "*.sock")  # when it has ended


@dataclass(frozen=True)
class MachineView:
    """What can be seen of a machine from outside, live or ended."""

    id: MachineId
    name: str
    state: str
    cause: str
    image: str
    cpus: int
    memory: int
    start: str
    requester: str
    owner: int  # uid of the folder
    created: float
    ended: float | None
    pid: int | None  # of the domain's process
    alive: bool  # its supervisor holds the lock
    folder: Path
    request: dict[str, Any]
    outcome: dict[str, Any] | None
    began: float | None = None  # when its work did

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """What else its request tells of it; a label may be there more than once."""
        pairs = self.request.get("labels")
        pairs = pairs if isinstance(pairs, list) else []
        pairs = [pair for pair in pairs if isinstance(pair, list) and [type(word) for word in pair] == [str, str]]
        return [(kind, text) for kind, text in pairs]

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.pairs)

    @property
    def payload(self) -> dict[str, Any]:
        """What of its payload is in its record; nothing of a guest at its own work."""
        work = self.request.get("work")
        payload = work.get("payload") if isinstance(work, dict) else None
        return payload if isinstance(payload, dict) else {}
