"""Parsl: blocks whose worker pool runs in a machine, with any provider of one node per block. Run it in a virtual environment with
parsl and belljar, which the machine shares.

    HighThroughputExecutor(address=ADDRESS, provider=LocalProvider(launcher=MachineLauncher(["--memory", "2G"])))

The workers connect to the interchange at *address*, one of the submitting host's own, which the site lets machines reach
(`network.allow`). https://parsl.readthedocs.io/en/stable/stubs/parsl.launchers.base.Launcher.html
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from parsl.launchers.base import Launcher

PATH = f"PATH={sys.prefix}/bin:{os.defpath.lstrip(':')}"


class MachineLauncher(Launcher):  # type: ignore[misc]
    """Runs what starts the workers in a machine, by `belljar run` with these *words*; it sees the run's folder."""

    def __init__(self, words: Sequence[str] = (), debug: bool = True) -> None:
        super().__init__(debug=debug)
        self.words = words

    def __call__(self, command: str, tasks_per_node: int, nodes_per_block: int, script_dir: str = "") -> str:
        if nodes_per_block != 1:
            raise ValueError(f"nodes_per_block: {nodes_per_block}: a machine is on one node")
        folder = Path(script_dir).absolute().parent  # that of the run, with the workers' logs and certificates
        words = ["--network", "user", "--share", sys.prefix, "--share", f"{folder}:{folder}:rw", "--env", PATH]
        program = [sys.executable, "-m", "belljar", "run", *words, *self.words]
        return shlex.join([*program, "--", "sh", "-c", command])  # Parsl's command is the shell's
