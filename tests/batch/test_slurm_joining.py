"""Nodes that join a real Slurm as nobody asked them to: under a name of their own, and under one that has joined already."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.batch.lab.pool import QUEUE, PooledSlurm, entering
from tests.batch.lab.site import Site
from tests.live.net_lab import Lab, ip
from tests.unit.bait.plain import nothing
from tests.unit.bait.test_daemon import SETTINGS, Machines

from belljar.bait.daemon import Daemon
from belljar.bait.machines.keeper import feature_of
from belljar.pool import JobState, NodeState

VM, STRANGER = "vm0123456789abx", "wn05"


@pytest.fixture
def slurm() -> Iterator[PooledSlurm]:
    net, site = Lab(), Site("joining")
    made = PooledSlurm(net, site)
    try:
        made.up()
        yield made
    finally:
        made.down()
        site.close()
        net.close()


def joined(slurm: PooledSlurm, name: str) -> None:
    slurm.lab.until(
        lambda: name in slurm.nodes() and slurm.nodes()[name].state is NodeState.IDLE, f"{name} has joined", 30
    )


async def test_a_node_with_a_baits_feature_and_a_name_of_its_own_is_drained_and_removed(
    slurm: PooledSlurm, tmp_path: Path
) -> None:
    slurm.join(STRANGER)
    joined(slurm, STRANGER)
    features = f"{QUEUE},{feature_of('bait1')}"
    slurm.run(
        ("scontrol", "update", f"NodeName={STRANGER}", f"AvailableFeatures={features}", f"ActiveFeatures={features}")
    )
    told: list[tuple[str, dict[str, Any]]] = []

    async def run(argv: tuple[str, ...]) -> bytes:
        return await asyncio.to_thread(slurm.run, argv)

    machines = Machines()
    machines.alive = {"0123456789ab"}  # it may be this one: it has not joined
    daemon = Daemon(
        SETTINGS, tmp_path, slurm.pool, machines, lambda event, **facts: told.append((event, facts)), nothing, run_command=run,
    )  # fmt: skip
    await daemon.look()
    assert slurm.nodes()[STRANGER].state is NodeState.OUT
    assert ("cleaning up", {"act": "close", "of": STRANGER}) in told
    machines.alive.clear()
    slurm.leave(STRANGER)
    await daemon.look()
    assert STRANGER not in slurm.nodes() and ("cleaning up", {"act": "remove", "of": STRANGER}) in told


def test_a_second_slurmd_under_a_nodes_name_changes_nothing(slurm: PooledSlurm) -> None:
    slurm.join(VM)
    joined(slurm, VM)
    first = slurm.lab.node(VM)["NodeAddr"]
    host, folder = slurm.net.host, slurm.lab.folder
    other = f"{host}q"
    ip("netns", "add", other)
    try:
        for words in (
            ("-n", other, "link", "set", "lo", "up"),
            ("-n", host, "link", "add", "q0", "type", "veth", "peer", "name", "q1", "netns", other),
            ("-n", host, "addr", "add", "10.76.0.1/24", "dev", "q0"), ("-n", host, "link", "set", "q0", "up"),
            ("-n", other, "addr", "add", "10.76.0.2/24", "dev", "q1"), ("-n", other, "link", "set", "q1", "up"),
            ("-n", other, "route", "add", "default", "via", "10.76.0.1"),
        ):  # fmt: skip
            ip(*words)
        conf = (folder / f"{VM}.conf").read_text()
        for name in ("run/slurmd-%n", "log/slurmd-%n", "spool/%n"):
            conf = conf.replace(f"{folder}/{name}", f"{folder}/{name.replace('%n', 'second')}")
        (folder / "second.conf").write_text(conf)
        (folder / "spool/second").mkdir()
        start = f"hostname {VM}; exec slurmd -f {folder}/second.conf -Z -N {VM} --conf 'Feature={QUEUE} RealMemory=700 CPUs=1'"
        subprocess.run(
            [*entering(other), "unshare", "--uts", "sh", "-c", start], env=slurm.lab.env, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=True,
        )  # fmt: skip
        slurm.lab.until(
            lambda: "sent back" in (folder / "log/slurmd-second.log").read_text(), "the second has registered", 30
        )
        assert set(slurm.nodes()) == {"bait1", "bait2", VM} and slurm.lab.node(VM)["NodeAddr"] == first
        job = slurm.submit("ip -o -4 addr show > where; exit 5", "--hold", "--mem=100")
        slurm.run(*slurm.pool.move(slurm.jobs()[job], (VM,), QUEUE))
        slurm.lab.until(lambda: slurm.jobs()[job].state is JobState.ENDED, "the job has ended", 60)
        assert first in (slurm.site.home("bjalice") / "where").read_text() and slurm.lab.job(job)["ExitCode"] == "5:0"
    finally:
        slurm.lab.stop("slurmd-second")
        ip("netns", "delete", other)
