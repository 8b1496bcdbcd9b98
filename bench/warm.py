"""A job that imports NumPy and SciPy, reads a file of some hundred MB and inverts 100 matrices, to its first line and as a whole:

native      a process of the host (where it has NumPy and SciPy, and the file)
cold        a machine booted for it
clone       a machine cloned from the image's template
warm        the same program in a warm image: what it reads is in memory, what it imports it imports again
held        the program waits in the warm image, and only computes

Of an image with both: belljar image build debian --name science --packages python3-numpy python3-scipy \
                           --run 'head -c 300M /dev/urandom > /data.bin'
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import interleaved, parser, publish, summary, table

PROGRAM = """\
import sys
sys.path.append("/usr/lib/belljar")
import numpy, scipy.linalg, scipy.optimize, scipy.stats
data = numpy.fromfile(DATA, dtype=numpy.uint8)
total = int(data.sum(dtype=numpy.int64))
HOLD
print("ready", total, flush=True)
for _ in range(100):
    scipy.linalg.inv(numpy.eye(60) + 1 / total)
"""
HELD = "import belljar_hold; belljar_hold.hold()"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.set_defaults(image="science")
    arguments.add_argument("--data", default="/data.bin", help="the file, in the image and for `native` on the host")
    arguments.add_argument("--memory", default="1G")
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument(
        "--jobs", type=int, default=0, help="so many held jobs, two at a time, for processor seconds"
    )
    args = arguments.parse_args()
    run = [args.belljar, "run", "-n", "--cwd", "/"]
    with tempfile.TemporaryDirectory() as folder:
        plain, held = Path(folder) / "plain.py", Path(folder) / "held.py"
        text = PROGRAM.replace("DATA", repr(args.data))
        plain.write_text(text.replace("HOLD\n", ""))
        held.write_text(text.replace("HOLD", HELD))
        for name, program in (("bench-warm", plain), ("bench-held", held)):
            words = ["--from", args.image, "-m", args.memory, "--cwd", "/", "--in", f"{program}:/job.py"]
            made = [args.belljar, "image", "warm", name, *words, "--", "python3", "/job.py"]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        machine = [*run, "-m", args.memory]
        cases = {
            "native": [sys.executable, str(plain)],
            "cold": [
                *machine,
                "--image",
                args.image,
                "--start",
                "cold",
                "--in",
                f"{plain}:/job.py",
                "--",
                "python3",
                "/job.py",
            ],
            "clone": [*machine, "--image", args.image, "--in", f"{plain}:/job.py", "--", "python3", "/job.py"],
            "warm": [*machine, "--image", "bench-warm", "--", "python3", "/job.py"],
            "held": [*machine, "--image", "bench-held", "--", "now"],
        }
        if subprocess.run([sys.executable, "-c", "import numpy, scipy"], capture_output=True).returncode:
            del cases["native"]
        first: dict[str, list[float]] = {name: [] for name in cases}
        whole = interleaved({name: lambda n=name: timed(cases[n], first[n]) for name in cases}, args.runs)  # type: ignore[misc]
        own = many(cases["held"], args.jobs) if args.jobs else 0.0
    for name in ("bench-warm", "bench-held"):
        subprocess.run([args.belljar, "image", "remove", name], check=True)
    lines = {name: summary(times) for name, times in first.items()}
    ends = {name: summary(times) for name, times in whole.items()}
    rows = [
        (name, lines[name]["median"], ends[name]["median"], lines[name]["median"] / lines["held"]["median"])
        for name in cases
    ]
    table(("case", "first line s", "whole s", "first line, times held"), rows)
    figures = {"first": lines, "whole": ends, "clone / held": lines["clone"]["median"] / lines["held"]["median"]}
    publish(args, {"benchmark": "warm", **figures, "processor_seconds_per_held_job": own})


def timed(command: list[str], first: list[float]) -> float:
    """Seconds of the whole command; *first* gets those until its first line."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline().startswith(b"ready"):
            sys.exit(f"{' '.join(command)}: no first line")
        first.append(time.perf_counter() - begin)
        process.stdout.read()
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit {process.returncode}")
    return time.perf_counter() - begin


def many(command: list[str], jobs: int) -> float:
    """Processor seconds of each of so many, two at a time."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    running: list[subprocess.Popen[bytes]] = []
    for _ in range(jobs):
        if len(running) == min(2, os.cpu_count() or 1):
            ended(running.pop(0))
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
    for process in running:
        ended(process)
    return (sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before) / jobs


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        sys.exit(f"{process.args}: exit {process.returncode}")


if __name__ == "__main__":
    main()
