"""The metadata service of a machine with a user network: its supervisor answers what the guest asks of 169.254.169.254.

The same service answers at 169.254.169.253, where Vac has machine and job features and takes joboutputs: a machine may keep
its payloads' users from .254. Imported only by machines with a user network; HTTP is imported with the first call.
"""

from __future__ import annotations

import os

from belljar.context import Features, Metadata, MetadataMode, metadata_service
from belljar.host.traffic import Call
from belljar.hypervisor import guest_uuid
from belljar.machine import JOBOUTPUTS
from belljar.machine.extras.features import values
from belljar.machine.life.life import Life
from belljar.machine.parts import Parts
from belljar.model import MIB, NetworkMode, OwnWork, Request

PORT = 80
ADDRESSES = ("169.254.169.254", "169.254.169.253")
BASE_URL = f"http://{ADDRESSES[1]}"


class Answering:
    """Answers for one machine."""

    def __init__(self, life: Life, parts: Parts) -> None:
        self._life, self._parts = life, parts
        self._service: Metadata | None = None

    async def answer(self, call: Call) -> None:
        """One connection, to its end."""
        if self._service is None:
            self._service = self._opened()
        await self._service.serve(call.connection)

    def _opened(self) -> Metadata:
        life = self._life
        request = life.request
        link = life.joined.link if life.joined is not None else None
        return metadata_service(
            self._features, life.folder / JOBOUTPUTS, self._parts.context,
            uuid=guest_uuid(request.id), hostname=f"belljar-{request.id}", user_data=request.work.user_data,
            machinetype=request.name or request.machine.image, zone=os.uname().nodename,
            size=f"{request.machine.cpus}-{request.machine.memory // MIB}", base_url=BASE_URL,
            address=link.address.partition("/")[0] if link else "", mac=link.mac if link else "",
        )  # fmt: skip

    def _features(self) -> Features:
        """What the files in a guest with an agent say, too. Before there is a payload, time counts from the machine's start."""
        life = self._life
        machine, job = values(
            life.request, life.begun or life.outcome.started, self._parts.hs06_per_cpu, life.moved_deadline
        )
        return {"machinefeatures": machine, "jobfeatures": job}


def offer(life: Life, parts: Parts) -> None:
    """Let this machine's calls be answered, where it is one that is to have that."""
    if is_wanted(life.request, parts.context.metadata):
        life.answers = tuple((address, PORT) for address in ADDRESSES)
        life.answer = Answering(life, parts).answer


def is_wanted(request: Request, mode: MetadataMode) -> bool:
    """Does a machine have a metadata service?"""
    if request.machine.network is not NetworkMode.USER or mode is MetadataMode.OFF:
        return False
    work = request.work
    return mode is MetadataMode.ALWAYS or work.user_data is not None or isinstance(work, OwnWork)
