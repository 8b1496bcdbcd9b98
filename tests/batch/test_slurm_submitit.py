"""submitit's README on a real Slurm: each job starts a machine within its allocation, and its function runs there."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
from tests.batch.lab.libraries import libraries
from tests.batch.slurm_fixtures import Cluster
from tests.batch.slurm_fixtures import cluster as cluster
from tests.live.conftest import ROOT, STORE
from tests.live.test_task_frameworks import block

LONGEST = 500
PROGRAM = """
import os

def add(a, b):
    return a + b

jobs.update_parameters(time=5, partition="batch")
job = jobs.submit(add, 5, 7)
inside = jobs.submit(lambda: (os.uname().nodename, os.environ["SLURM_JOB_ID"]))
print(job.result(), [job.result() for job in jobs.map_array(add, [1, 2], [10, 20])])
name, id = inside.result()
print(name != os.uname().nodename, id == inside.job_id)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * LONGEST),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the default image has Python 3.11"),
]


def test_a_function_runs_in_a_machine_of_its_slurm_job(cluster: Cluster) -> None:
    site = cluster.site
    venv = site.top / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", venv], check=True, timeout=LONGEST)
    subprocess.run([venv / "bin/pip", "install", "-qq", "submitit", "cloudpickle"], check=True, timeout=LONGEST)
    (venv / "lib/python3.11/site-packages/belljar.pth").write_text(f"{site.lib}\n{libraries()}\n")
    shutil.copy(ROOT / "examples/executor/submitit_jobs.py", venv / "lib/python3.11/site-packages")
    subprocess.run(["chmod", "-R", "u=rwX,go=rX", venv], check=True)
    program = cluster.script(f"#!{venv}/bin/python\n{block('jobs.submit')}\n{PROGRAM}", "program.py")
    env = {**cluster.lab.env, "BELLJAR_PATHS_NODE": str(site.node), "BELLJAR_PATHS_SITE_STORE": str(STORE)}
    done = site.run(str(program), user="bjalice", env=env, timeout=LONGEST, check=False)
    logs = b"".join(path.read_bytes() for path in (site.home("bjalice") / "jobs").glob("*.err"))
    lines = set(done.stdout.decode().splitlines())  # submitit warns of a Slurm without accounting
    assert {"32", "12 [11, 22]", "True True"} <= lines, (done.stdout + done.stderr + logs).decode()
    cluster.clean()
