"""Many small files through each way into a machine, and writing to the scratch disk and to the machine's own; all beside
the same work on the host itself. `read`: every file once, by the payload. `whole`: from the command to its end."""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path

from common import parser, publish, seconds, table

from belljar.errors import BelljarError
from belljar.hypervisor.devices.share_virtiofs import find

READ = 'find "$1" -type f -print0 | xargs -0 cat | wc -c'
WRITE = 'dd if=/dev/zero of="$1" bs=1M count="$2" conv=fsync status=none'
COPIED = {"BELLJAR_MACHINE_PACK_FILES": "0", "BELLJAR_MACHINE_PACK_SIZE": "0"}
PACKED = {"BELLJAR_MACHINE_PACK_FILES": "1"}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--files", type=int, default=10_000)
    arguments.add_argument("--mib", type=int, default=256, help="written to each disk")
    arguments.add_argument("--large", type=int, default=256, help="MiB of one file that goes in and out")
    arguments.add_argument("--runs", type=int, default=3)
    args = arguments.parse_args()
    run = [args.belljar, "run", "--image", args.image]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        size = grow(tree, args.files)
        ways = {
            "packed --in": ([*run, "--in", f"{tree}:/var/tmp/tree"], PACKED),
            "copied --in": ([*run, "--in", f"{tree}:/var/tmp/tree"], COPIED),
            "9p share": ([*run, "--share", f"{tree}:/var/tmp/tree"], {}),
        }
        with suppress(BelljarError):  # Debian 12 has none that is used; BELLJAR_QEMU_VIRTIOFSD names one
            find(os.environ.get("BELLJAR_QEMU_VIRTIOFSD", ""))
            ways["virtiofs share"] = ([*run, "--share", f"virtiofs:{tree}:/var/tmp/tree"], {})
        rows, phases = [], {}
        native = statistics.median(seconds(["sh", "-c", READ, "sh", str(tree)]) for _ in range(args.runs))
        for name, (words, env) in ways.items():
            found = [
                measured([*words], ["sh", "-c", READ, "sh", "/var/tmp/tree"], env, folder) for _ in range(args.runs)
            ]
            names = sorted({key for one in found for key in one})  # the first run may have made a template
            middle = {key: statistics.median(one.get(key, 0.0) for one in found) for key in names}
            phases[name] = middle
            rows.append(
                (name, middle["pack"] + middle["setup"], middle["run"], middle["whole"], middle["run"] / native)
            )
        rows.append(("native", 0.0, native, native, 1.0))
        disks = written(run, folder, args.mib, args.runs)
        large = one_file(run, Path(folder, "large"), args.large, args.runs)
    table((f"{args.files} files, {size >> 20} MiB", "ready s", "read s", "whole s", "read / native"), rows)
    table(
        (f"{args.mib} MiB written", "MB/s", "of native"),
        [(name, rate, rate / disks["native"]) for name, rate in disks.items()],
    )
    table(
        (f"one file of {args.large} MiB", "s", "of the host's copy"),
        [(name, took, took / large["copied by the host"]) for name, took in large.items()],
    )
    publish(
        args,
        {
            "benchmark": "data",
            "files": args.files,
            "bytes": size,
            "native_seconds": native,
            "ways": phases,
            "written": disks,
            "large_seconds": large,
        },
    )


def one_file(run: list[str], source: Path, mib: int, runs: int) -> dict[str, float]:
    """Seconds for a file: the host's own copy, with what it writes out, and the phases of a machine that copy it in and out."""
    source.write_bytes(random.Random(mib).randbytes(1 << 20) * mib)
    rows: list[tuple[float, float, float]] = []
    for _ in range(runs):
        copy = seconds(["dd", f"if={source}", f"of={source}.copy", "bs=1M", "conv=fsync", "status=none"])
        words = ["--in", f"{source}:/var/tmp/large", "--out", f"/var/tmp/large:{source}.out"]
        phases = measured([*run, *words], ["true"], {}, str(source.parent))
        rows.append((copy, phases["setup"], phases["fetch"]))
    middle = [statistics.median(column) for column in zip(*rows, strict=True)]
    return dict(zip(("copied by the host", "in", "out"), middle, strict=True))


def grow(tree: Path, files: int) -> int:
    """Files of 4 to 64 KB, a hundred in a folder, half of them text. Returns their bytes."""
    chance = random.Random(files)
    text = b" ".join(chance.choice((b"alpha", b"0.123", b"beta", b"17")) for _ in range(40_000))
    noise, total = chance.randbytes(1 << 17), 0
    for number in range(files):
        folder = tree / f"d{number // 100:04}"
        folder.mkdir(parents=True, exist_ok=True)
        size = chance.randint(4 << 10, 64 << 10)
        begin = chance.randint(0, 1 << 15)
        (folder / f"f{number % 100:02}").write_bytes((noise if number % 2 else text)[begin : begin + size])
        total += size
    return total


def measured(words: list[str], command: list[str], env: dict[str, str], folder: str) -> dict[str, float]:
    """Seconds of one job's phases, and of all of it."""
    report = Path(folder, "report")
    whole = seconds([*words, "--report", str(report), "--", *command], env={**os.environ, **env})
    phases = json.loads(report.read_text())["phases"]
    return {"pack": 0.0, "setup": 0.0, **phases, "whole": whole}


def written(run: list[str], folder: str, mib: int, runs: int) -> dict[str, float]:
    """MB/s into each disk."""
    places = {
        "scratch disk": ([*run, "--scratch", f"{2 * mib}M"], "/scratch/file"),
        "machine's own disk": (run, "/var/tmp/file"),
    }
    rates = {}
    for name, (words, path) in places.items():
        took = statistics.median(
            measured(words, ["sh", "-c", WRITE, "sh", path, str(mib)], {}, folder)["run"] for _ in range(runs)
        )
        rates[name] = mib * 1.048576 / took
    native = statistics.median(seconds(["sh", "-c", WRITE, "sh", f"{folder}/file", str(mib)]) for _ in range(runs))
    return {**rates, "native": mib * 1.048576 / native}


if __name__ == "__main__":
    main()
