"""submitit: Slurm jobs whose function runs in a machine, which the job starts within its allocation.

    executor = belljar.adapters.submitit.executor("jobs", "--memory", "2G")
    executor.update_parameters(time=60)
    print(executor.submit(pow, 2, 5).result())

https://github.com/facebookincubator/submitit
"""

from __future__ import annotations

import shlex
import sys
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.adapters import run_words

if TYPE_CHECKING:
    from submitit import SlurmExecutor


def python(folder: str | Path, *words: str) -> str:
    """For `python=` of submitit's executors: this Python, in a machine by `belljar run` with these words. *folder*: the executor's,
    where function and result lie; what follows a name with `%j` is the job's own."""
    parts = takewhile(lambda part: "%" not in part, Path(folder).expanduser().absolute().parts)
    jobs = Path(*parts)
    jobs.mkdir(parents=True, exist_ok=True)
    return shlex.join([*run_words("--inherit-env", "--share", f"{jobs}:{jobs}:rw", *words), sys.executable])


def executor(folder: str | Path, *words: str) -> SlurmExecutor:
    """A SlurmExecutor whose jobs run so."""
    import submitit

    return submitit.SlurmExecutor(folder, python=python(folder, *words))
