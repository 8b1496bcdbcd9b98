"""The pilot as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from belljar.host.service.telling import teller
from belljar.lease import jobfile
from belljar.lease.pilot.granted import granted
from belljar.lease.pilot.granted import rank as told_rank
from belljar.lease.pilot.machines import OwnMachines
from belljar.lease.pilot.pilot import ENDING, Pilot

HARMLESS = (signal.SIGUSR1, signal.SIGCONT)  # a warning before the end; what Slurm sends with TERM


def run(file: Path, rank: int | None, folder: Path, scratch: Path, environ: Mapping[str, str]) -> int:
    """*folder*: where pilots keep their journals on this host. Raises BadSetting, HostError."""
    job = jobfile.read(file)
    number = told_rank(environ) if rank is None else rank
    asyncio.run(_run(job, number, folder / f"{job.lease}.{job.attempt}.{number}.{os.getpid()}", scratch, environ))
    return 0


async def _run(job: jobfile.JobFile, rank: int, folder: Path, scratch: Path, environ: Mapping[str, str]) -> None:
    loop, tell = asyncio.get_running_loop(), teller(sys.stdout, as_json=False)
    pilot = Pilot(
        job, rank, granted(environ, scratch), folder, lambda changed: OwnMachines(job.lease, job.grace, changed), tell
    )
    for number in ENDING:
        loop.add_signal_handler(number, pilot.signalled, int(number))
    for number in HARMLESS:
        loop.add_signal_handler(number, lambda: None)
    await pilot.run()
