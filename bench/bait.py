"""A short job under a real Slurm in four ways, in one run: native, in a machine of its own (`belljar batch`), on a node that the bait makes
for it, and on one that the bait kept from the job before. What each adds from sbatch to the job's first byte of output, and jobs a minute.

Brings up two private Slurms (tests/batch/lab): one with belljar installed as a site does, one with a bait on a bridge. Rounds go through all
four ways, one job at a time; then each way has a row of jobs at once, two at a time. Needs root.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from common import ROOT, Row, parser, progress, publish, summary, table

from batch import USER, slurm

sys.path.insert(0, str(ROOT))
from tests.batch.lab.site import Site
from tests.batch.lab.slurm import Slurm
from tests.batch.lab.worker import Worker, until
from tests.live.net_lab import Lab

AT_A_TIME = 2
PATIENCE = 300.0
WRAPPED, FRESH, KEPT = "in a machine (`belljar batch`)", "bait, fresh", "bait, kept"


class Way:
    """One way to run jobs: *send* one, which tells its number. *ready*: before each of them, and before a row."""

    def __init__(
        self, site: Site, lab: Slurm, send: Callable[[], str], ready: Callable[[], None] = lambda: None
    ) -> None:
        self.site, self.lab, self.send, self.ready = site, lab, send, ready

    def submit(self) -> tuple[float, Path]:
        """When, and where its output will be."""
        begin = time.time()
        return begin, self.site.home(USER) / f"{self.send()}.out"

    def one(self) -> float:
        """Seconds from sbatch to the first byte; the job and what was made for it are gone then."""
        begin, out = self.submit()
        latency = self.heard(out) - begin
        self.lab.until(lambda: not self.lab.text("squeue", "-h", "--all").strip(), "the job has ended", PATIENCE)
        return latency

    def row(self, jobs: int) -> float:
        """Jobs a minute, from the first sbatch to the last byte."""
        submitted = [self.submit() for _ in range(jobs)]
        return jobs / (max(self.heard(out) for _, out in submitted) - submitted[0][0]) * 60

    def heard(self, out: Path) -> float:
        until(lambda: out.exists() and out.stat().st_size, f"{out}\n{self.lab.tail()}", PATIENCE)
        if out.read_bytes() != b"up\n":
            sys.exit(f"{out}: {out.read_bytes()!r} where `up` was to be")
        return out.stat().st_mtime


class Baited:
    """A host with a bait, which is started anew where it is to keep machines, or not to."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.said = worker, worker.file.read_text().replace("max_cpus = 8", f"max_cpus = {AT_A_TIME}")
        self.begun = 0.0

    def keeping(self, policy: str) -> Callable[[], None]:
        def ready() -> None:
            text = f'{self.said}cache = "{policy}"\ncache_uses = 1000\n'
            if self.worker.file.read_text() != text:
                if self.worker.daemon is not None:
                    self.worker.kill(15)
                self.worker.file.write_text(text)
                self.begun = time.time()
                self.worker.start()
            until(self.is_quiet, f"the bait is quiet\n{self.worker.said()}", PATIENCE)

        return ready

    def is_quiet(self) -> bool:
        """It has looked, and nothing is under way: jobs of the ways before, and what they kept, are gone."""
        try:
            status = self.worker.json("status")["status"]
        except ValueError:  # it has not looked yet
            return False
        is_new = status["started"] >= self.begun and status["looked"] > time.time() - 3
        is_keeping = 'cache = "never"' not in self.worker.file.read_text()
        return bool(is_new and set(status["jobs"]) <= ({"kept"} if is_keeping else set()))


@contextmanager
def baited() -> Iterator[Baited]:
    with ExitStack() as stack:
        net = Lab()
        stack.callback(net.close)
        site = Site("bench-bait")
        stack.callback(site.close)
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="belljar-bench-bait-", dir="/var/tmp", ignore_cleanup_errors=True)
            )
        )
        folder.chmod(0o755)
        worker = Worker(net, site, folder)
        stack.callback(worker.close)
        worker.slurm.up()
        yield Baited(worker)


def sbatch(site: Site, lab: Slurm, *options: str) -> str:
    """As PooledSlurm.submit."""
    home = site.home(USER)
    script = home / "job.sh"
    script.write_text("#!/bin/sh\necho up\n")
    script.chmod(0o755)
    words = ("sbatch", "--parsable", "--output=%j.out", "--error=/dev/null", *options, str(script))
    return site.run(*words, user=USER, cwd=home, env=lab.env).stdout.decode().strip()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--rounds", type=int, default=8, help="jobs of each way, one at a time (default: %(default)s)"
    )
    arguments.add_argument("--row", type=int, default=16, help="and so many at once (default: %(default)s)")
    args = arguments.parse_args()
    with slurm(AT_A_TIME) as (site, lab), baited() as bait:
        there, its = bait.worker.site, bait.worker.slurm.lab
        send = partial(bait.worker.slurm.submit, "echo up", "--error=/dev/null")
        ways = {
            "native": Way(site, lab, partial(sbatch, site, lab)),
            WRAPPED: Way(site, lab, partial(sbatch, site, lab, f"--comment=vm={args.image}")),
            FRESH: Way(there, its, send, bait.keeping("never")),
            KEPT: Way(there, its, send, bait.keeping("same-user")),
        }
        for way in ways.values():  # templates are made by the first
            way.ready()
            way.one()
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(args.rounds):
            for name, way in ways.items():
                way.ready()
                if name == KEPT:
                    way.one()  # its machine is made, and kept
                    way.ready()
                times[name].append(way.one())
            progress(f"round {number + 1} of {args.rounds}")
        progress("")
        rates = {}
        for name, way in ways.items():
            way.ready()
            rates[name] = way.row(args.row)
            progress(name)
        progress("")
        ways[FRESH].ready()  # what was kept ends
    tell(args, {name: summary(one) for name, one in times.items()}, rates)


def tell(args: object, times: dict[str, Row], rates: dict[str, float]) -> None:
    native, wrapped = times["native"]["median"], times[WRAPPED]["median"]
    added = {name: one["median"] - native for name, one in times.items()}
    table(
        ("", "sbatch to first byte", "best", "worst", "added s", "times wrapped", "jobs/min", "of native"),
        [
            (
                name, one["median"], one["best"], one["worst"], added[name], one["median"] / wrapped, f"{rates[name]:.1f}",
                rates[name] / rates["native"],
            )
            for name, one in times.items()
        ],
    )  # fmt: skip
    ratios = {
        "added, kept / fresh": added[KEPT] / added[FRESH],
        "jobs a minute, kept / fresh": rates[KEPT] / rates[FRESH],
    }
    for what, ratio in ratios.items():
        print(f"{what}: {ratio:.2f}")
    publish(args, {"benchmark": "bait", "latency": times, "added": added, "jobs_per_minute": rates, "ratios": ratios})  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
