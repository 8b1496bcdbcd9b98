"""Private memory of idle clones, many alive at once: PSS of each QEMU and of each belljar that keeps it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from common import parser, publish, seconds, summary, table


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--machines", type=int, default=20)
    args = arguments.parse_args()
    seconds([args.belljar, "run", "--image", args.image, "--", "true"])
    begin = time.perf_counter()
    command = [args.belljar, "run", "--image", args.image, "--", "sh", "-c", "echo up; sleep 600"]
    keepers = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) for _ in range(args.machines)
    ]
    try:
        for keeper in keepers:
            assert keeper.stdout is not None
            if keeper.stdout.readline() != b"up\n":
                raise SystemExit("a machine did not come up")
        up = time.perf_counter() - begin
        shown = json.loads(
            subprocess.run([args.belljar, "ps", "--format", "json"], capture_output=True, check=True).stdout
        )
        domains = [machine["pid"] for machine in shown if machine["pid"]]
        qemu = [pss(pid) for pid in domains]
        ours = [pss(keeper.pid) for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.terminate()
        for keeper in keepers:
            keeper.wait()
    table(
        ("process", "alive", "median PSS MiB", "largest"),
        [
            ("qemu", len(qemu), summary(qemu)["median"], max(qemu)),
            ("belljar", len(ours), summary(ours)["median"], max(ours)),
        ],
    )
    print(f"{args.machines} machines up after {up:.1f} s")
    publish(
        args,
        {
            "benchmark": "density",
            "machines": args.machines,
            "seconds_until_up": up,
            "qemu_pss_mib": qemu,
            "belljar_pss_mib": ours,
        },
    )


def pss(pid: int) -> float:
    """MiB of memory that are this process's share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"no Pss of {pid}")


if __name__ == "__main__":
    main()
