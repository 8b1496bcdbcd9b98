"""Belljar's own processor time for one job: all of `belljar run -- true` by clone but QEMU and the guest.

It is most of what a job costs where KVM makes the machine quick. The installed command runs as it is, and its last act is to say
what getrusage(RUSAGE_SELF) knows of it. A bare Python that does nothing (`python3 -IS -c pass`) takes its turn in each round: own
time is told in starts of that interpreter, so that figures of two hosts can be compared. A settings file is there, as on any site.

`--against PREFIX` measures another install in the same rounds, such as one of an older tree. Each then has a node of its own, with the
images of `--store`. The folders of its machines are on a tmpfs, as /run is; `--run DIR` puts them elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import fresh_node, parser, progress, publish, summary, table

LAST_ACT = """
import os
def say(code, end=os._exit):
    from resource import RUSAGE_SELF, getrusage
    used = getrusage(RUSAGE_SELF)
    with open(os.environ["OWN_TIME"], "w") as report:
        report.write(repr(used.ru_utime + used.ru_stime))
    end(code)
os._exit = say
"""
SETTINGS = '[image]\ndefault = "{image}"\n'


class Taken(NamedTuple):
    own: float  # seconds of processor time of the process itself
    wall: float


class Install:
    """An installed belljar, whose launcher is run with one line more."""

    def __init__(self, prefix: Path, folder: Path, settings: Path, store: Path | None, run: Path) -> None:
        launcher = prefix / "bin/belljar"
        head, body = launcher.read_text().split("\n", 1)
        self._interpreter = head.removeprefix("#!").split()
        self._report = folder / "own-time"
        script = folder / "belljar"
        folder.mkdir()
        script.write_text(LAST_ACT + body)
        self._command = [*self._interpreter, str(script), "--config", str(settings)]
        self._command += ["run", "--start", "clone", "--", "true"]
        self._env = {"OWN_TIME": str(self._report)}
        if store:
            self._env |= fresh_node([*self._interpreter, launcher], folder, store, run)

    def job(self) -> Taken:
        self._report.unlink(missing_ok=True)
        _, wall = measured(self._command, self._env)
        return Taken(float(self._report.read_text()), wall)

    def bare(self) -> Taken:
        return Taken(*measured([self._interpreter[0], "-IS", "-c", "pass"]))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--prefix", help="the install to measure (default: that of --belljar)")
    arguments.add_argument("--against", metavar="PREFIX", help="another install, measured in the same rounds")
    arguments.add_argument("--config", metavar="FILE", help="settings of both (default: a file of one line)")
    arguments.add_argument(
        "--store", type=Path, default=Path("/var/lib/belljar"), help="whose images are taken, with --against"
    )
    arguments.add_argument(
        "--run", type=Path, default=Path("/dev/shm"), help="where machines have their folders, with --against"
    )
    arguments.add_argument("--runs", type=int, default=15)
    args = arguments.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="bj-own-", dir="/var/tmp") as temporary,
        tempfile.TemporaryDirectory(prefix="bj-own-", dir=args.run) as run,
    ):
        folder = Path(temporary)
        for one in (temporary, run):
            os.chmod(one, 0o755)
        settings = Path(args.config) if args.config else folder / "belljar.toml"
        if not args.config:
            settings.write_text(SETTINGS.format(image=args.image))
        prefixes = {"own": args.prefix or str(Path(os.path.realpath(args.belljar)).parent.parent)} | (
            {"against": args.against} if args.against else {}
        )
        store = args.store if args.against else None
        installs = {
            name: Install(Path(prefix), folder / name, settings, store, Path(run, name))
            for name, prefix in prefixes.items()
        }
        taken = rounds(installs, args.runs)
    tell(args, prefixes, taken)


def rounds(installs: dict[str, Install], runs: int) -> dict[str, list[Taken]]:
    """Each install, and the bare interpreter, once per round; every other round begins with the other install."""
    for install in installs.values():
        install.job()  # makes image and template where they are missing
    cases = {name: install.job for name, install in installs.items()} | {"bare": installs["own"].bare}
    taken: dict[str, list[Taken]] = {name: [] for name in cases}
    for number in range(runs):
        for name in list(cases) if number % 2 else reversed(cases):
            taken[name].append(cases[name]())
        progress(f"round {number + 1} of {runs}")
    progress("")
    return taken


def measured(command: Sequence[str], more: dict[str, str] | None = None) -> tuple[float, float]:
    """Processor time of this process and of those it waited for, and wall time, of a command that must succeed."""
    begin = time.perf_counter()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ, **(more or {})}
    )
    _, status, used = os.wait4(child.pid, 0)
    took = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"{' '.join(command)}: exit {child.returncode}")
    return used.ru_utime + used.ru_stime, took


def tell(args: object, prefixes: dict[str, str], taken: dict[str, list[Taken]]) -> None:
    own = {name: summary([one.own for one in times]) for name, times in taken.items()}
    wall = {name: summary([one.wall for one in times]) for name, times in taken.items()}
    bare = own["bare"]["median"]
    named = {**prefixes, "bare": "python3 -IS -c pass"}
    table(
        ("case", "own s", "best s", "worst s", "interpreter starts", "wall s"),
        [
            (named[n], own[n]["median"], own[n]["best"], own[n]["worst"], own[n]["median"] / bare, wall[n]["median"])
            for n in taken
        ],
    )
    ratios = {"interpreter starts": own["own"]["median"] / bare}
    if "against" in own:
        ratios["own / against"] = own["own"]["median"] / own["against"]["median"]
        ratios["wall / against"] = wall["own"]["median"] / wall["against"]["median"]
        ratios["interpreter starts of against"] = own["against"]["median"] / bare
    publish(args, {"benchmark": "own", "prefixes": prefixes, "own": own, "wall": wall, "ratios": ratios})  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
