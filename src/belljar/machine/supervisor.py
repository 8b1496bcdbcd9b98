"""Carries one Request to one Outcome. The life a machine follows is in states.py, how it is lived in keeping.py.

The supervisor runs inside the job, as its user; the domain is its child. Nothing of a machine outlives `keep`, and when
the supervisor itself is killed the domain dies with it and recover.py undoes the rest from the journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from belljar.errors import BelljarError, HostError
from belljar.guest import Streams
from belljar.hypervisor import Template
from belljar.machine import fates
from belljar.machine.keeping import Keeping
from belljar.machine.life import Life, claim
from belljar.machine.orders import Ended, Orders
from belljar.machine.parts import Parts
from belljar.machine.recover import prune
from belljar.model import Cause, Outcome, Request, State


class Supervisor:
    """One supervisor keeps one machine at a time; `keep` may be called again for the next."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def keep(
        self, request: Request, streams: Streams, orders: Orders, equip: Callable[[Life], None] | None = None
    ) -> Outcome:
        """Make the machine, run the payload, leave nothing behind. What goes wrong is in the outcome; only a machine
        that could not even be claimed (no folder, no space) raises. *equip* may add disks to the machine's life."""
        parts = self._parts
        life = claim(request, parts.folders, parts.point)
        keeping = Keeping(life, orders, parts)
        try:
            if equip is not None:
                equip(life)
            await keeping.live(streams)
        except Ended as ended:
            life.end(ended)
        except BelljarError as error:
            life.fail(error)
        except OSError as error:
            life.fail(HostError(f"{error.filename}: {error.strerror}" if error.filename else str(error)))
        finally:
            await asyncio.shield(keeping.leave())
        with suppress(OSError):  # old records may wait
            prune(parts.folders, days=parts.settings.keep_days, count=parts.settings.keep_count, now=time.time())
        return life.outcome

    async def cast(self, request: Request) -> Template:
        """The template a request would be cloned from, made now where there is none. Raises why it cannot be had."""
        parts = self._parts
        life = claim(request, parts.folders, parts.point)
        try:
            life.enter(State.PREPARING)
            image = parts.planner.image(request)
            with parts.images.hold(image, request.id):
                template = await parts.planner.template(life, image)
            life.expect(Cause.FINISHED, f"template {template.key[:12]} is there")
            return template
        except BelljarError as error:
            life.fail(error)
            raise
        finally:
            life.leave_towards(State.CLEANING)
            fates.put_away(life, parts.overlays, (0.0, 0.0, 0))
