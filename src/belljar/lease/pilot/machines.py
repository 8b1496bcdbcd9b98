"""A pilot's machines, by belljar's own door. Each is tied to this process: it ends with it, however that ends.

The owner's key comes in, and the host's keys come out, by belljar's agent; so does ssh itself, to a server that is started for each
connection (`sshd -i`). A machine needs no network for it, and its first contact is known."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from belljar import api
from belljar.errors import BelljarError, ImageError, UsageError
from belljar.guest import Sink, Source, Streams
from belljar.lease import LARGEST_CONSOLE, Cause, InstanceState, MachineOrder
from belljar.model import Account, NetworkMode, OwnWork, Probe, Request, Sign
from belljar.model import Cause as Ended
from belljar.records import replace

ROOT = Account("root", 0, 0, "root", home="/root")
PREPARING, PRINTED = 60.0, 1 << 16  # seconds for keys; bytes that are heard of what a guest says
GUEST = Path(__file__).with_name("guest.sh").read_text()
CAUSES = {
    Ended.FINISHED: Cause.GUEST, Ended.GUEST_LOST: Cause.GUEST, Ended.GUEST_OOM: Cause.GUEST, Ended.BOOT_FAILED: Cause.BOOT,
    Ended.IMAGE_FAULT: Cause.STAGING, Ended.REFUSED: Cause.STAGING, Ended.NODE_FAULT: Cause.NODE_LOST,
    Ended.HOST_OOM: Cause.NODE_LOST, Ended.WALLTIME: Cause.EXPIRED, Ended.CANCELLED: Cause.NODE_LOST,
    Ended.CHECKPOINTED: Cause.NODE_LOST,
}  # fmt: skip
Changed = Callable[..., None]  # what became of an instance: its id, its state, and more of it as a `Report` has that


class Machines:
    """*changed* is called at each change. *lease*: what they are for, in their records. *grace*: seconds for a guest to shut down. All
    calls return at once, but `tell_guest` and `carry`."""

    expect, expect_none = staticmethod(api.expect), staticmethod(api.expect_none)

    def __init__(self, lease: str, grace: float, changed: Changed) -> None:
        self._lease, self._grace, self._changed = lease, grace, changed
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._machines: dict[str, api.Machine] = {}
        self._stopped: dict[str, tuple[Cause, str]] = {}  # why each was told to end
        self._up = set[str]()

    @property
    def living(self) -> frozenset[str]:
        """Instances that have not ended."""
        return frozenset(self._tasks)

    def start(self, instance: str, order: MachineOrder) -> None:
        """Once in its life."""
        self._tasks[instance] = asyncio.ensure_future(self._live(instance, order))

    def stop(self, instance: str, cause: Cause, why: str, grace: float) -> None:
        if instance not in self._tasks or instance in self._stopped:
            return
        self._stopped[instance] = (cause, why)
        if instance in self._machines:
            self._changed(instance, InstanceState.STOPPING, cause=cause, why=why)
            # Some batch systems tell every process of a job to end, and a keeper that is told twice waits no longer.
            is_told = cause is Cause.PREEMPTED and instance in self._up
            stop = lambda machine: machine.stop_at(time.time()) if is_told else machine.ask("stop", grace=grace)  # noqa: E731
            self._ask(instance, stop)
        else:
            self._tasks[instance].cancel()

    def kill(self, instance: str) -> None:
        if instance in self._machines:
            self._ask(instance, lambda machine: machine.ask("kill"))
        elif instance in self._tasks:
            self._tasks[instance].cancel()

    def console(self, instance: str) -> bytes:
        """The last of it."""
        return _console(lambda: self._machines[instance].view.folder)

    async def tell_guest(self, instance: str, word: str, stdin: bytes = b"") -> None:
        """One of guest.sh, where it is up. Raises BelljarError, TimeoutError."""
        if instance in self._machines and instance in self._up:
            async with asyncio.timeout(PREPARING):
                await self._machines[instance].aexec(_shell(word), stdin, ROOT, PRINTED)

    async def carry(self, instance: str, source: Source, sink: Sink, command: str) -> None:
        """An owner's ssh, or a command of its shell, to its end. Raises BelljarError."""
        if instance in self._machines:
            words = ("/bin/sh", "-c", command) if command else _shell("serve")
            await self._machines[instance].acarry(words, Streams(source, sink, None), ROOT)

    # -- one machine ---------------------------------------------------------------------------------------------------

    async def _live(self, instance: str, order: MachineOrder) -> None:
        cause, why, console = Cause.INTERNAL, "", b""
        try:
            self._changed(instance, InstanceState.STAGING)
            machine = self._machines[instance] = await api.astart(self._request(instance, order), tied=True)
            self._changed(instance, InstanceState.BOOTING)
            running = asyncio.ensure_future(self._run(instance, machine, order))
            try:
                outcome = await machine.await_end()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            cause, why = CAUSES.get(outcome.cause, Cause.INTERNAL), outcome.reason
            console = _console(lambda: api.logs() / outcome.id)
        except Exception as exc:  # a mistake of ours is told with its words, too
            known = {Cause.STAGING: (ImageError, UsageError, ValueError), Cause.NODE_LOST: (BelljarError, OSError)}
            cause = next((cause for cause, kinds in known.items() if isinstance(exc, kinds)), Cause.INTERNAL)
            why = f"{type(exc).__name__}: {exc}"
        except asyncio.CancelledError:
            why = "it was told to end before it was claimed"
        finally:
            if instance in self._machines:
                self._machines.pop(instance).release()
            self._tasks.pop(instance, None)
            cause, why = self._stopped.pop(instance, (cause, why))
            self._changed(instance, InstanceState.TERMINATED, cause=cause, why=why, console=console)

    async def _run(self, instance: str, machine: api.Machine, order: MachineOrder) -> None:
        """Until it can be used, and on: its guest may reboot. What goes wrong on the way is told by its end."""
        await machine.await_running()
        keys, why, printed = "".join(f"{key}\n" for key in order.keys).encode(), "", b""
        try:
            async with asyncio.timeout(PREPARING):
                hosts = "\n".join(f"{address} {name}" for name, address in order.hosts)
                _, printed, _ = await machine.aexec(_shell("prepare", order.name, hosts), keys, ROOT, PRINTED)
                if order.user_data.startswith(b"#!"):
                    await machine.aexec(_shell("begin"), order.user_data, ROOT, PRINTED)
        except (BelljarError, TimeoutError) as exc:
            why = f"its owner's key or user data did not come into it: {str(exc) or 'the guest does not answer'}"
        if why and instance in self._stopped:
            return  # told to end before it could be used: it never was
        lines = printed.decode("ascii", "replace").splitlines()
        host_keys = tuple(line for line in lines if line.startswith(("ssh-", "ecdsa-")))
        self._up.add(instance)
        self._changed(instance, InstanceState.RUNNING, why=why, host_keys=host_keys[:8])
        async for _ in machine.reboots():
            self._changed(instance, InstanceState.RUNNING, rebooted=True)

    def _request(self, instance: str, order: MachineOrder) -> Request:
        """Raises BelljarError."""
        mode, _, name = order.network.partition(":")
        labels = {"lease": self._lease, "instance": instance, "owner": order.owner}
        request = api.request_of(
            OwnWork(order.user_data or None, ready=Probe(Sign.AGENT), agent=True, reboots=True, told=order.told), image=order.image,
            cpus=order.cpus, memory=order.memory, disk=order.disk or None, network=NetworkMode(mode), network_name=name,
            name=order.hostname, grace=self._grace, requester=f"lease:{self._lease}", labels=labels,
        )  # fmt: skip
        return replace(request, is_allotted=True)

    def _ask(self, instance: str, what: Callable[[api.Machine], object]) -> None:
        """It may have ended meanwhile, or be too busy: then its tie ends it."""
        machine = self._machines[instance]
        try:
            what(machine)
        except (BelljarError, OSError):
            machine.release()


def _shell(word: str, *words: str) -> tuple[str, ...]:
    return ("/bin/sh", "-c", f'{GUEST}{word} "$@"', "sh", *words)


def _console(folder: Callable[[], Path]) -> bytes:
    with suppress(OSError, BelljarError, KeyError), open(folder() / "console.log", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LARGEST_CONSOLE))
        return file.read(LARGEST_CONSOLE)
    return b""
