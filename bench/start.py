"""How long `belljar run -- true` takes as a whole command, beside what it must be compared with, in one run.

true        a process, nothing else
clone       a fresh VM from a template
cold        a fresh VM booted from its kernel
bare        QEMU alone booting the same kernel with a busybox initramfs that powers off at once: no disk, no agent
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import interleaved, parser, publish, seconds, summary, table
from start_picture import picture

INIT = b"#!/bin/busybox sh\nexec /bin/busybox poweroff -f\n"


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=15)
    arguments.add_argument("--picture", type=Path, metavar="FILE", help="draw the phases there, as SVG")
    args = arguments.parse_args()
    belljar = [args.belljar, "run", "--image", args.image]
    seconds([*belljar, "--start", "clone", "--", "true"])  # makes image and template where they are missing
    with tempfile.TemporaryDirectory() as folder:
        bare = bare_qemu(args, Path(folder))
        report = Path(folder) / "report.json"
        phases: dict[str, list[dict[str, float]]] = {"clone": [], "cold": []}

        def start(way: str) -> float:
            took = seconds([*belljar, "--start", way, "--report", str(report), "--", "true"])
            phases[way].append({**json.loads(report.read_text())["phases"], "whole": took})
            return took

        times = interleaved(
            {
                "true": lambda: seconds(["true"]),
                "clone": lambda: start("clone"),
                "cold": lambda: start("cold"),
                "bare": lambda: seconds(bare),
            },
            args.runs,
        )
    figures = {name: summary(values) for name, values in times.items()}
    clone = figures["clone"]["median"]
    table(
        ("case", "median s", "best s", "p90 s", "times the clone"),
        [(name, f["median"], f["best"], f["p90"], f["median"] / clone) for name, f in figures.items()],
    )
    ratios = {
        "bare / clone": figures["bare"]["median"] / clone,
        "cold / clone": figures["cold"]["median"] / clone,
        "clone - true (s)": clone - figures["true"]["median"],
    }
    medians = {way: medians_of(rows) for way, rows in phases.items()}
    if args.picture:
        args.picture.write_text(picture(medians, args.runs))
    publish(args, {"benchmark": "start", "seconds": figures, "ratios": ratios, "phases": medians})


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each phase, in their order; `itself` is what the command took beside them."""
    phases = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "whole"}
    return {"itself": statistics.median(2 * row["whole"] - sum(row.values()) for row in rows), **phases}


def bare_qemu(args: object, folder: Path) -> list[str]:
    """QEMU with the image's own kernel and nothing else in it."""
    from belljar.image.boot import cpio

    busybox = next((path for path in (Path("/bin/busybox"), Path("/usr/bin/busybox")) if path.exists()), None)
    if busybox is None:
        sys.exit("busybox-static is not installed")
    entries = (
        cpio.folder("bin"),
        cpio.file("bin/busybox", busybox.read_bytes(), 0o755),
        cpio.file("init", INIT, 0o755),
    )
    (folder / "initrd").write_bytes(cpio.archive(entries))
    shown = subprocess.run(
        [args.belljar, "image", "show", args.image, "--format", "json"], capture_output=True, check=True
    )  # type: ignore[attr-defined]
    kernel = json.loads(shown.stdout)["kernel"]
    return [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg", "-m", "512", "-nodefaults", "-no-user-config", "-display", "none",
        "-no-reboot", "-serial", "null", "-kernel", kernel, "-initrd", str(folder / "initrd"), "-append", "quiet panic=-1 console=ttyS0",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
