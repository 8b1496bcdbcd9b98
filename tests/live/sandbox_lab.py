"""Programs that use sandboxes, run by tests in a process of their own. Each prints what it saw."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from contextlib import suppress

from belljar import api
from belljar.adapters.sandbox import InfrastructureFailure, Sandbox, TaskFailure, Unfit

SERVER = 'mkfifo /tmp/ask /tmp/answer; (read line </tmp/ask; echo "got $line" >/tmp/answer) & echo started'
LONGEST = 100


async def life() -> None:
    """Commands, what they leave behind, time limits, and an end that is the task's own."""
    sandbox = await Sandbox.create("debian12", env={"A": "1"}, cwd="/srv", within=LONGEST)
    print(await sandbox.exec(["sh", "-c", "echo $A $B; pwd; id -un; exit 7"], env={"B": "2"}))
    print(await sandbox.exec(["sh", "-c", SERVER]))
    print(await sandbox.exec(["sh", "-c", "echo hello >/tmp/ask; cat /tmp/answer"], timeout=LONGEST))
    try:
        await sandbox.exec(["sh", "-c", "echo so far; sleep 1000 & sleep 1000"], timeout=2)
    except api.TimedOut as late:
        print(late.stdout, late)
    print(await sandbox.exec(["pkill", "sleep"]), (await sandbox.exec(["id", "-un"], user=65534))[1])
    print(await sandbox.exec(["no-such-program"]))
    try:
        await sandbox.exec(["sh", "-c", "echo o >/proc/sysrq-trigger; sleep 100"], timeout=LONGEST)
    except (TaskFailure, InfrastructureFailure) as exc:
        print(type(exc).__name__)
    await sandbox.close()


async def container() -> None:
    """An image of a registry's kind, with nothing but busybox: its variables, its folder, its users, its own command."""
    image = sys.argv[2]
    sandbox = await Sandbox.create(image, env={"A": "1"}, within=LONGEST)
    print(await sandbox.exec(["sh", "-c", "echo $FROM_IMAGE $A; pwd; id -u"]))
    print(await sandbox.exec(["sh", "-c", "pwd; id -u"], cwd="/tmp", user="worker"))
    await sandbox.put("/etc/services", "/new/folder/services")
    print((await sandbox.exec(["cmp", "/new/folder/services", "/dev/null"]))[0])
    await sandbox.close()
    machine = await api.abegin([], image=image)
    print(machine.view.payload["argv"])
    await machine.aleave()


async def lost() -> None:
    """QEMU is killed by somebody on the host."""
    sandbox = await Sandbox.create("debian12", within=LONGEST)
    pid = sandbox.machine.view.pid
    running = asyncio.ensure_future(sandbox.exec(["sleep", "1000"]))
    await sandbox.exec(["true"])
    assert pid
    os.kill(pid, signal.SIGKILL)
    try:
        await running
    except (TaskFailure, InfrastructureFailure) as exc:
        print(type(exc).__name__)
    try:
        await Sandbox.create("oci:/no/such/folder", within=LONGEST)
    except (Unfit, InfrastructureFailure) as exc:
        print(type(exc).__name__)


async def cancelled(times: int, longest: float) -> None:
    """At moments that nobody chose; the seed is told where it matters."""
    seed = time.time_ns()
    chance = random.Random(seed)
    for number in range(times):

        async def use() -> None:
            sandbox = await Sandbox.create("debian12", within=LONGEST)
            try:
                await sandbox.exec(["sh", "-c", "echo up; sleep 0.2"])
                await sandbox.put("/etc/services", "/tmp/services")
                await sandbox.get("/tmp/services", "/dev/shm/services-of-a-test")
            finally:
                await sandbox.close()

        using = asyncio.ensure_future(use())
        await asyncio.wait({using}, timeout=chance.uniform(0, longest))
        using.cancel()
        await asyncio.sleep(chance.choice((0, 0.05)))
        using.cancel()
        with suppress(asyncio.CancelledError):
            await using
        left = api.machines()
        assert not left, f"round {number}, seed {seed}: {left}"
    print("nothing left")


if __name__ == "__main__":
    programs = {"life": life, "lost": lost, "container": container, "cancelled": lambda: cancelled(12, 1.2)}
    asyncio.run(programs[sys.argv[1]]())
