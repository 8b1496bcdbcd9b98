"""Slurm's cloud nodes: what slurmctld tells a ResumeProgram, and the machine that follows from it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from belljar.bait import Settings, cloud
from belljar.cli.bait import bait as verbs
from belljar.errors import BadOption, HostError, NotPermitted
from belljar.model import GIB, MIB, RunPayload
from belljar.pool import JobState, JobView, NodeState, NodeView, load
from belljar.records import replace

# SLURM_RESUME_FILE of Slurm 22.05.8, and what later releases add.
RECORDED = {"jobs": [{"job_id": 1, "nodes": "cloud1"}], "all_nodes": "cloud1"}
LATER = {"all_nodes_resume": "cloud[1-3]", "jobs": [{"job_id": 7, "nodes_resume": "cloud[1-2]", "nodes_alloc": "cloud[1-4]", "features": "el9"}]}  # fmt: skip
POOL = load("slurm")
NODE = NodeView("cloud1", NodeState.AWAY, ("cloud", "worker"), "", 2, 1000 * MIB)
JOB = JobView("1", JobState.RUNNING, owner="root", uid=0, network="closed", memory=GIB, number="1")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("BELLJAR_PATHS_STORE", str(tmp_path))
    (tmp_path / "slurm.conf").write_text("SlurmctldHost=head\nNodeName=cloud[1-4] State=CLOUD\nSlurmdSpoolDir=/x\n")
    return Settings(
        images=("debian12", "worker"),
        networks=(("open", "br0"), ("closed", "br1")),
        conf=tmp_path / "slurm.conf",
        overhead=24 * MIB,
    )


def test_a_resume_file_tells_which_job_a_node_is_for() -> None:
    assert cloud.jobs_of(RECORDED) == {"1": "cloud1"} and cloud.jobs_of(LATER) == {"7": "cloud[1-2]"}
    assert cloud.jobs_of({}) == {} and cloud.jobs_of({"jobs": None}) == {}
    for wrong in ([{"job_id": "1", "nodes": "a"}], [{"job_id": 1}], ["x"]):
        with pytest.raises(BadOption, match="without a number or nodes"):
            cloud.jobs_of({"jobs": wrong})


def test_a_cloud_node_gets_the_image_that_one_of_its_features_names(settings: Settings) -> None:
    request = cloud.request_for("cloud1", NODE, JOB, settings, POOL, ())
    assert (request.name, request.machine.image, request.machine.cpus, request.machine.memory) == (
        "cloud1",
        "worker",
        2,
        1024 * MIB,
    )
    assert request.machine.network_class == "bridge:br1" and dict(request.labels)[cloud.CLOUD] == "cloud1"
    assert isinstance(request.work, RunPayload)
    env, (file, _) = dict(request.work.payload.env), request.work.payload.files
    assert env[b"CONF"] == b"" and env[b"NODE"] == b"cloud1" and env[b"PASSWD"].startswith(b"root:x:0:")
    assert b"NodeName=cloud[1-4] State=CLOUD\n" in (file.data or b"") and b"SlurmdSpoolDir=/x" not in (file.data or b"")
    alone = cloud.request_for("cloud1", NODE, None, settings, POOL, ())
    assert alone.machine.network_class == "bridge:br0"


@pytest.mark.parametrize(("node", "why"), [(None, "unknown to Slurm"), (replace(NODE, features=()), "it has none")])
def test_a_node_that_no_image_is_for_is_refused(node: Any, why: str, settings: Settings) -> None:
    with pytest.raises(BadOption, match=f"cloud1: none of its features is an image of `bait.images` .{why}."):
        cloud.request_for("cloud1", node, JOB, settings, POOL, ())


def test_a_network_class_that_is_not_there_is_refused(settings: Settings) -> None:
    """Its user wrote it: the other nodes of the same ResumeProgram are made all the same."""
    with pytest.raises(BadOption, match="network class nosuch: there is open, closed here"):
        cloud.request_for("cloud1", NODE, replace(JOB, network="nosuch"), settings, POOL, ())


async def test_what_slurm_says_in_no_known_words_is_no_defect(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def garbled(argv: tuple[str, ...]) -> bytes:
        return b"cloud1\n" if "hostnames" in argv else b"slurm_load_node: what?\n"

    monkeypatch.setattr(cloud, "command", garbled)
    with pytest.raises(HostError, match="slurm_load_node") as told:
        await cloud.resume("cloud1", None, settings, POOL, ())
    assert "scontrol" in told.value.hint


@pytest.mark.parametrize("text", ["", "-h"])
async def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(BadOption, match="is not a list of nodes"):
        await cloud.hostnames(text)


@pytest.mark.parametrize("act", ["suspend", "list"])
def test_who_is_not_root_hears_that_the_machines_are_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """slurmctld runs its programs as SlurmUser; a suspend that found no machine of that user's once exited with 0."""
    monkeypatch.setattr("os.geteuid", lambda: 64030)
    with pytest.raises(NotPermitted, match="root's machines, and this is uid 64030") as refused:
        verbs.node(Namespace(act=act, here=True, file=tmp_path / "none", nodes="cloud1", format="table"), None)  # type: ignore[arg-type]
    assert "sudo" in refused.value.hint
