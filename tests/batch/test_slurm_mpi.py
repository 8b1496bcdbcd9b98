"""Jobs of two machines that talk MPI over the bridge: ranks started by srun (PMIx) and by Open MPI's own mpirun; and the batch
system asked from inside a job. Their image is built by the first run, in a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.worker import MPI_IMAGE, PATIENCE, Worker
from tests.live.net_lab import Lab

pytestmark = pytest.mark.slow  # the image and the machines take four minutes of two cores
MIB = 1 << 20
# Each rank gives its right neighbour a block and has one of its left; then all agree on a sum. What came in is what the card counted.
RING = """import socket
from pathlib import Path
from mpi4py import MPI

def heard():
    return sum(int((card / "statistics/rx_bytes").read_text()) for card in Path("/sys/class/net").iterdir() if card.name != "lo")

ranks, host, before = MPI.COMM_WORLD, socket.gethostname(), heard()
rank, size = ranks.Get_rank(), ranks.Get_size()
block = bytes([65 + rank]) * (1 << 20)
left, got = ranks.sendrecv((host, block), dest=(rank + 1) % size, source=(rank - 1) % size)
total = ranks.allreduce(rank + 1)
assert len(got) == 1 << 20 and set(got) == {65 + (rank - 1) % size}
print(*ranks.gather(f"{rank}/{size} {host} {left} {total} {heard() - before}", root=0) or (), sep="\\n", end="")
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    net, site = Lab(), Site("mpi")
    made = Worker(net, site, tmp_path_factory.mktemp("mpi"), images=(MPI_IMAGE,))
    try:
        (site.home("bjalice") / "ring.py").write_text(RING)
        made.slurm.up()
        made.start()
        yield made
    finally:
        made.close()
        site.close()
        net.close()


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param("srun --mpi=pmix python3 ring.py", id="srun"),
        pytest.param("mpirun python3 ring.py", id="mpirun"),
    ],
)
def test_ranks_on_two_machines_exchange_data_over_the_bridge(worker: Worker, launch: str) -> None:
    job = worker.slurm.submit(f"{launch}; exit $?", "--nodes=2", "--ntasks-per-node=1", "--time=10")
    record = worker.slurm.lab.ended(job, PATIENCE)
    problem = worker.written(f"{job}.err") + worker.said()
    assert (record["JobState"], record["ExitCode"]) == ("COMPLETED", "0:0"), problem
    rows = [row.split() for row in worker.written(f"{job}.out").splitlines()]
    assert [row[0] for row in rows] == ["0/2", "1/2"], problem
    hosts = [row[1] for row in rows]
    assert sorted(hosts) == sorted(record["NodeList"].split(",")) and len(set(hosts)) == 2
    assert [row[2] for row in rows] == hosts[::-1] and {row[3] for row in rows} == {"3"}
    assert all(int(row[4]) > MIB for row in rows), "the blocks did not come by the cards"
    worker.closed(job)


def test_a_job_starts_steps_and_submits_another_from_inside(worker: Worker) -> None:
    (worker.site.home("bjalice") / "child.sh").write_text("#!/bin/sh\nhostname; cat /etc/worker; exit 5\n")
    steps = "srun --ntasks=1 sh -c 'echo step $SLURM_STEP_ID $(hostname)'; " * 2
    child = "sbatch --parsable --nodes=1 --ntasks=1 --output=%j.out --error=%j.err child.sh"
    ask = "squeue --noheader --jobs=$SLURM_JOB_ID --format='%i %T %N'"
    job = worker.slurm.submit(f"{steps}{ask}; {child}")
    record = worker.slurm.lab.ended(job, PATIENCE)
    node, problem = record["NodeList"], worker.written(f"{job}.err") + worker.said()
    said = worker.written(f"{job}.out").splitlines()
    assert len(said) == 4 and said[:3] == [f"step 0 {node}", f"step 1 {node}", f"{job} RUNNING {node}"], (
        f"{said}\n{problem}"
    )
    ended = worker.slurm.lab.ended(said[3], PATIENCE)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "5:0"), worker.said()
    assert worker.written(f"{said[3]}.out") == f"{ended['NodeList']}\n{MPI_IMAGE}\n" and ended["NodeList"] != node
    worker.closed(job, said[3])
    assert worker.belljar.leftovers() == []
