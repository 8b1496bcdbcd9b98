"""The door of the soak: job after job, each in a fresh machine. Does every one start, how quickly, does anything grow?

    run.Soak(plan, folder).run()    runs jobs until there are so many in the folder
    report.of(folder)               what all jobs of the folder say together; plots.draw: the same as a picture

All that is known lies in one folder, as rows of a ledger: of runs, jobs and samples of this host. A run that is killed
loses the rows of the jobs that were running; the next one goes on counting.
"""

from __future__ import annotations

from pathlib import Path

from belljar.records import dataclass

BATCH = ("none", "slurm", "gridengine")


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    jobs: int  # in the folder, those of earlier runs included
    at_once: int
    queue: int  # jobs that wait in the batch system, beside those that run
    contexts: tuple[str, ...]
    batch: str
    image: str
    belljar: tuple[str, ...]  # how this belljar is run again
    ledgers: tuple[Path, ...]  # where rows of ended machines are, with their start times
    folders: tuple[Path, ...]  # of machines, without the records of ended ones: these must not grow
    options: tuple[str, ...] = ()  # of `belljar run`, sbatch or qsub
    longest: float = 3600.0  # seconds one job may take
