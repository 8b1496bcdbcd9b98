"""MB per second through a machine's stdin, stdout, --in and --out, beside the same bytes through a plain pipe or copy."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

from common import parser, publish, seconds, table


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--mib", type=int, default=256)
    args = arguments.parse_args()
    size = args.mib << 20
    run = [args.belljar, "run", "--image", args.image]
    base = min(seconds([*run, "--", "true"]) for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        data, back = Path(folder, "data"), Path(folder, "back")
        subprocess.run(["dd", "if=/dev/urandom", f"of={data}", "bs=1M", f"count={args.mib}", "status=none"], check=True)
        took = {
            "stdout": piped(["true"], [*run, "--", "head", "-c", str(size), "/dev/zero"], ["cat"]) - base,
            "stdin": piped(["cat", str(data)], [*run, "--", "dd", "of=/dev/null", "bs=64k", "status=none"], ["cat"])
            - base,
            "--in": seconds([*run, "--in", f"{data}:/var/tmp/data", "--", "true"]) - base,
            "--out": seconds(
                [*run, "--out", f"/var/tmp/data:{back}", "--", "sh", "-c", f"head -c {size} /dev/zero > /var/tmp/data"]
            )
            - base,
            "plain pipe": piped(["cat", str(data)], ["cat"], ["cat"]),
            "plain copy": seconds(["cp", str(data), str(back)]),
        }
    rates = {name: args.mib * 1.048576 / max(value, 1e-6) for name, value in took.items()}
    ratios = {
        name: rate / rates["plain pipe" if name.startswith("std") else "plain copy"] for name, rate in rates.items()
    }
    rows = [(name, took[name], rate, ratios[name]) for name, rate in rates.items()]
    table(("stream", "seconds", "MB/s", "of plain pipe or copy"), rows)
    publish(
        args, {"benchmark": "stream", "mib": args.mib, "mb_per_second": rates, "ratios": ratios, "base_seconds": base}
    )


def piped(source: list[str], middle: list[str], sink: list[str]) -> float:
    """Seconds until `source | middle | sink` is through."""
    begin = time.perf_counter()
    first = subprocess.Popen(source, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    second = subprocess.Popen(middle, stdin=first.stdout, stdout=subprocess.PIPE)
    third = subprocess.Popen(sink, stdin=second.stdout, stdout=subprocess.DEVNULL)
    for process in (first, second):
        assert process.stdout is not None
        process.stdout.close()
    codes = [process.wait() for process in (third, second, first)]
    if codes[1]:
        raise SystemExit(f"{' '.join(middle)}: exit {codes[1]}")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
