"""submitit: Slurm jobs whose function runs in a machine, which the job starts within its allocation. Run it in a virtual environment
with submitit and belljar, which the machine shares.

    executor = submitit.SlurmExecutor("jobs", python=python("jobs", "--memory", "2G"))
    executor.update_parameters(time=60)
    print(executor.submit(pow, 2, 5).result())

https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

PATH = f"PATH={sys.prefix}/bin:{os.defpath.lstrip(':')}"


def python(folder: str | Path, *words: str) -> str:
    """For `python=` of submitit's executors: this Python, in a machine by `belljar run` with these words. *folder*: the executor's,
    where function and result lie."""
    jobs = Path(folder).expanduser().absolute()
    jobs.mkdir(parents=True, exist_ok=True)
    own = ["--inherit-env", "--share", sys.prefix, "--share", f"{jobs}:{jobs}:rw", "--env", PATH, *words]
    return shlex.join([sys.executable, "-m", "belljar", "run", *own, "--", sys.executable])
