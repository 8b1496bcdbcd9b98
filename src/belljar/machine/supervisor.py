"""Carries one Request to one Outcome, inside the job, as its user; the domain is its child (life/runner.py).

Nothing of a machine outlives `keep`. If the supervisor is killed the domain dies with it, and cleaning/reaper.py does
the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from belljar.errors import BelljarError
from belljar.guest import Streams
from belljar.host.threads import in_thread, to_its_end
from belljar.hypervisor import Template
from belljar.machine.cleaning import put_away
from belljar.machine.cleaning.reaper import prune
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.claim import claim, holding, reserve
from belljar.machine.life.runner import Runner
from belljar.machine.orders import Ended, Orders, unless_cancelled
from belljar.machine.planning.boot_plan import Planner
from belljar.machine.planning.placement import pinned
from belljar.machine.planning.refusal import checked_image
from belljar.machine.services import Services
from belljar.model import Cause, Outcome, Request, State


class Supervisor:
    """One supervisor keeps one machine at a time; `keep` may be called again for the next."""

    def __init__(self, services: Services) -> None:
        self.services = services

    async def keep(
        self, request: Request, streams: Streams, orders: Orders, extras: Sequence[Extra] = (), *,
        claimed: Callable[[], None] | None = None,
    ) -> Outcome:  # fmt: skip
        """Make the machine, run the payload, leave nothing behind. Errors are in the outcome; only a machine that could
        not be claimed raises. *extras*: beside what is asked for; *claimed* is called when it has its folder and
        room."""
        services, rules = self.services, self.services.rules
        life = claim(request, services.folders, services.point)
        runner = Runner(life, orders, services, self.keep, extras)
        try:
            choose = partial(pinned, can_pin=services.hypervisor.can_pin)
            life.place(await reserve(request, services.folders, rules.host, choose))
            await runner.publish()
            if claimed is not None:
                claimed()
            await runner.run(streams)
        except BaseException as error:  # re-raised: a cancel, and a defect that is not in the outcome
            life.explain(error)
            is_explained = isinstance(error, (Ended, BelljarError, OSError))
            if not (is_explained or (life.is_settled and isinstance(error, Exception))):
                raise
        finally:
            leaving = asyncio.ensure_future(runner.leave())
            pruning = asyncio.ensure_future(in_thread(lambda: prune(services.folders, rules.machine, time.time())))
            await to_its_end(leaving)  # QEMU ends beside it
        with suppress(Ended, OSError):  # old records may wait
            await unless_cancelled(pruning, orders)
        return life.outcome

    async def make_template(self, request: Request, *, exact: bool = False, streams: Streams | None = None) -> Template:
        """The template a request would be cloned from, or one of its *exact* size; made if missing. *streams*: of what prepares a
        warm image. Raises why not."""
        services = self.services
        life = claim(request, services.folders, services.point)
        try:
            await reserve(request, services.folders, services.rules.host)
            life.enter(State.PREPARING)
            image = checked_image(request, services)
            async with holding(services.images, image, request.id):
                planner = Planner(services, self.keep, life, image, Equipment())
                planner.streams = streams
                template = await planner.template(exact=exact)
            life.expect(Cause.FINISHED, f"template {template.key[:12]} is there")
            return template
        except BaseException as error:  # re-raised: the record tells of a cancel and of a defect, too
            life.explain(error)
            raise
        finally:
            life.leave_towards(State.CLEANING)
            put_away.put_away(life, services.overlays)
