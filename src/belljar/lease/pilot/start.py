"""The pilot as a process, and what it was really granted: by the kernel's limits on it, and by what the batch system says."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from belljar.host.files import free_bytes, remove_tree
from belljar.host.processes import boot_id
from belljar.host.room import GROUPS, memory_bounds, own_groups, usable_cpus
from belljar.lease import Facts, jobfile
from belljar.lease.pilot.machines import Machines
from belljar.lease.pilot.pilot import ENDING, Pilot
from belljar.model import MIB
from belljar.service.telling import teller

KEPT = 30 * 86400.0  # seconds; no lease is as long
HARMLESS = (signal.SIGUSR1, signal.SIGCONT)  # a warning before the end; what Slurm sends with TERM
# Number of this node among those of its job, as the starters of batch systems tell it. https://slurm.schedmd.com/srun.html#OPT_SLURM_PROCID
RANKS = ("SLURM_PROCID", "PBS_NODENUM", "OMPI_COMM_WORLD_RANK")
CPUS, MEMORY = ("SLURM_CPUS_ON_NODE", "NCPUS", "NSLOTS"), "SLURM_MEM_PER_NODE"


def run(file: Path, rank: int | None, folder: Path, scratch: Path, environ: Mapping[str, str]) -> int:
    """*folder*: where pilots keep their journals on this host. Raises BadSetting, HostError."""
    job = jobfile.read(file)
    _forget(folder)
    if rank is None:
        rank = int(next((environ[name] for name in RANKS if environ.get(name, "").isdigit()), "0"))  # 0: nobody says
    asyncio.run(_run(job, rank, folder / f"{job.lease}.{job.attempt}.{rank}.{os.getpid()}", scratch, environ))
    return 0


def _forget(folder: Path) -> None:
    """Journals of pilots that ended long ago."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > KEPT:
                remove_tree(folder / entry.name)


async def _run(job: jobfile.JobFile, rank: int, folder: Path, scratch: Path, environ: Mapping[str, str]) -> None:
    loop, tell = asyncio.get_running_loop(), teller(sys.stdout, as_json=False)
    pilot = Pilot(job, rank, granted(environ, scratch), folder, partial(Machines, job.lease, job.grace), tell)
    for number in ENDING:
        loop.add_signal_handler(number, pilot.signalled, int(number))
    for number in HARMLESS:
        loop.add_signal_handler(number, lambda: None)
    await pilot.run()


def granted(environ: Mapping[str, str], scratch: Path) -> Facts:
    """The least of what each limit leaves."""
    counts = [int(environ[name]) for name in CPUS if environ.get(name, "").isdigit()]
    memory = [bound.left(()) for bound in memory_bounds()]
    if environ.get(MEMORY, "").isdigit():
        memory.append(int(environ[MEMORY]) * MIB)
    cpus = min(usable_cpus(GROUPS, own_groups()), *(count for count in counts if count > 0), float(os.cpu_count() or 1))
    return Facts(host=environ.get("SLURMD_NODENAME") or os.uname().nodename, boot=boot_id(), cpus=max(1, int(cpus)),
                 memory=max(0, min(memory)), disk=max(1, free_bytes(scratch)),
                 kvm=os.access("/dev/kvm", os.R_OK | os.W_OK))  # fmt: skip
