"""What a sandbox costs, as a harness of agents uses one: created, a command, a file up and down, gone. Beside it what else makes a
place for the same command, where this host has it: `--beside "podman run --rm --network none debian:12 true"`.

created     until it takes commands
command     the first one, `true`
files       64 KiB up, and down again
gone        until nothing of it is left
own         processor time of ours for all of that: this process and the machine's keeper, without QEMU and the guest

Then `--sandboxes` of them, `--at-once` at a time. None may fail, and nothing may be left. With `--log FILE` each is a line of that
file, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

from common import Row, files_below, interleaved, parser, progress, publish, qemus, seconds, summary, table
from density import pss

from belljar import api
from belljar.adapters.sandbox import Sandbox

CONTENT = os.urandom(64 << 10)
SUBREAPER = 36  # of prctl(2): keepers become our children when what started them has ended
LONGEST = 120.0
PARTS = ("created", "command", "files", "gone", "own")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=15)
    arguments.add_argument("--alive", type=int, default=8, help="idle ones whose memory is measured")
    arguments.add_argument("--sandboxes", type=int, default=100)
    arguments.add_argument("--at-once", type=int, default=4)
    arguments.add_argument("--within", type=float, default=3600.0, help="seconds after which no new one is begun")
    arguments.add_argument("--log", type=Path, help="of the many")
    arguments.add_argument("--beside", metavar="COMMAND", action="append", default=[], type=shlex.split)
    args = arguments.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1)
    asyncio.run(use(args.image))  # makes image and template where they are missing
    rows: list[Row] = []
    cases: dict[str, Callable[[], float]] = {"sandbox": lambda: measured(args.image, rows)}
    cases |= {command[0]: partial(seconds, command) for command in args.beside}
    times = interleaved(cases, args.runs)
    memory = asyncio.run(idle(args.image, args.alive))
    storm = asyncio.run(many(args.image, args.sandboxes, args.at_once, args.within, args.log))
    parts = {part: summary([row[part] for row in rows]) for part in PARTS}
    whole = {name: summary(values) for name, values in times.items()}
    table(
        ("part", "median s", "best s", "p90 s"),
        [(name, f["median"], f["best"], f["p90"]) for name, f in (parts | whole).items()],
    )
    table(("process", "median PSS MiB"), list(memory.items()))
    table(tuple(storm), [tuple(storm.values())])
    publish(args, {"benchmark": "sandbox", "parts": parts, "whole": whole, "pss_mib": memory, "storm": storm})


async def use(image: str) -> tuple[Row, int]:
    """One whole life, and the process that kept it. Raises what went wrong in it."""
    moments = [time.perf_counter()]
    sandbox = await Sandbox.create(image, within=LONGEST)
    try:
        moments.append(time.perf_counter())
        if (done := await sandbox.exec(["true"], timeout=LONGEST)) != (0, "", ""):
            raise RuntimeError(f"`true` ended with {done}")
        moments.append(time.perf_counter())
        keeper = parent_of(sandbox.machine.view.pid or 0)
        with tempfile.TemporaryDirectory() as folder:
            up, down = Path(folder, "up"), Path(folder, "down")
            up.write_bytes(CONTENT)  # noqa: ASYNC240
            await sandbox.put(str(up), "/tmp/file")
            await sandbox.get("/tmp/file", str(down))
            if down.read_bytes() != CONTENT:  # noqa: ASYNC240
                raise RuntimeError("another file came back")
        moments.append(time.perf_counter())
    finally:
        await sandbox.close()
    moments.append(time.perf_counter())
    lasted = [after - before for before, after in pairwise(moments)]
    return dict(zip(PARTS, lasted, strict=False)), keeper


def measured(image: str, rows: list[Row]) -> float:
    before, begin = sum(os.times()[:4]), time.perf_counter()
    row, keeper = asyncio.run(use(image))
    took, own = time.perf_counter() - begin, sum(os.times()[:4]) - before
    os.waitid(os.P_PID, keeper, os.WEXITED | os.WNOWAIT)
    own += sum(map(int, stat_of(keeper)[11:13])) / os.sysconf("SC_CLK_TCK")  # without what QEMU took
    os.waitpid(keeper, 0)
    rows.append(row | {"own": own})
    return took


async def idle(image: str, count: int) -> Row:
    """Memory of sandboxes that do nothing, many alive at once."""
    sandboxes = await asyncio.gather(*(Sandbox.create(image, within=LONGEST) for _ in range(count)))
    try:
        domains = [pid for sandbox in sandboxes if (pid := sandbox.machine.view.pid)]
        keepers = map(parent_of, domains)
        return {"qemu": statistics.median(map(pss, domains)), "keeper": statistics.median(map(pss, keepers))}
    finally:
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


def stat_of(pid: int) -> list[str]:
    """From the third field on: see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


async def many(image: str, count: int, at_once: int, within: float, log: Path | None) -> Row:
    folder = api.live_folder()
    before, begin = files_below(folder), time.perf_counter()
    lives, troubles = [], []
    with open(log or os.devnull, "a+") as kept:  # noqa: ASYNC230
        kept.seek(0)
        earlier = [json.loads(line) for line in kept]
        lives += [row["up"] for row in earlier if "up" in row]
        troubles += [row["trouble"] for row in earlier if "trouble" in row]
        numbers = iter(range(len(earlier), count))

        async def keep_using() -> None:
            for _ in numbers:
                if time.perf_counter() - begin > within:
                    return
                try:
                    row, _ = await use(image)
                    lives.append(row["created"] + row["command"])
                    print(json.dumps({"up": lives[-1]}), file=kept, flush=True)
                except Exception as exc:
                    troubles.append(f"{type(exc).__name__}: {exc}")
                    print(json.dumps({"trouble": troubles[-1]}), file=kept, flush=True)
                progress(f"{len(lives)} of {count}, {len(troubles)} failed")

        await asyncio.gather(*(keep_using() for _ in range(at_once)))
    took = time.perf_counter() - begin
    progress("")
    print("\n".join(troubles[:10]))
    return {
        "sandboxes": len(lives), "failed": len(troubles), "at once": at_once, "s": took, "per s": (len(lives) + len(troubles) - len(earlier)) / took,
        "median s": statistics.median(lives or [0]), "worst s": max(lives or [0]),
        "qemu left": qemus(str(folder)), "files left": files_below(folder) - before, "alive": len(api.machines()),
    }  # fmt: skip


if __name__ == "__main__":
    main()
