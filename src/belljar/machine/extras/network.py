"""A machine's network: joined before it starts, listened to while it lives. Imported by machines that have one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from belljar.host.traffic import Call, Refusal
from belljar.machine.life.life import Life
from belljar.model import FileServer, NetworkMode
from belljar.network import Joined, Networks, plan

LOOPBACK = "127.0.0.1"  # of the host; a guest calls it by the address of its gateway


async def join(networks: Networks, life: Life, servers: Iterable[FileServer]) -> Joined:
    """The network that was asked for. The servers of the machine's own shares may be reached whatever is blocked."""
    machine, account = life.request.machine, life.request.work.account
    gateway = plan(machine.network, life.request.id).gateway
    joined = await networks.join(
        machine.network, machine.network_name, life.request.id,
        uid=os.geteuid() if account is None else account.uid, intend=life.record.intend,
        grants=[(LOOPBACK if one.address == gateway else one.address, one.port) for one in servers],
        answers=life.answers,
    )  # fmt: skip
    life.joined = joined
    link = joined.link
    if machine.network is not NetworkMode.USER:
        life.record.write("network", mode=link.mode, name=machine.network_name, mac=link.mac, address=link.address)
    return joined


async def listen(traffic: AsyncIterator[Call | Refusal], life: Life) -> None:
    """Hear a guard of a user network until there is no more: refusals go into the journal, calls to who answers them."""
    answering: set[asyncio.Task[None]] = set()
    try:
        async for item in traffic:
            if isinstance(item, Refusal):
                _tell(item, life)
            elif life.answer is None:
                item.connection.close()
            else:
                task = asyncio.ensure_future(_answer(item, life))
                answering.add(task)
                task.add_done_callback(answering.discard)
    finally:
        for task in answering:
            task.cancel()


def _tell(item: Refusal, life: Life) -> None:
    life.record.tell(
        "network-refused", address=item.address, port=item.port, transport=item.transport, reason=item.reason,
        count=item.count,
    )  # fmt: skip


async def _answer(call: Call, life: Life) -> None:
    """A guest's connection in the hands of who answers it; closed whatever comes of that."""
    assert life.answer is not None
    with call.connection, suppress(OSError):
        await life.answer(call)
