"""Carries out the recipe of a warm image, in the guest whose memory becomes its template."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from belljar.errors import BelljarError, GuestError, HypervisorError, InputMissing, PrepareFailed, printable
from belljar.guest import BytesSink, ExitStatus, Guest, Streams
from belljar.host.guard.traffic import Call, Refusal
from belljar.hypervisor import DomainSpec, Nic
from belljar.image import Image, Recipe, unpacked
from belljar.machine.cleaning.put_away import deadline
from belljar.machine.extras import Equipment
from belljar.machine.extras.network import Network, listen
from belljar.machine.life.identity import new_identity
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import unless_ended
from belljar.machine.services import Services
from belljar.network import plan
from belljar.records import replace

Hear = Callable[[AsyncIterator[Call | Refusal]], Coroutine[Any, Any, None]]
HEARD, LONGEST_LINE = 1 << 16, 200  # bytes of its output that are looked at, and of its last line
HELD = "held"  # the agent's word for a preparation of which a program waits for its job


async def connected(
    services: Services, life: Lifecycle, spec: DomainSpec, recipe: Recipe
) -> tuple[DomainSpec, Hear | None]:
    """The same template, in the recipe's network by the rules of this host, and what hears its guard, if it has one. Raises
    NetworkFailed, BadOption, BadSetting."""
    assert services.networks is not None
    asked = replace(life.request.machine, network=recipe.network, network_name="", allow=recipe.allow, secrets=())
    there = await Network(services.networks, asked).prepare(life, Equipment())
    assert there.joined is not None
    link = there.joined.link
    hear = None if link.egress is None else partial(listen, life=life, answer=there.answer)
    return replace(spec, uplink=Nic(link.mode, link.mac, link.egress)), hear


async def prepare(guest: Guest, image: Image, streams: Streams | None, fate: asyncio.Future[BelljarError]) -> None:
    """Run it to its end, or until one of its programs waits to be handed a job. *streams*: where its output goes; without any its
    last line is in the error. Raises PrepareFailed."""
    recipe, heard = image.recipe, BytesSink(HEARD)
    assert recipe is not None
    try:
        async with deadline(recipe.timeout, "it to end (`belljar image warm --time`)"):
            work = _run(guest, image, recipe, streams or Streams(None, heard, heard))
            status = await unless_ended(work, fate)
        if status.error == HELD or status.exit_code == 0:
            return
        line = printable(heard.data.decode(errors="replace").strip().rpartition("\n")[2][-LONGEST_LINE:])
        problem = f"{status.words}: {line}" if line else status.words
    except (HypervisorError, GuestError, InputMissing) as error:
        problem = "powered the guest off, or crashed it" if fate.done() else f"failed: {error.message}"
    name = f"image {image.called}: " if image.names else ""  # it has none before its first preparation
    raise PrepareFailed(f"{name}the command that prepares it {problem}")


async def _run(guest: Guest, image: Image, recipe: Recipe, streams: Streams) -> ExitStatus:
    payload, id = recipe.payload, os.urandom(6).hex()
    await guest.identify(new_identity(id, plan(recipe.network, id)))
    await guest.add_account(payload.account)
    with unpacked(image) as folder:
        for item in payload.inputs:
            await guest.put(replace(item, outside=str(folder / item.outside)), payload.account, payload.cwd)
    process = await guest.start(replace(payload, inputs=()), streams)
    return await process.wait()
