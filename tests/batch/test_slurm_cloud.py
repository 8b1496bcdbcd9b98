"""Slurm's own way with real guests: slurmctld has a machine made for a CLOUD node when a job wants it, and ended afterwards."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import IMAGE, PATIENCE, Worker, until
from tests.live.net_lab import Lab

pytestmark = pytest.mark.slow

LINES = f"""NodeName=cloud[1-2] CPUs=1 RealMemory=700 Feature={IMAGE} State=CLOUD
PartitionName=cloud Nodes=cloud[1-2] SuspendTime=1 OverSubscribe=EXCLUSIVE State=UP
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    net, site = Lab(), Site("cloud")
    programs = {
        "ResumeProgram": str(tmp_path / "resume"), "SuspendProgram": str(tmp_path / "suspend"), "ResumeTimeout": "200",
        "SuspendTimeout": "20", "SuspendTime": "INFINITE", "ResumeRate": "0", "SuspendRate": "0", "BatchStartTimeout": "60",
        "SlurmctldParameters": "cloud_reg_addrs,idle_on_node_suspend", "TreeWidth": "65533",
    }  # fmt: skip
    made = Worker(net, site, tmp_path, lines=LINES, **programs)
    for name, options in (("resume", ("--file", str(made.file))), ("suspend", ())):
        words = made.argv("node", name, "$1", *options)
        line = " ".join(one if one.startswith("$") else shlex.quote(one) for one in words)
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in made.exported().items())
        (tmp_path / name).write_text(f"#!/bin/sh\n{exports}exec {line} >> {tmp_path}/{name}.log 2>&1\n")
        (tmp_path / name).chmod(0o755)
    try:
        made.slurm.up()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


def test_a_cloud_node_is_a_machine_while_a_job_wants_it(worker: Worker, tmp_path: Path) -> None:
    job = worker.slurm.submit("hostname; id -un; exit 6", "--partition=cloud", f"--constraint={IMAGE}")
    record = worker.slurm.lab.ended(job, PATIENCE)
    log = (tmp_path / "resume.log").read_text() if (tmp_path / "resume.log").exists() else "ResumeProgram was not run"
    assert (record["ExitCode"], record["NodeList"]) == ("6:0", "cloud1"), log + worker.slurm.lab.tail()
    assert (worker.site.home("bjalice") / f"{job}.out").read_text() == "cloud1\nbjalice\n"
    until(lambda: worker.belljar.leftovers() == [], f"the machine to end\n{worker.slurm.lab.tail()}", PATIENCE)
