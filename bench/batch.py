"""Jobs under a real Slurm, native and in machines, in one run: latency a job sees, jobs per minute, processor time.

Brings up a private Slurm (tests/batch/lab), installs belljar in it as a site does, submits the same job as an ordinary
user both ways. Latency is what lies between slurmd's opening of the job's output file and the first byte in it, by the
stamps of that file: dispatch to first instruction, for both kinds alike. While jobs in machines run, the memory and
descriptors of Slurm's daemons, the host's, and the site's folders are sampled: nothing is to grow, and the node stays in
service. VmBatch (2016): 20 000 jobs, two at a time, mean start 38.41 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import ROOT, Row, Samples, files_below, parser, progress, publish, summary, table

sys.path.insert(0, str(ROOT))
os.environ.setdefault("BELLJAR_TEST_STORE", str(Path(f"/var/tmp/belljar-test-{os.getuid()}/store")))

from tests.batch.lab.site import Site
from tests.batch.lab.slurm import Slurm

USER = "bjalice"
VMBATCH_START = 38.41  # seconds
TICK, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Bench:
    """A site with Slurm on it, and arrays of one job."""

    def __init__(self, site: Site, lab: Slurm, image: str, chunk: int) -> None:
        self.site, self.lab, self.image, self.chunk = site, lab, image, chunk

    def run(self, jobs: int, *, in_machines: bool, samples: Samples | None = None, every: int = 0) -> Row:
        """*jobs* of them, as many at a time as the node has processors. Ends the benchmark when one fails. With *samples*,
        one is taken before the first job, one after the last, and one each time *every* more jobs have ended."""
        if samples:
            samples.take(0)
        name = "machines" if in_machines else "native"
        folder = self.site.home(USER) / f"{name}-{time.monotonic_ns()}"
        self.site.run("mkdir", str(folder), user=USER)
        options = [f"--comment=vm={self.image}"] if in_machines else []
        latencies: list[float] = []
        processor, first, last = host_processor_time(), 0.0, 0.0
        for begin in range(0, jobs, self.chunk):
            count = min(self.chunk, jobs - begin)
            with sampled(samples, folder, begin, every):
                self._array(count, folder, options)
            begun, ended, found = self._look(folder, count)
            latencies += found
            first, last = first or begun, ended
            progress(f"{name}: {begin + count} of {jobs}")
        progress("")
        took = last - first
        if samples:
            self.lab.until(lambda: not self.lab.text("squeue", "-h", "-t", "R,CG").strip(), "the last job is put away")
            samples.take(jobs)
        return {
            "jobs": jobs,
            "seconds": took,
            "jobs_per_minute": jobs / took * 60,
            "processor_s_per_job": (host_processor_time() - processor) / jobs,
            **{f"latency_{key}": value for key, value in summary(latencies).items()},
        }

    def _array(self, count: int, folder: Path, options: list[str]) -> None:
        script = self.site.home(USER) / "job.sh"
        script.write_text("#!/bin/sh\necho up\n")
        script.chmod(0o755)
        words = [
            "sbatch",
            "--wait",
            "--parsable",
            f"--array=1-{count}",
            "--output=%A.%a",
            "--error=/dev/null",
            "--cpus-per-task=1",
        ]
        done = self.site.run(
            *words, *options, str(script), user=USER, cwd=folder, env=self.lab.env, check=False, timeout=60 + 60 * count
        )
        if done.returncode:
            sys.exit(
                f"a job failed: exit {done.returncode}\n{done.stdout.decode()}{done.stderr.decode()}\n{self.lab.tail()}"
            )

    def _look(self, folder: Path, count: int) -> tuple[float, float, list[float]]:
        """(first opening, last byte, latencies) of the outputs, which are removed."""
        begun, ended, found = [], [], []
        for path in folder.iterdir():
            if path.read_bytes() != b"up\n":
                sys.exit(f"{path}: {path.read_bytes()!r} where `up` was to be")
            begun.append(birth(path))
            ended.append(path.stat().st_mtime_ns / 1e9)
            found.append(ended[-1] - begun[-1])
            path.unlink()
        if len(found) != count:
            sys.exit(f"{count - len(found)} of {count} jobs left no output")
        return min(begun), max(ended), found


class Watch:
    """What the site's own part of a sample looks at. `drained` tells how often the node was found out of service."""

    def __init__(self, site: Site, lab: Slurm) -> None:
        self._site, self._lab, self.drained = site, lab, 0

    def samples(self) -> Samples:
        return Samples(self._of_machines, str(self._site.top), self._look)

    def look_at_node(self) -> str:
        """Its state, as sinfo tells it."""
        state = self._lab.text("sinfo", "--noheader", "--Node", "--format=%T").strip()
        self.drained += "drain" in state or "down" in state
        return state

    def _of_machines(self) -> list[Path]:
        return [user / part for user in self._site.node.iterdir() for part in ("run", "scratch")]

    def _look(self) -> Row:
        self.look_at_node()
        row: Row = {}
        for daemon in ("slurmctld", *(f"slurmd-{node}" for node in self._lab.nodes)):
            name, pid = daemon.partition("-")[0], (self._lab.folder / f"run/{daemon}.pid").read_text().strip()
            row[f"{name}_rss_kib"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1024
            row[f"{name}_fds"] = len(os.listdir(f"/proc/{pid}/fd"))
        row["spool_files"] = files_below(self._lab.folder / "spool")
        row["record_files"] = sum(files_below(user / "logs") for user in self._site.node.iterdir())
        return row


@contextmanager
def sampled(samples: Samples | None, folder: Path, before: int, every: int) -> Iterator[None]:
    """Take samples beside what is done inside, by the outputs that jobs left in the folder."""
    over = threading.Event()

    def look() -> None:
        known = before
        while samples is not None and not over.wait(0.2):
            done = before + sum(path.stat().st_size > 0 for path in folder.iterdir())
            if done >= known + every:
                known = done
                samples.take(done)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def birth(path: Path) -> float:
    """When a file was made, in seconds since the epoch."""
    done = subprocess.run(["stat", "--format=%.9W", str(path)], capture_output=True, check=True)
    return float(done.stdout)


def host_processor_time() -> float:
    """Seconds all processors of this host have worked since it was started."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICK


@contextmanager
def slurm(processors: int) -> Iterator[tuple[Site, Slurm]]:
    site = Site("bench")
    lab = Slurm(
        site.top / "slurm", node=f"CPUs={processors} RealMemory={processors * 1000}", DefMemPerCPU="800", MaxArraySize="10001",
        MaxJobCount="20000", MinJobAge="2", SlurmctldDebug="error", SlurmdDebug="error",
    )  # fmt: skip
    try:
        lab.up()
        site.command("batch", "install", "slurm", "--folder", str(lab.etc), "--prefix", str(site.top), env=lab.env)
        yield site, lab
    finally:
        lab.down()
        site.close()


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--jobs", type=int, default=100, help="of each kind (default: %(default)s)")
    arguments.add_argument("--native", type=int, help="native jobs, where that is to be another number")
    arguments.add_argument("--at-a-time", type=int, default=2)
    arguments.add_argument("--chunk", type=int, default=500, help="jobs per array (default: %(default)s)")
    arguments.add_argument("--sample-every", type=int, default=10, metavar="JOBS", help="(default: %(default)s)")
    args = arguments.parse_args()
    with slurm(args.at_a_time) as (site, lab):
        bench = Bench(site, lab, args.image, args.chunk)
        bench.run(args.at_a_time, in_machines=True)  # the user's first machine makes its template
        watch = Watch(site, lab)
        samples = watch.samples()
        rows = {
            "native": bench.run(args.native or args.jobs, in_machines=False),
            "in machines": bench.run(args.jobs, in_machines=True, samples=samples, every=args.sample_every),
        }
        left, state = site.leftovers(), watch.look_at_node()
    native, machines = rows["native"], rows["in machines"]
    figures = {
        "rows": rows,
        "added_latency": machines["latency_median"] - native["latency_median"],
        "added_processor_s": machines["processor_s_per_job"] - native["processor_s_per_job"],
        "rate_ratio": machines["jobs_per_minute"] / native["jobs_per_minute"],
        "failed": 0,
        "left_over": len(left),
        "growth_per_1000_jobs": samples.slopes(),
        "node": {"state": state, "drained": watch.drained},
        "samples": samples.rows,
    }
    table(
        ("", "jobs", "jobs/min", "cpu s/job", "latency median", "p90", "worst"),
        [
            (
                name,
                f"{row['jobs']:.0f}",
                f"{row['jobs_per_minute']:.0f}",
                f"{row['processor_s_per_job']:.2f}",
                f"{row['latency_median']:.3f} s",
                f"{row['latency_p90']:.3f} s",
                f"{row['latency_worst']:.3f} s",
            )
            for name, row in rows.items()
        ],
    )
    print(
        f"added latency {figures['added_latency']:.3f} s per job ({VMBATCH_START / machines['latency_median']:.0f} times quicker"
        f" than VmBatch's {VMBATCH_START} s), rate {figures['rate_ratio']:.2f} of native, 0 failed, {len(left)} left over"
    )
    more = samples.left_over()
    table(
        ("while jobs in machines ran", "first", "last", "growth per 1000 jobs"),
        [(name, f"{samples.rows[1][name]:.0f}", f"{samples.rows[-2][name]:.0f}", f"{grown:.1f}")
         for name, grown in samples.slopes().items()],
    )  # fmt: skip
    print(
        f"left over: {more['qemu']:.0f} QEMU, {more['files']:.0f} files; the node is {state}, found drained or down in"
        f" {watch.drained} of {len(samples.rows) + 1} looks"
    )
    publish(args, figures)
    if left or watch.drained:
        sys.exit(1)


if __name__ == "__main__":
    main()
