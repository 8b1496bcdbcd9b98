"""A host with a bait: a Slurm in a network namespace with a bridge, and belljar in folders of its own. Its machines are real: Debian
with slurmd and munge from its packages, of the release that BELLJAR_BAIT_SUITE names (bookworm)."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.batch.lab.pool import QUEUE, PooledSlurm, read
from tests.batch.lab.site import Site
from tests.live.conftest import Belljar
from tests.live.net_lab import Lab, ip
from tests.roots import STATE, alone, folder_for_all

SUITE = os.environ.get("BELLJAR_BAIT_SUITE", "bookworm")
# Slurm looks for PMIx under its name for compilers, which only a package for compilers has.
PMIX = "ln -s libpmix.so.2 /usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so"
IMAGES: dict[str, tuple[tuple[str, ...], str]] = {  # packages beside Slurm's, and a command
    "slurm-node": ((), ""),
    "slurm-mpi": (("openmpi-bin", "python3-mpi4py"), PMIX),
    "slurm-other": (("bc",), ""),
}
IMAGE, MPI_IMAGE, OTHER_IMAGE = (f"{kind}-{SUITE}" for kind in IMAGES)
ADDRESS, BAIT = "10.99.0.1", "bait1"
NETWORK = {
    "BELLJAR_NETWORK_BRIDGES": "br0", "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.99.0.10-10.99.0.40/24",
    "BELLJAR_HOST_CPUS_PER_CPU": "0",
}  # fmt: skip
SETTINGS = """[bait]
name = "{bait}"
also = ["bait2"]
queue = "{queue}"
images = [{images}]
networks = {{ open = "br0" }}
shares = ["{homes}:{homes}:rw"]
conf = "{conf}"
key = "{key}"
{hosts}
max_cpus = {cpus}
min_memory = "64M"
min_disk = "64M"
cycle = 1
gone_after = 5
{more}
"""
PATIENCE = 240.0


def ready(belljar: Belljar, *images: str) -> None:
    """These workers' images are in the store: Debian with slurmd and munge, and no key. /etc/worker says which one it is."""
    for name in images:
        kind, _, suite = name.rpartition("-")
        packages, command = IMAGES[kind]
        words = ("--packages", "slurmd", "slurm-client", "munge", *packages, "--run", f"echo {name} > /etc/worker")
        words += ("--run", command) if command else ()
        with alone(folder_for_all(STATE / "images") / f"{name}.lock"):
            if name not in belljar("image", "list").stdout.decode().split():
                done = belljar("image", "build", "debian", "--suite", suite, "--name", name, *words, timeout=1800)
                assert done.returncode == 0, done.stderr


class Installed(Belljar):
    """The command as it is installed on a site, in folders of a test's own."""

    def __init__(self, site: Site, folder: Path) -> None:
        super().__init__(folder, settings=NETWORK)
        self.program = str(site.belljar)

    def argv(self, *words: str | bytes) -> list[str | bytes]:
        return [self.program, *words]


class Worker:
    """The host. *lines*: further ones of slurm.conf; *more*: of bait.toml; *conf*: settings of slurm.conf. *like_a_site*: as the
    pool's; bait.toml has no `hosts` then."""

    def __init__(
        self, net: Lab, site: Site, folder: Path, lines: str = "", *, images: Sequence[str] = (IMAGE,), more: str = "", cpus: int = 8, like_a_site: bool = False, **conf: str
    ) -> None:  # fmt: skip
        self.net, self.site, self.state = net, site, folder / "bait"
        self.belljar = Installed(site, folder)
        ready(self.belljar, *images)
        for words in (
            ("link", "add", "br0", "type", "bridge"), ("addr", "add", f"{ADDRESS}/24", "dev", "br0"), ("link", "set", "br0", "up"),
            # slurmctld asks for the name of who submits: here no resolver answers, so none must be waited for.
            ("route", "del", "default"),
        ):  # fmt: skip
            ip("-n", net.host, *words)
        self.slurm = PooledSlurm(
            net,
            site,
            ADDRESS,
            lines,
            like_a_site=like_a_site,
            **{"Prolog": str(folder / "prolog"), "SlurmdTimeout": "30", **conf},
        )
        self.slurm.baits = (BAIT, "bait2")
        self.daemon: subprocess.Popen[bytes] | None = None
        self.log, self.file = folder / "bait.log", folder / "bait.toml"
        hosts = "" if like_a_site else f'hosts = ["{ADDRESS} {os.uname().nodename.partition(".")[0]}"]'
        key = self.slurm.lab.folder / "munge/key/munge.key"
        self.file.write_text(
            SETTINGS.format(
                bait=BAIT, queue=QUEUE, images=", ".join(f'"{one}"' for one in images), homes=site.homes,
                conf=self.slurm.lab.conf, key=key, hosts=hosts, more=more, cpus=cpus,
            )
        )  # fmt: skip
        words = map(str, self.belljar.argv("bait", "arrive", "$SLURM_JOB_ID", "--state", str(self.state)))
        line = " ".join(one if one.startswith("$") else shlex.quote(one) for one in words)
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.exported().items())
        (folder / "prolog").write_text(f"#!/bin/sh\n{exports}case $SLURMD_NODENAME in bait*) exec {line};; esac\n")
        (folder / "prolog").chmod(0o755)

    def exported(self) -> dict[str, str]:
        """What a hook of Slurm's has to set: it is given next to nothing."""
        own = {name: value for name, value in self.belljar.env.items() if name.startswith(("BELLJAR_", "PATH"))}
        return {**own, "SLURM_CONF": str(self.slurm.lab.conf)}

    def argv(self, *words: str) -> list[str]:
        """In the namespace, with its own /sys: there the bridge is looked for."""
        return self.net.inside(self.net.host, *map(str, self.belljar.argv(*words)))

    def start(self) -> None:
        with open(self.log, "ab") as log:
            words = self.argv("bait", "run", str(self.file), "--state", str(self.state), "--format", "json")
            env = {**self.belljar.env, "SLURM_CONF": str(self.slurm.lab.conf)}
            self.daemon = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until(lambda: (self.state / "arrivals.sock").exists() or self.daemon.poll() is not None, "the bait to start")

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.daemon is not None
        self.daemon.send_signal(number)
        return self.daemon.wait(60)

    def json(self, *words: str) -> Any:
        done = self.belljar("bait", *words, "--state", str(self.state), "--format", "json")
        return json.loads(done.stdout)

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def states(self, job: str) -> list[str]:
        return [one["state"] for one in self.events() if one["event"] == "job" and one["job"] == job]

    def closed(self, *jobs: str) -> None:
        """Nothing of these jobs is left: no machine, no node."""
        until(
            lambda: all(self.states(job)[-1:] == ["closed"] for job in jobs),
            f"jobs {jobs} to be closed\n{self.said()}",
            PATIENCE,
        )
        until(lambda: set(self.slurm.nodes()) == {BAIT, "bait2"}, f"their nodes to be forgotten\n{self.said()}", 30)
        assert self.json("jobs")["jobs"] == []

    def said(self) -> str:
        return read(self.log).decode()[-4000:] + self.slurm.lab.tail()

    def written(self, name: str, user: str = "bjalice") -> str:
        """A file in the user's home; "" where there is none."""
        return read(self.site.home(user) / name).decode(errors="replace")

    def close(self) -> None:
        if self.daemon is not None and self.daemon.poll() is None:
            self.kill()
        self.slurm.down()
        self.belljar.close()


def until(is_so: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := is_so()):
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.2)
    return found
