"""A pilot's machines, by belljar's own door. Each is tied to this process: it ends with it, however that ends.

The owner's key comes in, and the host's keys come out, by belljar's agent; so does ssh itself, to a server that is started for each
connection (`sshd -i`). A machine needs no network for it, and its first contact is known.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from belljar import api
from belljar.errors import BelljarError, ImageError, MachineBusy, UsageError
from belljar.guest import Sink, Source, Streams
from belljar.lease import LARGEST_CONSOLE, Cause, InstanceState, MachineOrder
from belljar.model import Account, NetworkMode, Outcome, OwnWork, Probe, Request, Sign
from belljar.model import Cause as Ended
from belljar.records import dataclass, replace

ROOT = Account("root", 0, 0, "root", home="/root")
PREPARING = 60.0  # seconds for keys
# Both are run by the guest's own shell as root. The first prints the host's public keys.
PREPARE = """\
umask 077; mkdir -p /root/.ssh /run/sshd; chmod 755 /run/sshd
touch /root/.ssh/authorized_keys; cat >> /root/.ssh/authorized_keys
[ -x /usr/bin/ssh-keygen ] && ssh-keygen -A >/dev/null 2>&1
cat /etc/ssh/ssh_host_*_key.pub 2>/dev/null; exit 0
"""
SERVE = "mkdir -p /run/sshd; for one in /usr/sbin/sshd /usr/bin/sshd; do [ -x $one ] && exec $one -i; done; exit 127"
CAUSES = {
    Ended.FINISHED: Cause.GUEST, Ended.GUEST_LOST: Cause.GUEST, Ended.GUEST_OOM: Cause.GUEST, Ended.BOOT_FAILED: Cause.BOOT,
    Ended.IMAGE_FAULT: Cause.STAGING, Ended.REFUSED: Cause.STAGING, Ended.NODE_FAULT: Cause.NODE_LOST,
    Ended.HOST_OOM: Cause.NODE_LOST, Ended.WALLTIME: Cause.EXPIRED, Ended.CANCELLED: Cause.NODE_LOST,
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What became of an instance."""

    instance: str
    state: InstanceState
    cause: Cause | None = None
    why: str = ""
    host_keys: tuple[str, ...] = ()
    console: bytes = b""


class Machines(Protocol):
    """Who makes them. All calls return at once, but `carry` and `gone`."""

    @property
    def living(self) -> frozenset[str]:
        """Instances that have not ended."""

    def start(self, instance: str, order: MachineOrder) -> None:
        """Starting what was started before is nothing."""

    def stop(self, instance: str, cause: Cause, why: str, grace: float) -> None: ...
    def kill(self, instance: str) -> None: ...
    def console(self, instance: str) -> bytes: ...
    async def carry(self, instance: str, source: Source, sink: Sink) -> None:
        """An owner's ssh, to its end. Raises BelljarError."""

    async def gone(self) -> None:
        """Returns when none lives."""


