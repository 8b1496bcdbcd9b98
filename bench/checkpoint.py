"""Freeze and restore of a machine with so much in its memory, half of it random bytes, half text; beside `dd` of as many bytes.

freeze      the machine stands still: memory and disk are written, packed by zstd where it is there
restore     everything is checked, read and loaded, until the guest has proved who it is
dd          as many bytes as the checkpoint has, written and synced
unpacked    the memory unpacked by zstd and written by `cat`, as without zstd
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import parser, publish, seconds, table

MIB = 1 << 20
FILL = "cd /dev/shm; head -c {0}M /dev/urandom > a; yes 'a line of text' | head -c {0}M > b; echo ready; read line"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--memory", type=int, nargs="+", default=[256, 1024], help="MiB of the machines")
    arguments.add_argument("--folder", help="where the checkpoints are written to (default: a temporary folder)")
    args = arguments.parse_args()
    figures, rows = [], []
    for memory in args.memory:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figure = measure(args.belljar, args.image, memory, Path(folder))
        figures.append(figure)
        rows.append([figure[name] for name in ("memory", "size", "freeze", "restore", "dd", "unpacked")])
    table(("memory MiB", "checkpoint MiB", "freeze s", "restore s", "dd s", "unpacked s"), rows)
    publish(args, {"benchmark": "checkpoint", "machines": figures})


def measure(belljar: str, image: str, memory: int, folder: Path) -> dict[str, float]:
    """One machine: written, ended, and gone on."""
    report, kept = folder / "report", folder / "kept"
    fill = FILL.format(memory // 4)
    run = [belljar, "run", "--image", image, "--cwd", "/", "-m", f"{memory}M", "--name", f"bench-{os.getpid()}"]
    with subprocess.Popen(
        [*run, "--report", report, "--", "sh", "-ec", fill], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as job:
        assert job.stdout is not None
        if job.stdout.readline() != b"ready\n":
            sys.exit(f"the machine of {memory} MiB could not be filled")
        subprocess.run(
            [belljar, "checkpoint", "--stop", f"bench-{os.getpid()}", kept], check=True, stdout=subprocess.DEVNULL
        )
    freeze = json.loads(report.read_text())["phases"]["freeze"]
    size = sum(path.stat().st_size for path in (kept / "1").iterdir())
    begin = time.perf_counter()
    subprocess.run([belljar, "run", "--restore", kept, "--report", report], input=b"\n", check=True)
    whole, phases = time.perf_counter() - begin, json.loads(report.read_text())["phases"]
    restore = whole - sum(phases.get(name, 0.0) for name in ("run", "stop", "clean"))
    copy = folder / "copy"
    dd = seconds(["dd", "if=/dev/zero", f"of={copy}", "bs=1M", f"count={size // MIB}", "conv=fsync", "status=none"])
    subprocess.run(["zstd", "-dqf", kept / "1/memory", "-o", folder / "raw"], check=True)
    unpacked = seconds(["dd", f"if={folder / 'raw'}", f"of={copy}", "bs=1M", "conv=fsync", "status=none"])
    return {
        "memory": memory, "size": size / MIB, "freeze": freeze, "restore": restore, "dd": dd, "unpacked": unpacked,
        "freeze_mb_per_s": memory / 2 / freeze, "restore_mb_per_s": memory / 2 / restore,
    }  # fmt: skip


if __name__ == "__main__":
    main()
