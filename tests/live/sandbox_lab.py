"""Programs that use sandboxes, run by tests in a process of their own. Each prints what it saw."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

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


async def whole_life(folder: str, reached: Callable[[str], None]) -> None:
    reached("create")
    sandbox = await Sandbox.create("debian12", within=LONGEST)
    try:
        reached("exec")
        await sandbox.exec(["sh", "-c", "echo up; sleep 0.2"])
        reached("put")
        await sandbox.put("/etc/services", "/tmp/services")
        reached("get")
        await sandbox.get("/tmp/services", f"{folder}/services")
    finally:
        reached("close")
        await sandbox.close()


def set_at(step: str, there: asyncio.Event, reached: str) -> None:
    if reached == step:
        there.set()


async def cancelled(times: int) -> None:
    """At moments that a seed draws, of each step in turn, once or twice; as long as the step lasts without a cancel."""
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns()
    chance, begun = random.Random(seed), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        await whole_life(folder, lambda step: begun.update({step: time.perf_counter()}))
        ends = [*list(begun.values())[1:], time.perf_counter()]
        lasted = {step: end - begin for (step, begin), end in zip(begun.items(), ends, strict=True)}
        for number in range(times):
            step, there = list(lasted)[number % len(lasted)], asyncio.Event()
            using = asyncio.ensure_future(whole_life(folder, partial(set_at, step, there)))
            await there.wait()
            await asyncio.wait({using}, timeout=chance.uniform(0, lasted[step]))
            using.cancel()
            await asyncio.sleep(chance.choice((0, 0.05)))
            using.cancel()
            with suppress(asyncio.CancelledError):
                await using
            left = [*api.machines(), *set(os.listdir(folder)) - {"services"}]
            assert not left, f"round {number}, in {step}, seed {seed}: {left}"
    print("nothing left")


if __name__ == "__main__":
    programs = {"life": life, "lost": lost, "container": container, "cancelled": lambda: cancelled(20)}
    asyncio.run(programs[sys.argv[1]]())
