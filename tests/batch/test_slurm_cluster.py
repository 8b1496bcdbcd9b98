"""A private Slurm of three machines, leased from a real one: docs/operate/lease/clusters.md, followed command by command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.batch.lab.lease import LeaseSite
from tests.batch.lab.page import follow
from tests.live.conftest import ROOT
from tests.roots import STATE

from belljar.host.locks import locked

IMAGE, PACKAGES = "debian12-slurm", ("openssh-server", "slurmctld", "slurmd", "slurm-client", "munge")
# `belljar`, as it is where a service runs: its door is the test's, which each verb that asks by it is told.
WRAPPER = """#!/bin/sh -e
case "$1 $2 $3" in
    "lease cluster check") exec {belljar} "$@" ;;
    "lease cluster "*) verbs="$1 $2 $3"; shift 3 ;;
    "lease ssh "*) shift 2; exec {belljar} lease ssh --door {door} -i {key} "$@" ;;
    *) verbs="$1 $2"; shift 2 ;;
esac
exec {belljar} $verbs --door {door} "$@"
"""


@pytest.fixture
def site() -> Iterator[LeaseSite]:
    site = LeaseSite(nodes=3)
    try:
        with locked(STATE / f"{IMAGE}.lock", timeout=1800, what="the image with Slurm"):
            if IMAGE not in site.belljar("image", "list").stdout.decode().split():
                done = site.belljar("image", "build", "debian", "--name", IMAGE, "--packages", *PACKAGES, timeout=1800)
                assert done.returncode == 0, done.stderr.decode()
        yield site.up()
    finally:
        site.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_newcomer_who_follows_the_page_runs_a_job_on_a_cluster_of_their_own(site: LeaseSite) -> None:
    (site.folder / "bin").mkdir()
    wrapper = site.folder / "bin/belljar"
    wrapper.write_text(
        WRAPPER.format(belljar=site.folder / "belljar", door=site.folder / "door", key=site.folder / "id")
    )
    wrapper.chmod(0o755)
    home = site.folder / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh/id_ed25519.pub").write_bytes((site.folder / "id.pub").read_bytes())
    env = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}", "HOME": str(home)}
    began, took = time.monotonic(), list[str]()

    def run(commands: str, as_user: bool) -> str:
        done = subprocess.run(
            ["sh", "-euc", commands], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
        )  # fmt: skip
        took.append(f"{time.monotonic() - began:6.1f} s  {commands.splitlines()[0]}")
        assert done.returncode == 0, f"$ {commands}{done.stdout}\n{site.story()}"
        return str(done.stdout)

    print("\n".join(follow(ROOT / "docs/operate/lease/clusters.md", run)))
    print("\n".join(took))
    site.until_nothing_is_left()


def cluster(site: LeaseSite, verb: str, *words: str) -> str:
    done = site.belljar("lease", "cluster", verb, "--door", str(site.door), *words, timeout=600)
    assert done.returncode == 0, f"{done.stderr.decode()}\n{site.story()}"
    return str(done.stdout.decode())


def state(site: LeaseSite, name: str) -> tuple[str, str, dict[str, Any]]:
    """Of the cluster, of that machine, and what else is told of this."""
    (found,) = json.loads(cluster(site, "status", "slurm", "--format", "json"))["clusters"]
    (one,) = [one for one in found["nodes"] if one["name"] == name]
    return found["state"], one["state"], one


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machines_that_reboot_are_ready_again_when_their_services_run(site: LeaseSite) -> None:
    document = str(ROOT / "examples/clusters/slurm/cluster.toml")
    cluster(site, "up", document, "--key", str(site.folder / "id.pub"), "--wait")
    for name in ("head", "worker1"):
        site("reboot", state(site, name)[2]["machine"])
        site.until(lambda name=name: state(site, name)[:2] == ("configuring",) * 2, "it is known that it rebooted")  # type: ignore[misc]
        site.until(lambda name=name: state(site, name)[0] != "configuring", "its services run again")  # type: ignore[misc]
        assert state(site, name)[0] == "ready", cluster(site, "status", "slurm")
        assert site.ssh("slurm/head", "srun -N 2 hostname | sort") == "worker1\nworker2\n"
    cluster(site, "release", "slurm")
    site.until_nothing_is_left()
