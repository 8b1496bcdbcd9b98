"""Leases beside the workspace pilot's published figures (Freeman and Keahey, Euro-Par 2008), part by part, in one run.

channel    the real service, its records on a real disk, the real channel; pilots that are simulated in another process, and a batch system
           that is played: N = 1 .. 16, 256 and 1 000 of them. A hello goes over a connection that is there, and its time is over when its
           answer has come, of what is on disk; `connect` is TCP, TLS and both openings. Beside both stands what they take where nothing
           is behind TLS. The service and all its pilots share this host: with others' work on it, --first shows what is theirs
requests   RunInstances while the batch system does not answer; DescribeInstances of 1 000; memory of an idle pilot
node       one real pilot with real guests: reserve, start, restore, kill-all with one machine and with eight. 64 orders: guests that are
           clones of a template, one after the other, each ended before the next. On 64 nodes they would be at once; what it takes to
           tell so many pilots is `fan-out` of the channel
slurm      N = 1 .. 16 leases' nodes of a private Slurm on this host, with real pilots and guests (--part slurm)

The figures of the talk are of its own hardware, ours of this host: what counts is the shape over N, and the order of magnitude.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from common import ROOT, fresh_node, parser, progress, publish, table
from crowd import bare, crowd, spread

sys.path.insert(0, str(ROOT))
from tests.batch.lab.lease import IMAGE, LeaseSite
from tests.stories.lease.house import Running, job_for
from tests.stories.lease.house import Service as Heard
from tests.stories.lease.test_service import OWNER, House
from tests.unit.lease.ec2.clients import client, served
from tests.unit.lease.ec2.house import KEY, SITE_KEY

from belljar.cli.host.reap import MARK
from belljar.errors import CommandFailed
from belljar.host.processes import start_time, with_option
from belljar.lease import AccessKey, InstanceState, LeaseState, Size
from belljar.lease.ec2.front import Front
from belljar.lease.ec2.office import Office, image_id
from belljar.lease.orders import Do, MachineOrder, Order
from belljar.lease.pilot.machines import Machines
from belljar.lease.pilot.start import granted
from belljar.model import dumps

COUNTS = (1, 2, 4, 8, 16, 256, 1000)
NODES = (1, 2, 4, 8, 16)
ROW = 64
LOOK = 0.1  # seconds from a pilot's hello to its order: so many at once connect, say hello and are ordered in 0.13
# Milliseconds, of the talk's tables; lease.md 10.6 set the gates.
TALK = {"reserve": 743.6, "restore": 1317.2, "kill-all": 2336.3}
I = InstanceState  # noqa: E741
Row = dict[str, float]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--part", action="append", choices=("channel", "requests", "node", "slurm"))
    arguments.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    arguments.add_argument("--rounds", type=int, default=5, help="of each N up to 256 (default: %(default)s)")
    arguments.add_argument(
        "--first", action="store_true", help="hellos and orders: before all else on this host, as root may"
    )
    arguments.add_argument(
        "--folder", type=Path, help="where the service has its records (default: a new one in /var/tmp)"
    )
    args = arguments.parse_args()
    figures: dict[str, Any] = {"benchmark": "lease"}
    gates: list[tuple[object, ...]] = []
    with tempfile.TemporaryDirectory(prefix="belljar-bench-", dir=args.folder or "/var/tmp") as name:
        folder = Path(name)
        for part in args.part or ("channel", "requests", "node"):
            PARTS[part](args, folder, figures, gates)
    table(("what", "figure", "gate or talk", "times better"), gates)
    publish(args, figures)


def rank(priority: int) -> None:
    """Before all else on this host; 0: as others are."""
    os.sched_setscheduler(0, os.SCHED_RR if priority else os.SCHED_OTHER, os.sched_param(priority))


def gate(gates: list[tuple[object, ...]], what: str, found: float, limit: float, *, unit: str = "ms") -> None:
    """*limit*: the figure to be under."""
    gates.append((what, f"{found:.1f} {unit}", f"{limit:g} {unit}", round(limit / found, 1) if found else "-"))


# -- channel -----------------------------------------------------------------------------------------------------------


def channel(args: argparse.Namespace, folder: Path, figures: dict[str, Any], gates: list[tuple[object, ...]]) -> None:
    found: dict[int, dict[str, float]] = {}
    rank(1 if args.first else 0)  # and so of the simulated pilots
    for count in args.counts:
        rounds = []
        for number in range(args.rounds if count <= 256 else 1):
            progress(f"channel: {count} pilots, round {number + 1}")
            place = folder / f"{count}.{number}"
            place.mkdir()
            rounds.append(asyncio.run(a_lease(place, count)))
        found[count] = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        # Later ones use what the first has left.
        found[count]["KiB a pilot"] = max(one["KiB a pilot"] for one in rounds)
    progress("")
    rank(0)
    names = list(next(iter(found.values())))
    table(("ms, by pilots", *map(str, found)), [(name, *(found[count][name] for count in found)) for name in names])
    figures["channel"] = found
    if 256 in found:
        floor = found[256]["hello p99, bare TLS"]
        gate(gates, f"256 hellos at once, p99 (with nothing behind TLS: {floor:.0f} ms)", found[256]["hello p99"], 100)
    if 16 in found:
        gate(gates, "claim of 16, TLS included, p99", found[16]["connect p99"] + found[16]["hello p99"], 150)
        gate(gates, "an order on 16 sockets (the talk: one ssh each)", found[16]["fan-out"], 2144)
    if 1000 in found:
        gate(gates, "service's memory, an idle pilot of 1 000", found[1000]["KiB a pilot"], 100, unit="KiB")


async def a_lease(folder: Path, count: int) -> dict[str, float]:
    """Of *count* machines, from its request to its end."""
    async with service(folder) as house:
        asked = time.monotonic()
        id = house.ask(count)
        await house.until_state(id, LeaseState.QUEUED)
        queued = time.monotonic()
        async with crowd(folder / f"jobs/belljar-{id}-1", count) as pilots:
            house.slurm.jobs["1"][1] = "RUNNING"
            before = resident()
            connect = await pilots.all("connect")
            hello = await pilots.all("hello")
            memory = resident() - before
            ordered = await pilots.all("ordered")
            run = await pilots.all("run")
            beat = await pilots.all("heartbeat")
            told = asyncio.ensure_future(pilots.all("pinged"))
            await asyncio.sleep(0.5)
            order = time.monotonic()
            for slot in house.daemon.channel.connected:
                house.daemon.channel.order(slot, Order(Do.PING))
            fan_out = 1000 * ((await told)["until"] - order)
            begin = time.monotonic()
            house.desk.release(OWNER, id)
            house.daemon.wake()
            stopped = await pilots.all("stopped")
            end = await pilots.all("leave")
        await house.until_state(id, LeaseState.RELEASED)
        over = time.monotonic()
    bare_connect, bare_hello = await bare(folder, count)
    return {
        "submit": 1000 * (queued - asked), "connect p99": connect["p99"], "connect p99, bare TLS": bare_connect["p99"],
        "hello p50": hello["p50"], "hello p99": hello["p99"], "hello p99, bare TLS": bare_hello["p99"],
        "last hello to last order": 1000 * (ordered["until"] - hello["until"]), "three reports p99": run["p99"],
        "heartbeat p50": beat["p50"], "heartbeat p99": beat["p99"], "fan-out": fan_out,
        "release to last stop": 1000 * (stopped["until"] - begin), "two reports p99": end["p99"],
        "end to lease's end": 1000 * (over - end["until"]), "KiB a pilot": memory / count,
    }  # fmt: skip


@asynccontextmanager
async def service(folder: Path, **settings: Any) -> AsyncIterator[House]:
    """In this process, with the settings of a site."""
    usual: dict[str, Any] = {
        "cycle": 5.0, "barrier": 120.0, "silence": 90.0, "lost": 900.0, "heartbeat": 20.0, "unseen": 60.0, "grace": 30.0, "staging": 300.0,
    }  # fmt: skip
    async with House(folder, **usual, **settings).up() as house:
        yield house


def resident() -> float:
    """KiB of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


