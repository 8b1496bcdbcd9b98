"""A job whose variables and working directory are not those its process was started with: they are put in their place."""

from __future__ import annotations

import os
from dataclasses import replace

from belljar.batch.terms import Job, Surroundings


def settled(here: Surroundings, job: Job) -> Surroundings:
    """The surroundings with the job's own variables and folder; this process goes there and keeps of the variables
    what it keeps of every job's."""
    from belljar.cli.wrap import clear_environment

    if job.env is not None:
        here = replace(here, env=job.env)
        clear_environment(here)
    return here if job.cwd is None else replace(here, cwd=_enter(job.cwd))


def _enter(folder: bytes) -> bytes:
    """Go there; to /tmp where that cannot be done, as Slurm does."""
    try:
        os.chdir(folder)
    except (OSError, ValueError) as exc:
        from belljar.cli import complain

        complain(f"{os.fsdecode(folder)}: {getattr(exc, 'strerror', exc)}: going to /tmp instead", "")
        folder = b"/tmp"
        os.chdir(folder)
    return folder
