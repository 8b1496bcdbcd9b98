"""Which devices each batch system says that a job was given, by recorded environments."""

from __future__ import annotations

import pytest

from belljar import batch
from belljar.errors import HostError

RECORDED = [
    ("slurm", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,3", "SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}, {"gpu": ["0", "3"]}),
    ("slurm", {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2", "SLURM_GPUS_ON_NODE": "0"}, {}),
    ("slurm", {"SLURM_JOB_ID": "7"}, {}),
    ("gridengine", {"JOB_ID": "7", "SGE_HGR_gpu": "1 2", "SGE_HGR_IB": "mlx5_3", "SGE_HGR_port": ""}, {"gpu": ["1", "2"], "ib": ["mlx5_3"]}),
    ("gridengine", {"JOB_ID": "7", "SGE_ROOT": "/opt/sge"}, {}),
    ("htcondor", {"_CONDOR_AssignedGPUs": "CUDA0,CUDA1", "CUDA_VISIBLE_DEVICES": "0,1"}, {"gpu": ["0", "1"]}),
    ("htcondor", {"_CONDOR_AssignedGPUs": "10000"}, {}),  # as a real starter has it for a job without one
    ("htcondor", {"_CONDOR_AssignedGPUs": "GPU-c4a646d7, GPU-6a96bd13"}, {"gpu": ["GPU-c4a646d7", "GPU-6a96bd13"]}),
    ("htcondor", {"_CONDOR_JOB_AD": "/x/.job.ad"}, {}),
    ("openpbs", {"PBS_JOBID": "7.s", "CUDA_VISIBLE_DEVICES": "GPU-8dcd4e1a-b6b5"}, {"gpu": ["GPU-8dcd4e1a-b6b5"]}),
    ("openpbs", {"PBS_JOBID": "7.s", "CUDA_VISIBLE_DEVICES": "0"}, {}),
    ("torque", {"PBS_JOBID": "7.s", "CUDA_VISIBLE_DEVICES": "0"}, {}),
    ("lsf", {"LSB_JOBID": "7", "CUDA_VISIBLE_DEVICES": "0"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("system", "env", "given"), RECORDED)
def test_what_a_job_was_given(system: str, env: dict[str, str], given: dict[str, list[str]]) -> None:
    assert batch.load(system).dialect.devices(env) == given


def test_gpus_that_slurm_counts_and_does_not_name_are_a_fault_of_the_node() -> None:
    with pytest.raises(HostError, match="does not tell which"):
        batch.load("slurm").dialect.devices({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "1"})