# -- requests ----------------------------------------------------------------------------------------------------------


def requests(args: argparse.Namespace, folder: Path, figures: dict[str, Any], gates: list[tuple[object, ...]]) -> None:
    (folder / "requests").mkdir()
    found = asyncio.run(asked(folder / "requests", args.rounds))
    figures["requests"] = found
    gate(gates, "RunInstances, the batch system silent", found["run"], 1000)
    gate(gates, "DescribeInstances of 1 000 in one page, to its last byte", found["describe"], 300)


async def asked(folder: Path, rounds: int) -> dict[str, float]:
    """Milliseconds, medians, as boto3 sees them."""
    async with service(folder) as house:
        house.slurm.command = silent  # type: ignore[method-assign]
        store = house.daemon.store
        store.write(lambda book: book.put(AccessKey(KEY, OWNER.name)))
        office = Office(
            house.desk, house.settings, {"small": Size(1, 1 << 30, 8 << 30)}, lambda: None, lambda slot, order: None,
            lambda: {"debian12": 0.0},
        )  # fmt: skip
        with served(Front(office, SITE_KEY, tell=lambda *a, **k: None)) as port:
            ec2 = client(port)
            wanted = {"ImageId": image_id("debian12"), "MinCount": 1, "MaxCount": 1}
            run = [await timed(lambda: ec2.run_instances(**wanted)) for _ in range(4 * rounds)]
            await timed(lambda: ec2.run_instances(**{**wanted, "MinCount": 980, "MaxCount": 980}))
            sent: list[Any] = []
            ec2.meta.events.register("before-send.ec2.DescribeInstances", lambda request, **_: sent.append(request))
            page = [await timed(lambda: ec2.describe_instances(MaxResults=1000)) for _ in range(rounds)]
            body = sent[-1].body if isinstance(sent[-1].body, bytes) else sent[-1].body.encode()
            again = Request(sent[-1].url, body, dict(sent[-1].headers.items()))  # boto3 reads longer than it waits
            answer = [await timed(lambda: urlopen(again).read()) for _ in range(2 * rounds)]
            parts = [
                await timed(lambda: list(ec2.get_paginator("describe_instances").paginate(PaginationConfig={"PageSize": 100})))
                for _ in range(rounds)
            ]  # fmt: skip
    found = {"run": run, "describe": answer, "describe, by boto3": page, "ten pages, by boto3": parts}
    return {name: statistics.median(times) for name, times in found.items()}


