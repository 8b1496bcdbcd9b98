"""A machine's network: joined before it starts, listened to while it lives; and the metadata service of a user network.

At 169.254.169.253, where Vac has them, it tells machine and job features and takes joboutputs, and nothing else: a machine may keep
its payloads' users from .254, where user data and credentials are. HTTP is imported with the first call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import cached_property, partial

from belljar.context import Features, Instance, MetadataMode, metadata_service
from belljar.hints import TYPE_CHECKING
from belljar.host.guard.traffic import Call, Refusal
from belljar.hypervisor import guest_uuid
from belljar.machine import BASE_URL, CREDENTIALS, JOBOUTPUTS
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras.features import before_2016, values
from belljar.machine.life.life import Lifecycle
from belljar.machine.services import Rules
from belljar.model import MIB, MachineSpec, NetworkMode, OwnWork, Request
from belljar.network import Joined, Networks, plan
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.context import Service

PORT = 80
ADDRESSES = ("169.254.169.254", "169.254.169.253")
Answer = Callable[[Call], Awaitable[None]]


class Network(Extra):
    """The network that *machine* asks for."""

    def __init__(self, networks: Networks, machine: MachineSpec) -> None:
        self._networks, self._machine = networks, machine
        self._joined: Joined | None = None

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        machine, account = self._machine, life.request.work.account
        self._joined = joined = await self._networks.join(
            machine.network, machine.network_name, life.request.id,
            uid=os.geteuid() if account is None else account.uid, intend=life.record.intend,
            answers=there.answers, allow=machine.allow, secret=tuple(host for secret in machine.secrets for host in secret.hosts),
        )  # fmt: skip
        link = joined.link
        if link.egress is not None and link.egress.ports:
            from belljar.host.guard.proxy import Proxy

            proxy = Proxy(link.egress, partial(tell_refusal, life), there.vault)
            usual = dict.fromkeys(there.answers, there.answer or proxy.answer)
            there = replace(there, answer=lambda call: usual.get((call.address, call.port), proxy.answer)(call))
        if machine.network is not NetworkMode.USER:
            life.record.write("network", mode=link.mode, name=machine.network_name, mac=link.mac, address=link.address)
        life.point("after-network")
        return replace(there, joined=joined)

    def release(self) -> None:
        if self._joined is not None:
            self._joined.close()


class MetadataService(Extra):
    """Answers for one machine."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        self._life = life
        return replace(there, answers=tuple((address, PORT) for address in ADDRESSES), answer=self.answer)

    async def answer(self, call: Call) -> None:
        """One connection, to its end."""
        await self._service.serve(call.connection, for_everybody=call.address != ADDRESSES[0])

    @cached_property
    def _service(self) -> Service:
        request = self._life.request
        link = plan(request.machine.network, request.id)
        instance = Instance(
            uuid=guest_uuid(request.id), hostname=f"belljar-{request.id}", user_data=request.work.user_data,
            machinetype=request.name or request.machine.image, zone=os.uname().nodename,
            size=f"{request.machine.cpus}-{request.machine.memory // MIB}", base_url=BASE_URL,
            address=link.address.partition("/")[0], mac=link.mac, told=request.work.told if isinstance(request.work, OwnWork) else (),
        )  # fmt: skip
        outputs, credentials = self._life.folder / JOBOUTPUTS, self._life.folder / CREDENTIALS
        return metadata_service(instance, self._features, outputs, credentials, self._rules.context)

    def _features(self) -> Features:
        """What the files in a guest with an agent say, and the older names. Before there is a payload, time counts from the machine's start."""
        life = self._life
        began, hs06 = life.time_began or life.outcome.started, self._rules.hs06_per_cpu
        machine, job = before_2016(*values(life.request, began, hs06, life.deadline.moved_to))
        return {"machinefeatures": machine, "jobfeatures": job}


def has_metadata(request: Request, mode: MetadataMode) -> bool:
    """Does a machine have a metadata service?"""
    if request.machine.network is not NetworkMode.USER or mode is MetadataMode.OFF:
        return False
    work = request.work
    return mode is MetadataMode.ALWAYS or work.user_data is not None or isinstance(work, OwnWork)


async def listen(traffic: AsyncIterator[Call | Refusal], life: Lifecycle, answer: Answer | None) -> None:
    """Hear a guard of a user network until there is no more: refusals go into the journal, calls to who answers them."""
    async with asyncio.TaskGroup() as answering:
        async for item in traffic:
            if isinstance(item, Refusal):
                tell_refusal(life, item)
            elif answer is None:
                item.connection.close()
            else:
                answering.create_task(_answered(item, answer))


def tell_refusal(life: Lifecycle, item: Refusal) -> None:
    place = {"address": item.address, "port": item.port, "transport": item.transport}
    life.record.tell("network-refused", **place, reason=item.reason, count=item.count)


async def _answered(call: Call, answer: Answer) -> None:
    """A guest's connection in the hands of who answers it; closed whatever comes of that."""
    with call.connection, suppress(OSError):
        await answer(call)