class OwnMachines:
    """*changed* hears of each change. *lease*: what they are for, in their records. *grace*: seconds for a guest to shut down."""

    def __init__(self, lease: str, grace: float, changed: Callable[[Change], None]) -> None:
        self._lease, self._grace, self._changed = lease, grace, changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._machines: dict[str, api.Machine] = {}
        self._stopped: dict[str, tuple[Cause, str]] = {}  # why each was told to end
        self._known, self._up = set[str](), set[str]()

    @property
    def living(self) -> frozenset[str]:
        return frozenset(self._tasks)

    def start(self, instance: str, order: MachineOrder) -> None:
        if instance not in self._known:
            self._known.add(instance)
            self._tasks[instance] = asyncio.ensure_future(self._live(instance, order))

    def stop(self, instance: str, cause: Cause, why: str, grace: float) -> None:
        if instance not in self._tasks or instance in self._stopped:
            return
        self._stopped[instance] = (cause, why)
        if instance in self._machines:
            self._changed(Change(instance, InstanceState.STOPPING, cause, why))
            if cause is Cause.PREEMPTED and instance in self._up:
                # Some batch systems tell every process of a job to end, and a keeper that is told twice waits no longer.
                self._over(instance)
            else:
                self._ask(instance, "stop", grace=grace)
        else:
            self._tasks[instance].cancel()

    def kill(self, instance: str) -> None:
        if instance in self._machines:
            self._ask(instance, "kill")
        elif instance in self._tasks:
            self._tasks[instance].cancel()

    def console(self, instance: str) -> bytes:
        """The last of it."""
        machine = self._machines.get(instance)
        if machine is None:
            return b""
        with suppress(OSError, BelljarError), open(machine.view.folder / "console.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LARGEST_CONSOLE))
            return file.read(LARGEST_CONSOLE)
        return b""

    async def carry(self, instance: str, source: Source, sink: Sink) -> None:
        machine = self._machines.get(instance)
        if machine is not None:
            await machine.acarry(("/bin/sh", "-c", SERVE), Streams(source, sink, None), ROOT)

    async def gone(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    # -- one machine ---------------------------------------------------------------------------------------------------

    async def _live(self, instance: str, order: MachineOrder) -> None:
        cause, why, console = Cause.INTERNAL, "", b""
        try:
            self._changed(Change(instance, InstanceState.STAGING))
            machine = self._machines[instance] = await api.astart(self._request(instance, order), tied=True)
            self._changed(Change(instance, InstanceState.BOOTING))
            ended = asyncio.ensure_future(machine.await_end())
            await _unless(self._run(instance, machine, order), ended)
            outcome = await ended
            cause, why = CAUSES.get(outcome.cause, Cause.INTERNAL), outcome.reason
            console = _kept_console(outcome)
        except (BelljarError, ValueError, OSError) as exc:
            cause = Cause.STAGING if isinstance(exc, (ImageError, UsageError, ValueError)) else Cause.NODE_LOST
            why = f"{type(exc).__name__}: {exc}"
        except asyncio.CancelledError:
            why = "it was told to end before it was claimed"
        finally:
            machine_ = self._machines.pop(instance, None)
            if machine_ is not None:
                machine_.release()
            self._tasks.pop(instance, None)
            cause, why = self._stopped.pop(instance, (cause, why))
            self._changed(Change(instance, InstanceState.TERMINATED, cause, why, console=console))

    async def _run(self, instance: str, machine: api.Machine, order: MachineOrder) -> None:
        """Until it can be used. One whose end comes first is none of this one's affair."""
        with suppress(MachineBusy):
            await machine.await_running()
            keys, why, printed = "".join(f"{key}\n" for key in order.keys).encode(), "", b""
            try:
                async with asyncio.timeout(PREPARING):
                    _, printed, _ = await machine.aexec(("/bin/sh", "-c", PREPARE), keys, ROOT)
            except (BelljarError, TimeoutError) as exc:
                why = f"its owner's key was not put into it: {exc or 'the guest does not answer'}"
            lines = printed.decode("ascii", "replace").splitlines()
            found = tuple(line for line in lines if line.startswith(("ssh-", "ecdsa-")))
            self._up.add(instance)
            self._changed(Change(instance, InstanceState.RUNNING, why=why, host_keys=found[:8]))

    def _request(self, instance: str, order: MachineOrder) -> Request:
        """Raises BelljarError."""
        mode, _, name = order.network.partition(":")
        labels = {"lease": self._lease, "instance": instance, "owner": order.owner}
        request = api.request_of(
            OwnWork(order.user_data or None, ready=Probe(Sign.AGENT), agent=True), image=order.image, cpus=order.cpus,
            memory=order.memory, disk=order.disk or None, network=NetworkMode(mode), network_name=name,
            name=order.hostname, grace=self._grace, requester=f"lease:{self._lease}", labels=labels,
        )  # fmt: skip
        return replace(request, is_allotted=True)

    def _over(self, instance: str) -> None:
        """Its time is over: its guest is asked to shut down, and has the request's grace."""
        try:
            self._machines[instance].stop_at(time.time())
        except (BelljarError, OSError):
            self._ask(instance, "stop")

    def _ask(self, instance: str, do: str, **facts: Any) -> None:
        """It may have ended meanwhile, or be too busy: then its tie ends it."""
        machine = self._machines[instance]
        try:
            machine.ask(do, **facts)
        except (BelljarError, OSError):
            machine.release()


async def _unless(work: Coroutine[Any, Any, None], ended: asyncio.Future[Any]) -> None:
    """The work, as far as that end lets it come."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _kept_console(outcome: Outcome) -> bytes:
    """Of a machine that has ended."""
    with suppress(OSError, BelljarError), open(api.logs() / outcome.id / "console.log", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LARGEST_CONSOLE))
        return file.read(LARGEST_CONSOLE)
    return b""
