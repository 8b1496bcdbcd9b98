"""Freeze and restore of a machine with so much memory, half of it filled: as many random bytes as text; beside `dd` in the same folder.

state       the guest's memory and devices as QEMU writes them, unpacked
checkpoint  all files of the checkpoint, the state packed by zstd where it is there
freeze      the machine stands still: everything is written, with its checksums, and synced
restore     from `belljar run --restore` until its command goes on: everything is checked, read and loaded
dd write    as many bytes as the checkpoint has, out of memory, synced
dd read     the checkpoint's state, as it is

What `restore` and `dd read` read is not in the host's page cache. MB/s are those of the state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import FILL, parser, publish, seconds, table

MIB, MB = 1 << 20, 1_000_000
COLUMNS = {
    "memory": "memory MiB", "state": "state MiB", "size": "checkpoint MiB", "freeze": "freeze s", "freeze_mb_per_s": "MB/s",
    "write": "dd write s", "restore": "restore s", "restore_mb_per_s": "MB/s", "read": "dd read s",
}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--memory", type=int, nargs="+", default=[256, 1024], help="MiB of the machines")
    arguments.add_argument("--folder", help="where the checkpoints are written to (default: a temporary folder)")
    args = arguments.parse_args()
    figures = []
    for memory in args.memory:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            figures.append(measure(args.belljar, args.image, memory, Path(folder)))
    table([*COLUMNS.values()], [[figure[name] for name in COLUMNS] for figure in figures])
    publish(args, {"benchmark": "checkpoint", "machines": figures})


def measure(belljar: str, image: str, memory: int, folder: Path) -> dict[str, float]:
    """One machine: written, ended, and gone on."""
    report, kept, name = folder / "report", folder / "kept", f"bench-{os.getpid()}"
    machine = [
        "--image",
        image,
        "--user",
        "0:0",
        "--cwd",
        "/",
        "-m",
        f"{memory}M",
        "--name",
        name,
        "--report",
        str(report),
    ]
    run, pipe = (
        [belljar, "run", *machine, "--", "sh", "-ec", FILL.format(memory // 4) + "read line\necho goes on"],
        subprocess.PIPE,
    )
    with subprocess.Popen(run, stdin=pipe, stdout=pipe) as job:
        assert job.stdout is not None
        if job.stdout.readline() != b"ready\n":
            sys.exit(f"the machine of {memory} MiB could not be filled")
        subprocess.run([belljar, "checkpoint", "--stop", name, kept], check=True, stdout=subprocess.DEVNULL)
    freeze = json.loads(report.read_text())["phases"]["freeze"]
    checkpoint = kept / "1"
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    state = unpacked(checkpoint)
    uncache(checkpoint)
    begin = time.perf_counter()
    with subprocess.Popen([belljar, "run", "--restore", kept], stdin=pipe, stdout=pipe) as job:
        assert job.stdin is not None and job.stdout is not None
        job.stdin.write(b"\n")
        job.stdin.close()
        if job.stdout.readline() != b"goes on\n":
            sys.exit(f"the machine of {memory} MiB did not go on")
        restore = time.perf_counter() - begin
    noise = folder / "noise"
    noise.write_bytes(os.urandom(size))
    write = seconds(["dd", f"if={noise}", f"of={folder / 'copy'}", "bs=1M", "conv=fsync", "status=none"])
    uncache(checkpoint)
    read = seconds(["dd", f"if={checkpoint / 'memory'}", "of=/dev/null", "bs=1M", "status=none"])
    return {
        "memory": memory, "state": state / MIB, "size": size / MIB, "freeze": freeze, "freeze_mb_per_s": state / freeze / MB,
        "write": write, "restore": restore, "restore_mb_per_s": state / restore / MB, "read": read,
    }  # fmt: skip


def unpacked(checkpoint: Path) -> int:
    """Bytes of its memory as QEMU wrote them."""
    if json.loads((checkpoint / "manifest.json").read_text())["packed_by"] != "zstd":
        return (checkpoint / "memory").stat().st_size
    with subprocess.Popen(["zstd", "-dqc", checkpoint / "memory"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        size = 0
        while data := process.stdout.read(MIB):
            size += len(data)
    return size


def uncache(folder: Path) -> None:
    """The next reader of its files, which are synced, has them from the disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
