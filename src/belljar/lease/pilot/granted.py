"""What a pilot was really granted: by the kernel's limits on this process, and by what the batch system says where it sets none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from belljar.host.processes import boot_id
from belljar.host.room import free, memory_bounds, own_groups, usable_cpus
from belljar.lease import Facts
from belljar.model import KIB, MIB

GROUPS = Path("/sys/fs/cgroup")
# Number of this node among those of its job, as the starters of batch systems tell it. https://slurm.schedmd.com/srun.html#OPT_SLURM_PROCID
RANKS = ("SLURM_PROCID", "PBS_TASKNUM", "OMPI_COMM_WORLD_RANK")
CPUS, MEMORY = ("SLURM_CPUS_ON_NODE", "NCPUS", "NSLOTS"), "SLURM_MEM_PER_NODE"


def granted(environ: Mapping[str, str], scratch: Path, groups: Path = GROUPS) -> Facts:
    """The least of what each limit leaves."""
    told = [int(environ[name]) for name in CPUS if environ.get(name, "").isdigit()]
    memory = [bound.left(()) for bound in memory_bounds(groups=groups)]
    if environ.get(MEMORY, "").isdigit():
        memory.append(int(environ[MEMORY]) * MIB)
    cpus = min(usable_cpus(groups, own_groups()), *(one for one in told if one > 0), float(os.cpu_count() or 1))
    return Facts(
        host=environ.get("SLURMD_NODENAME") or os.uname().nodename, boot=boot_id(), cpus=max(1, int(cpus)),
        memory=max(0, min(memory)), disk=free(scratch)[0] * KIB, kvm=os.access("/dev/kvm", os.R_OK | os.W_OK),
    )  # fmt: skip


def rank(environ: Mapping[str, str]) -> int:
    """0 where nobody says."""
    found = next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), "0")
    return int(found)
