"""Jobs of many sizes by several users on a node that has run none yet: how many of them wait for a guest to boot, and how long a
start takes, beside a clone whose template has exactly its size. `--against` runs the same with another tree's command.

The node is fresh for each tree: the images of `--store` in a store of root's own, no template but the one that `belljar template
build` makes there, and users with empty homes. Root only.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import subprocess
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path
from typing import Any

from common import fresh_node, parser, progress, publish, summary, table

MIB = 1 << 20
SMALLEST, LARGEST = 192, 1400  # MiB


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--against", metavar="COMMAND", help="`belljar` of another tree")
    arguments.add_argument("--store", type=Path, default=Path("/var/lib/belljar"), help="whose images are taken")
    arguments.add_argument("--jobs", type=int, default=40)
    arguments.add_argument("--users", nargs="*", help="who runs them (default: four who are made, and removed)")
    arguments.add_argument("--exact", type=int, default=5, help="clones of exactly their template's size")
    args = arguments.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench/sizes.py: only root can run jobs of several users")
    users = args.users or [f"bj-sizes-{number}" for number in range(4)]
    try:
        if not args.users:
            for name in users:
                subprocess.run(["useradd", "--no-create-home", name], check=True)
        trees = {"this": args.belljar} | ({"against": args.against} if args.against else {})
        found = {name: on_a_fresh_node(command, users, args) for name, command in trees.items()}
    finally:
        if not args.users:
            for name in users:
                subprocess.run(["userdel", name], check=False)
    rows = [
        (name, one["jobs"], one["waited"], one["clones"], one["seconds"]["median"], one["exact"]["median"],
         one["seconds"]["median"] / one["exact"]["median"], one["grow"])
        for name, one in found.items()
    ]  # fmt: skip
    table(("tree", "jobs", "waited", "clones", "median s", "exact s", "times exact", "gate s"), rows)
    publish(args, {"benchmark": "sizes", "trees": found})


def on_a_fresh_node(command: str, users: list[str], args: Any) -> dict[str, Any]:
    """Root makes the template, then each job is run by the next user."""
    with tempfile.TemporaryDirectory(prefix="bj-sizes-", dir="/var/tmp") as name:
        node = Path(name)
        report = node / "report"
        root = {"PATH": os.environ["PATH"], "HOME": str(node), **fresh_node([command], node, args.store)}
        begin = time.perf_counter()
        subprocess.run(
            [command, "template", "build", "--image", args.image], env=root, check=True, stdout=subprocess.DEVNULL
        )
        built = time.perf_counter() - begin
        exact = [run_one(command, args.image, [], root, report)[0] for _ in range(args.exact)]
        jobs = []
        for number, (size, user) in enumerate(zip(sizes(args.jobs), cycle(users), strict=False)):
            progress(f"job {number + 1} of {args.jobs}")
            jobs.append(run_one(command, args.image, size, of_user(user, node), report, user))
        progress("")
    waited = [one for _, one in jobs if one["start"] != "clone" or "template" in one["phases"]]
    return {
        "jobs": len(jobs), "waited": len(waited) + 1, "clones": sum(one["start"] == "clone" for _, one in jobs),
        "seconds": summary([took for took, _ in jobs]), "exact": summary(exact), "template_seconds": built,
        "grow": summary([one["phases"].get("grow", 0.0) for _, one in jobs])["median"],
        "why_cold": sorted({one["start_reason"] for _, one in jobs if one["start"] != "clone"}),
    }  # fmt: skip


def sizes(count: int) -> list[list[str]]:
    """Of so many jobs, all different, in no order."""
    step = (LARGEST - SMALLEST) // count
    most = os.cpu_count() or 1
    found = [["--cpus", str(n % most + 1), "--memory", f"{SMALLEST + n * step}M"] for n in range(count)]
    random.Random(1).shuffle(found)
    return found


def of_user(name: str, node: Path) -> dict[str, str]:
    """An environment with an empty home, where this user has none yet."""
    home, entry = node / name, pwd.getpwnam(name)
    if not home.exists():
        home.mkdir(mode=0o700)
        (home / "run").mkdir(mode=0o700)
        for folder in (home, home / "run"):
            os.chown(folder, entry.pw_uid, entry.pw_gid)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"),
            "XDG_DATA_HOME": str(home / "data"), "BELLJAR_PATHS_SITE_STORE": str(node / "store")}  # fmt: skip


def run_one(
    command: str, image: str, size: list[str], env: dict[str, str], report: Path, user: str | None = None
) -> tuple[float, dict[str, Any]]:
    """Wall time of the whole command, and its outcome."""
    report.unlink(missing_ok=True)
    report.touch()
    report.chmod(0o666)
    begin = time.perf_counter()
    done = subprocess.run(
        [command, "run", "--image", image, *size, "--report", str(report), "--", "true"], env=env, cwd="/",
        stdin=subprocess.DEVNULL, user=user, group=pwd.getpwnam(user).pw_gid if user else None, extra_groups=[] if user else None,
    )  # fmt: skip
    took = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{command} run {' '.join(size)} by {user or 'root'}: exit {done.returncode}")
    return took, json.loads(report.read_text())


if __name__ == "__main__":
    main()
