"""A batch system's commands, for whatever this process was started as: its launcher, or `belljar` in somebody's shell."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from belljar import batch
from belljar.batch.install import commands as client

if TYPE_CHECKING:
    from belljar.batch.install.commands import Client
    from belljar.batch.job.verdict import Run
    from belljar.jobs import House


def runner(house: House, system: str, timeout: float) -> Run:
    """How a command of the system is run; where they are is looked up when there is one."""

    def run(argv: tuple[str, ...]) -> bytes:
        return client_of(house, system).run(argv, timeout)

    return run


def client_of(house: House, system: str) -> Client:
    """By the list that `batch install` made. Without one, what is in PATH has to do: there it is a person who asks."""
    launcher = house.commands or own_prefix() / "libexec/belljar"
    known = client.read(client.path_of(launcher, system), system)
    return known or client.find(system, batch.load(system).site.needs, None, os.environ)


def own_prefix() -> Path:
    """Where this installation has its files: PREFIX of PREFIX/lib/belljar, else of the Python that runs it."""
    lib = Path(__file__).resolve().parents[2]
    if lib.name == "lib":
        return lib.parent
    return Path(sys.prefix) if sys.prefix != "/usr" else Path("/usr/local")
