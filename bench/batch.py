"""Jobs under a real Slurm, native and in machines, in one run: latency a job sees, jobs per minute, processor time.

Brings up a private Slurm (tests/batch/lab), installs belljar in it as a site does, submits the same job as an ordinary
user both ways. Latency is what lies between slurmd's opening of the job's output file and the first byte in it, by the
stamps of that file: dispatch to first instruction, for both kinds alike. VmBatch (2016): 20 000 jobs, two at a time, mean
start 38.41 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import ROOT, parser, progress, publish, summary, table

sys.path.insert(0, str(ROOT))
os.environ.setdefault("BELLJAR_TEST_STORE", str(Path(f"/var/tmp/belljar-test-{os.getuid()}/store")))

from tests.batch.lab.site import Site
from tests.batch.lab.slurm import Slurm

USER = "bjalice"
VMBATCH_START = 38.41  # seconds
TICK = os.sysconf("SC_CLK_TCK")


class Bench:
    """A site with Slurm on it, and arrays of one job."""

    def __init__(self, site: Site, lab: Slurm, image: str, chunk: int) -> None:
        self.site, self.lab, self.image, self.chunk = site, lab, image, chunk

    def run(self, jobs: int, *, in_machines: bool) -> dict[str, float]:
        """*jobs* of them, as many at a time as the node has processors. Ends the benchmark when one fails."""
        name = "machines" if in_machines else "native"
        folder = self.site.home(USER) / f"{name}-{time.monotonic_ns()}"
        self.site.run("mkdir", str(folder), user=USER)
        options = [f"--comment=vm={self.image}"] if in_machines else []
        latencies: list[float] = []
        processor, first, last = host_processor_time(), 0.0, 0.0
        for begin in range(0, jobs, self.chunk):
            count = min(self.chunk, jobs - begin)
            self._array(count, folder, options)
            begun, ended, found = self._look(folder, count)
            latencies += found
            first, last = first or begun, ended
            progress(f"{name}: {begin + count} of {jobs}")
        progress("")
        took = last - first
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
    args = arguments.parse_args()
    with slurm(args.at_a_time) as (site, lab):
        bench = Bench(site, lab, args.image, args.chunk)
        bench.run(args.at_a_time, in_machines=True)  # the user's first machine makes its template
        rows = {
            "native": bench.run(args.native or args.jobs, in_machines=False),
            "in machines": bench.run(args.jobs, in_machines=True),
        }
        left = site.leftovers()
    native, machines = rows["native"], rows["in machines"]
    figures = {
        "rows": rows,
        "added_latency": machines["latency_median"] - native["latency_median"],
        "added_processor_s": machines["processor_s_per_job"] - native["processor_s_per_job"],
        "rate_ratio": machines["jobs_per_minute"] / native["jobs_per_minute"],
        "failed": 0,
        "left_over": len(left),
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
    publish(args, figures)


if __name__ == "__main__":
    main()
