"""Slurm's own way with real guests: slurmctld has a machine made for a CLOUD node when a job wants it, and ended afterwards."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.batch.lab.pool import read
from tests.batch.lab.site import Site
from tests.batch.lab.worker import IMAGE, PATIENCE, Worker, until
from tests.live.net_lab import Lab

from belljar.pool import NodeState

pytestmark = pytest.mark.slow

SUDOERS = Path("/etc/sudoers.d/belljar-test")
LINES = f"""NodeName=cloud[1-2] CPUs=1 RealMemory=700 Feature={IMAGE} State=CLOUD
PartitionName=cloud Nodes=cloud[1-2] SuspendTime=1 OverSubscribe=EXCLUSIVE State=UP
"""


# As in docs/batch/bait/reference.md.
NODES_ARE_THERE = """#!/bin/sh
for second in $(seq 300); do
    sinfo --noheader --Node --all --nodes="$SLURM_JOB_NODELIST" --format=%T | grep -q '[#~*%]' || exit 0
    sleep 1
done
"""


class Clouds(Worker):
    """slurmctld's programs, and a prolog of slurmctld's where *waits*."""

    def __init__(self, net: Lab, site: Site, folder: Path, *, waits: bool) -> None:
        self.programs = site.top / "programs"  # where `slurm` may go
        self.programs.mkdir(mode=0o755)
        programs = {
            "ResumeProgram": str(self.programs / "resume"), "SuspendProgram": str(self.programs / "suspend"), "ResumeTimeout": "200",
            "SuspendTimeout": "20", "SuspendTime": "INFINITE", "ResumeRate": "0", "SuspendRate": "0", "BatchStartTimeout": "60",
            "SlurmctldParameters": "cloud_reg_addrs,idle_on_node_suspend", "TreeWidth": "65533",
        }  # fmt: skip
        if waits:
            programs["PrologSlurmctld"] = str(self.programs / "nodes-are-there")
            exports = f"export SLURM_CONF={site.top}/slurm/etc/slurm.conf PATH=/usr/bin:/bin\n"
            self.script(self.programs / "nodes-are-there", NODES_ARE_THERE.replace("sh\n", f"sh\n{exports}", 1))
        super().__init__(net, site, folder, LINES, like_a_site=True, **programs)
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in self.exported().items())
        words = self.argv("node", "$1", "$2", "--file", str(self.file), "--state", str(folder / "cloud"))
        line = " ".join(one if one.startswith("$") else shlex.quote(one) for one in words)
        self.script(self.programs / "belljar-node", f'#!/bin/sh\n{exports}exec {line} ${{3:+--resume-file "$3"}}\n')
        for name in ("resume", "suspend"):  # as in docs/batch/bait/reference.md: slurmctld runs them as `slurm`
            (log := self.programs / f"{name}.log").touch()
            shutil.chown(log, "slurm")
            call = f'sudo -n {self.programs}/belljar-node {name} "$1" "$SLURM_RESUME_FILE" >>{log} 2>&1'
            self.script(self.programs / name, f"#!/bin/sh\nexec {call}\n")
        SUDOERS.write_text(f"slurm ALL=(root) NOPASSWD: {self.programs}/belljar-node\n")
        SUDOERS.chmod(0o440)

    @staticmethod
    def script(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)


@pytest.fixture(params=[False, True], ids=["alone", "waits"])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Clouds]:
    net, site = Lab(), Site("cloud")
    made = Clouds(net, site, tmp_path, waits=request.param)
    try:
        made.slurm.up()
        yield made
    finally:
        SUDOERS.unlink(missing_ok=True)
        made.close()
        site.close()
        net.close()


def test_a_cloud_node_is_a_machine_while_a_job_wants_it(worker: Clouds, tmp_path: Path) -> None:
    job = worker.slurm.submit(
        "date +%s.%N > began; hostname; id -un; exit 6", "--partition=cloud", f"--constraint={IMAGE}"
    )
    until(lambda: "cloud1" in worker.belljar("node", "list", "--here").stdout.decode(), "a machine", PATIENCE)
    until(lambda: worker.slurm.nodes()["cloud1"].state not in (NodeState.AWAY, NodeState.OUT), "its node", PATIENCE)
    there = time.time()
    record = worker.slurm.lab.ended(job, PATIENCE)
    log = read(worker.programs / "resume.log").decode() or "ResumeProgram was not run"
    assert (record["ExitCode"], record["NodeList"]) == ("6:0", "cloud1"), log + worker.slurm.lab.tail()
    assert (worker.site.home("bjalice") / f"{job}.out").read_text() == "cloud1\nbjalice\n"
    rows = worker.slurm.lab.text("sacct", "-nXP", "-j", job, "-o", "State,ExitCode,NodeList").split()
    assert rows == ["FAILED|6:0|cloud1"], "slurmdbd has the job once"
    print(f"the job began {float(worker.written('began')) - there:.1f} s after its node was there")
    waits = "nodes-are-there" in worker.slurm.lab.conf.read_text()
    complete = read(worker.slurm.lab.folder / "log/slurmctld.log").decode()
    assert ("prolog_running_decr: Configuration for JobId=" in complete) is waits, complete[-4000:]
    until(lambda: worker.belljar.leftovers() == [], f"the machine to end\n{worker.slurm.lab.tail()}", PATIENCE)


@pytest.mark.parametrize("worker", [False], indirect=True, ids=["alone"])
def test_without_root_nothing_is_done_and_that_is_an_error(worker: Clouds) -> None:
    log = worker.programs / "resume.log"
    worker.script(worker.programs / "resume", f'#!/bin/sh\nexec {worker.site.belljar} node resume "$1" >>{log} 2>&1\n')
    worker.slurm.submit("true", "--partition=cloud", f"--constraint={IMAGE}")
    said = until(lambda: read(log).decode(), "slurmctld to run its program", PATIENCE)
    assert "cloud nodes are root's machines" in said and "sudo" in said, said
