"""How long `belljar run -- true` takes by libvirt, beside the direct driver's cold boot and its clone, in one run.

A libvirt daemon of the benchmark's own is started (as root; nothing of the host's libvirt is touched), unless `--uri`
names one. The first start is not counted: libvirt then asks QEMU what it can do, which takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from common import ROOT, interleaved, parser, publish, seconds, summary, table

PHASES = ("start", "boot", "stop")


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=7)
    arguments.add_argument("--uri", help="a libvirt that runs, as `qemu:///system`")
    args = arguments.parse_args()
    belljar = [args.belljar, "run", "--image", args.image]
    with ExitStack() as held:
        env = os.environ | by_libvirt(args.uri, held)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        cases = {
            "clone": ([*belljar, "--start", "clone"], dict(os.environ)),
            "cold": ([*belljar, "--start", "cold"], dict(os.environ)),
            "libvirt": ([*belljar, "--start", "cold"], env),
        }
        phases: dict[str, list[dict[str, float]]] = {name: [] for name in cases}

        def timed(name: str) -> float:
            words, environ = cases[name]
            took = seconds([*words, "--report", str(folder / "report"), "--", "true"], env=environ)
            phases[name].append(json.loads((folder / "report").read_text())["phases"])
            return took

        for name in cases:
            timed(name)  # makes image and template, and what libvirt remembers
            phases[name].clear()
        times = interleaved({name: (lambda name=name: timed(name)) for name in cases}, args.runs)
    figures = {name: summary(values) for name, values in times.items()}
    for name, rows in phases.items():
        figures[name] |= {phase: summary([row.get(phase, 0.0) for row in rows])["median"] for phase in PHASES}
    base = figures["cold"]["median"]
    table(
        ("case", "median s", "best s", "p90 s", *(f"{phase} s" for phase in PHASES), "times the cold boot"),
        [
            (name, f["median"], f["best"], f["p90"], *(f[phase] for phase in PHASES), f["median"] / base)
            for name, f in figures.items()
        ],
    )
    ratios = {f"{name} / cold": f["median"] / base for name, f in figures.items()}
    publish(args, {"benchmark": "libvirt", "seconds": figures, "ratios": ratios})


def by_libvirt(uri: str | None, held: ExitStack) -> dict[str, str]:
    """The settings of a belljar by libvirt."""
    if uri is not None:
        return {"BELLJAR_MACHINE_HYPERVISOR": f"libvirt:{uri}"}
    sys.path.insert(0, str(ROOT))
    from tests.live import libvirt_lab

    if lacks := libvirt_lab.missing():
        sys.exit(f"libvirt cannot run here: it lacks {lacks}; or name one that runs with --uri")
    return held.enter_context(libvirt_lab.running()).settings


if __name__ == "__main__":
    main()
