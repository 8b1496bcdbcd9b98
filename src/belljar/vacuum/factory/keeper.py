"""A factory's machines: asked for, found again after a restart, ended. What a factory knows of a machine is what the machine's own
records say, so nothing is lost or doubled when a factory is killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from belljar import api
from belljar.host.values import amount
from belljar.model import Account, Context, NetworkMode, OwnWork, Payload, Probe, Request, RunPayload, StdinKind
from belljar.records import dataclass, replace
from belljar.vacuum import MachineType, Space
from belljar.vacuum.decisions.packing import Machine
from belljar.vacuum.settings.pipes import strange_addresses

REQUESTER = "vacuum"
GRACE = 30.0  # seconds a guest has to end by itself, as Vac gives
ROOT = Account("root", 0, 0, "root", home="/root")
SCRIPT = b"#!"
JOBOUTPUTS = "joboutputs"


@dataclass(frozen=True)
class Living(Machine):
    """A machine of this factory that has not ended, from the moment it is asked for. Moments are seconds since the epoch."""

    id: str = ""
    slot: int = 0
    created: float = 0.0
    began: float | None = None  # None: it is starting
    fizzle: float = 0.0
    hs06: float = 0.0
    fqan: str = ""
    pid: int | None = None
    folder: str = ""  # with what its guest left so far, and what it is given


class Machines:
    """The keeper of this host, by belljar's own door. `stop` and `move` wait for the machine's answer, for some seconds at most."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def living(self) -> list[Living]:
        """All machines of this factory that have not ended, those that are starting too."""
        ours = {"space": self._space.name, "factory": self._space.factory}.items()
        views = ((machine.view, machine.view.labels) for machine in api.machines())
        return [living_of(view, labels) for view, labels in views if ours <= labels.items()]

    async def start(self, request: Request) -> None:
        """Returns when the machine is claimed, and lives on its own. Raises BelljarError."""
        await api.astart(request)

    def stop(self, id: str) -> None:
        """Ask it to end, with its grace. Nothing where it has ended."""
        api.find(id).ask("stop", grace=GRACE)

    def move(self, id: str, moment: float) -> None:
        """Its deadline is this moment now; its features say so. Nothing where it has ended."""
        api.find(id).stop_at(moment)

    async def ended(self, id: str) -> None:
        """Returns when it has ended; what a dead keeper left of it is finished first. Raises BelljarError."""
        await api.find(id).await_end()

    def free_memory(self) -> int:
        """Bytes that new machines may take."""
        return api.room().memory

    def events(self, since: str) -> AsyncIterator[dict[str, Any]]:
        """What happens to all machines of this host's user; rows of the ledger behind *since* first."""
        return aiter(api.aevents(since))


def living_of(view: Any, labels: Mapping[str, str]) -> Living:
    """A machine as its record tells of it. What is missing or wrong in a label counts as nothing."""
    asked = view.request.get("machine") or {}
    created = view.created or 0.0
    power = amount(labels.get("hs06")) or amount(labels.get("hepscore"))
    return Living(
        labels.get("machinetype", ""), view.cpus, amount(labels.get("ends")) or created, view.memory,
        int(asked.get("disk") or 0), view.id, int(amount(labels.get("slot"))), created, view.began,
        amount(labels.get("fizzle")), view.cpus * (power or 1.0), labels.get("fqan", ""), view.pid, str(view.folder),
    )  # fmt: skip


def request_for(space: Space, kind: MachineType, order: Living, user_data: bytes, now: float) -> Request:
    """The request for this machine. User data that begin with `#!` are a script: it runs as root in a clone, unless
    the type's context says that the image's own init is to read them, as it does with all others. Raises BelljarError."""
    work: RunPayload | OwnWork
    if user_data.startswith(SCRIPT) and kind.context in (Context.AUTO, Context.RAMDISK):
        payload = Payload(
            (kind.name.encode(),), ROOT, script=user_data, cwd=b"/root", env=ENVIRONMENT, stdin=StdinKind.NULL
        )
        work = RunPayload(payload, user_data if kind.network == NetworkMode.USER.value else None)
    else:
        work = OwnWork(user_data or None, Probe())
    mode, _, name = kind.network.partition(":")
    request = api.request_of(
        work, image=kind.image, cpus=order.processors, memory=order.memory or None, disk=order.disk or None,
        network=NetworkMode(mode), network_name=name, context=kind.context, name=kind.name, requester=f"{REQUESTER}:{order.id}",
        timeout=max(order.ends - now, 1.0), grace=GRACE, labels=labels_of(space, kind, order),
    )  # fmt: skip
    is_strange = kind.image in strange_addresses(kind, space)
    return replace(request, id=order.id, machine=replace(request.machine, public_image=is_strange))


ENVIRONMENT = ((b"HOME", b"/root"), (b"PATH", b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"))


def labels_of(space: Space, kind: MachineType, order: Living) -> dict[str, str]:
    """What accounting, neighbours and a restarted factory must know of it, as it is today."""
    labels = {
        "space": space.name, "factory": space.factory, "machinetype": kind.name, "slot": str(order.slot),
        "ends": f"{order.ends:.0f}", "fizzle": f"{kind.fizzle:g}", "wall_limit": f"{kind.max_wallclock:.0f}",
        "site": space.site, "fqan": kind.fqan, "hs06": f"{space.hs06:g}" if space.hs06 else "",
        "hepscore": f"{space.hepscore:g}" if space.hepscore else "", "pipe": kind.pipe,
    }  # fmt: skip
    return {name: text for name, text in labels.items() if text}