async def silent(argv: tuple[str, ...]) -> bytes:
    """A batch system that does not answer."""
    await asyncio.sleep(30)
    raise CommandFailed(f"{argv[0]}: not finished after 30 s, killed")


async def timed(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    await asyncio.to_thread(call)
    return 1000 * (time.monotonic() - begin)


# -- node --------------------------------------------------------------------------------------------------------------


def node(args: argparse.Namespace, folder: Path, figures: dict[str, Any], gates: list[tuple[object, ...]]) -> None:
    place = folder / "node"
    place.mkdir()
    store = Path(os.environ.get("BELLJAR_PATHS_STORE", "/var/lib/belljar/store"))
    os.environ |= fresh_node([args.belljar], place, store)
    begin = time.monotonic()
    for _ in range(args.rounds):
        granted(os.environ, place)
    reserve = 1000 * (time.monotonic() - begin) / args.rounds
    asyncio.run(a_life(new(place / "first"), args.image))  # the image's template is made, and what is imported is
    lives = [asyncio.run(a_life(new(place / f"life{number}"), args.image)) for number in range(args.rounds)]
    found = {name: statistics.median(one[name] for one in lives) for name in lives[0]} | {"reserve": reserve}
    for count in (1, 8):
        found[f"kill-all {count}"] = statistics.median(
            asyncio.run(killed(new(place / f"kill{count}.{number}"), args.image, count))
            for number in range(args.rounds)
        )
    rank(1 if args.first else 0)  # and so of keepers, and QEMU
    row = spread(asyncio.run(a_row(new(place / "row"), args.image)))
    rank(0)
    found |= {f"order to QEMU's process, {name}": row[name] for name in ("p50", "p99")}
    table(("ms, of a node", "median"), sorted(found.items()))
    figures["node"] = found
    gate(gates, f"order to QEMU's process, p99 of {ROW} one after the other", row["p99"], 50)
    gate(gates, "reserve: what the pilot was granted", found["reserve"], TALK["reserve"])
    gate(gates, "restore: TERM to the pilot, its guest killed", found["hard end"], 150)
    gate(gates, "restore: beside the talk's", found["hard end"] + found["guest gone to pilot gone"], TALK["restore"])
    gate(gates, "guest gone to pilot gone", found["guest gone to pilot gone"], 100)
    for count in (1, 8):
        gate(gates, f"kill-all, {count} machines, its command's start included", found[f"kill-all {count}"], 200)
    gate(gates, "kill-all, 1 machine, beside the talk's", found["kill-all 1"], TALK["kill-all"])


def new(folder: Path) -> Path:
    folder.mkdir(mode=0o755)
    return folder


@asynccontextmanager
async def pilot_with(folder: Path, image: str, count: int, **facts: Any) -> AsyncIterator[tuple[Running, Heard]]:
    """A real pilot with so many real machines, which run."""
    order = dumps(MachineOrder(image, memory=512 << 20, network="none")).decode()
    ids = [f"i-{number}" for number in range(count)]
    there = Heard(folder, (Order(Do.GO), *(Order(Do.START, one, order) for one in ids)))
    async with there.up():
        job = job_for(there, deadline=3600.0, heartbeat=20.0, **facts)
        run = Running(job, folder, make=lambda changed: Machines(job.lease, job.grace, changed))
        try:
            await there.until(lambda: all("running" in there.states(one) for one in ids), 300)
            yield run, there
        finally:
            run.pilot.signalled(signal.SIGTERM)
            await run.ended(60)


async def a_life(folder: Path, image: str) -> dict[str, float]:
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    async with pilot_with(folder, image, 1, grace=0.0) as (run, there):
        moments = {one.state: one.mono for one in there.heard if one.state}
        ((_, qemu),) = ours()
        spawned = start_time(qemu) / os.sysconf("SC_CLK_TCK") - began  # type: ignore[operator]
        handle = os.pidfd_open(qemu)
        gone = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(handle, lambda: gone.done() or gone.set_result(time.monotonic()))
        begin = time.monotonic()
        run.pilot.signalled(signal.SIGTERM)
        async with asyncio.timeout(60):
            left = await gone
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        await run.ended(60)
        ended = time.monotonic()
    return {
        "pilot's start to QEMU's (10 ms steps)": 1000 * spawned, "order to running": 1000 * (moments[I.RUNNING] - moments[I.STAGING]),
        "hard end": 1000 * (left - begin), "guest gone to pilot gone": 1000 * (ended - left),
    }  # fmt: skip


async def a_row(folder: Path, image: str) -> list[float]:
    """Milliseconds from each order's way into the channel to its QEMU's process, by the machine's journal, which has it when it is there.
    Each is the first of a pilot, and comes when it would if so many had begun at once."""
    request, found = dumps(MachineOrder(image, memory=512 << 20, network="none")).decode(), list[float]()
    for number in range(ROW):
        place, id = new(folder / str(number)), f"i-{number}"
        there = Heard(place, (Order(Do.WAIT),))
        async with there.up():
            job = job_for(there, deadline=3600.0, heartbeat=20.0, grace=0.0)
            run = Running(job, place, make=lambda changed: Machines(job.lease, job.grace, changed))  # noqa: B023
            await there.until(lambda: there.heard, 60)  # noqa: B023
            await asyncio.sleep(LOOK)
            (slot,) = there.channel.connected
            there.channel.order(slot, Order(Do.GO))
            begin = time.time()
            there.channel.order(slot, Order(Do.START, id, request))
            await there.until(lambda: "running" in there.states(id), 60)  # noqa: B023
            found.append(1000 * (spawned(id) - begin))
            run.pilot.signalled(signal.SIGTERM)
            await run.ended(60)
    return found


def spawned(instance: str) -> float:
    """When the QEMU of this one was."""
    for folder in (Path(os.environ["BELLJAR_PATHS_RUN"]) / "machines").iterdir():
        if dict(json.loads((folder / "request.json").read_bytes())["labels"])["instance"] == instance:
            journal = map(json.loads, (folder / "journal.jsonl").read_bytes().splitlines())
            return float(next(one["time"] for one in journal if one["event"] == "spawned"))
    sys.exit(f"{instance} runs, and has no folder")


# The command with the mark of some machines ($1) in the place of that of all.
KILL_ALL = "import re, sys; from belljar.cli import entry; from belljar.cli.host import reap; \
reap.MARK = re.compile(sys.argv.pop(1).encode()); entry()"


async def killed(folder: Path, image: str, count: int) -> float:
    """`belljar kill-all` as a process, from its start to its end: of these machines, and of no others of this host."""
    async with pilot_with(folder, image, count, grace=0.0):
        ids = [mark[1].decode() for mark, _ in ours()]
        mark = f"guest=belljar-({'|'.join(map(re.escape, ids)) or '-'})(?:,|$)"
        argv = (sys.executable, "-c", KILL_ALL, mark, "kill-all", "--format", "json")
        begin = time.monotonic()
        done = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        printed, _ = await done.communicate()
        took = 1000 * (time.monotonic() - begin)
        if len(ids) != count or [one["result"] for one in json.loads(printed)] != count * ["killed"]:
            sys.exit(f"{len(ids)} QEMUs for {count} machines, and of kill-all: {printed.decode()}")
        return took


def ours() -> list[tuple[re.Match[bytes], int]]:
    """QEMUs of machines that this process's tree keeps: id and pid."""
    known = {one.name for one in (Path(os.environ["BELLJAR_PATHS_RUN"]) / "machines").iterdir()}
    return [(mark, pid) for mark, pid, _ in with_option(b"-name", MARK) if mark[1].decode() in known]


# -- slurm -------------------------------------------------------------------------------------------------------------


def slurm(args: argparse.Namespace, folder: Path, figures: dict[str, Any], gates: list[tuple[object, ...]]) -> None:
    counts = [one for one in NODES if one <= max(args.counts)]
    site = LeaseSite(nodes=max(counts))
    found: dict[int, dict[str, float]] = {}
    try:
        site.up()
        for count in counts:
            progress(f"slurm: {count} nodes")
            found[count] = with_slurm(site, count)
        status = statistics.median(took(lambda: site("status")) for _ in range(4 * args.rounds))
    finally:
        site.close()
    progress("")
    names = list(next(iter(found.values())))
    table(("ms, by nodes", *map(str, found)), [(name, *(found[count][name] for count in found)) for name in names])
    figures["slurm"] = found | {"status": status}
    gate(gates, "`belljar lease status`, median (the talk's client polled each 2 000 ms)", status, 2000)


def with_slurm(site: LeaseSite, count: int) -> dict[str, float]:
    """One lease with so many nodes, from the records of its service."""
    begin = time.time()
    lease = site.run(IMAGE, "--hours", "1", "-n", str(count))
    asked = time.time()
    site.until(lambda: site.is_running(lease), "all run", 600)
    release = took(lambda: site("release", lease))
    released = time.time()
    site.until(lambda: site.state(lease) == "released", "it is over", 120)
    moments = {}
    with sqlite3.connect(f"file:{site.folder}/state/leases.sqlite?mode=ro", uri=True) as records:
        for (text,) in records.execute("SELECT value FROM events WHERE lease = ? ORDER BY position", (lease,)):
            event = json.loads(text)
            kind = "slot" if "." in event["of"] else "machine" if event["of"].startswith("i-") else "lease"
            moments[kind, event["after"]] = event["wall"]  # the last of them
    return {
        "`belljar lease run`": 1000 * (asked - begin), "submit and queue to last hello": 1000 * (moments["slot", "claimed"] - begin),
        "last hello to active": 1000 * (moments["lease", "active"] - moments["slot", "claimed"]),
        "active to last running": 1000 * (moments["machine", "running"] - moments["lease", "active"]),
        "`belljar lease release`": release,
        "release to last machine gone": 1000 * (moments["machine", "terminated"] - released),
        "machines gone to lease over": 1000 * (moments["lease", "released"] - moments["machine", "terminated"]),
    }  # fmt: skip


def took(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return 1000 * (time.monotonic() - begin)


PARTS = {"channel": channel, "requests": requests, "node": node, "slurm": slurm}


if __name__ == "__main__":
    main()
