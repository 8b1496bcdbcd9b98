"""`belljar soak` under real batch systems: jobs of an ordinary user, at most so many at once, start times from the ledger."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from tests.batch.lab.gridengine import QUEUE, GridEngine
from tests.batch.lab.site import Site
from tests.batch.slurm_fixtures import IMAGE, Cluster

WORDS = ("soak", "--jobs", "4", "--at-once", "1", "--queue", "2", "--image", IMAGE, "--format", "json")


def looks_right(printed: bytes, system: str) -> None:
    """Every job ran in a clone, in turn, and its row of the ledger was found."""
    made = json.loads(printed)
    (starts, vmbatch) = made["starts"]
    assert (made["jobs"], made["failed"], made["failures"]) == (4, 0, []), made
    assert (starts["batch"], starts["context"], starts["jobs"], starts["clones"]) == (system, "ramdisk", 4, 4)
    assert 0 < starts["min"] <= starts["mean"] <= starts["max"] < vmbatch["max"]


def took_turns(state: Path) -> None:
    rows = [json.loads(line) for path in state.glob("ledger-*") for line in path.read_text().splitlines()]
    machines = sorted((row["started"], row["ended"]) for row in rows if row["kind"] == "job")
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(machines)), machines


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jobs_under_slurm(cluster: Cluster) -> None:
    state = cluster.site.home("bjalice") / "soak"
    words = (
        str(cluster.site.belljar),
        "--config",
        str(cluster.site.config),
        *WORDS,
        "--batch",
        "slurm",
        "--option=--mem=600",
    )
    done = cluster.site.run(*words, "--state", str(state), user="bjalice", timeout=900, env=cluster.lab.env)
    looks_right(done.stdout, "slurm")
    took_turns(state)
    assert not list(state.glob("*.out"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_jobs_under_grid_engine() -> None:
    site = Site("soak")
    engine = None
    try:
        site.configure()
        engine = GridEngine(site)
        belljar = (str(site.belljar), "--config", str(site.config))
        engine.run(*belljar, "batch", "install", "gridengine", "--queue", QUEUE, "--prefix", str(site.top), timeout=120)
        state = site.home("bjalice") / "soak"
        options = ("--batch", "gridengine", "--option=-l", "--option=mem_free=600M,h_rt=0:10:0", "--state", str(state))
        looks_right(engine.run(*belljar, *WORDS, *options, user="bjalice", timeout=900).stdout, "gridengine")
        took_turns(state)
    finally:
        if engine is not None:
            engine.close()
        site.close()
