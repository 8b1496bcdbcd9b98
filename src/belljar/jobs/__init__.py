"""What a batch job, or a detached machine, is on this host: between the keeper of machines and the programs.

    wrap.py      in place of a job's script: without a machine, or in one, and out again as the system wants it
    hooks.py     around a job, as root: prolog, epilog              node.py     this node in its system; the self-check
    orphans.py   machines that outlived their jobs                  users.py    root among the users of a node
    attend.py    signals, streams and the clock of who keeps        caller.py   what this process hands on to a payload

No words of the command line are read here. The parts of belljar are handed in: `House` says which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from belljar.hypervisor import Hypervisor
    from belljar.machine import Folders
    from belljar.machine.supervisor import Supervisor


class House(Protocol):
    """The parts that jobs work with."""

    config_file: Path | None
    commands: Path | None  # the launcher's list of its system's commands
    verbose: bool
    in_job: bool  # only what the site leaves open is the user's to set

    @property
    def settings(self) -> Any: ...
    @property
    def folders(self) -> Folders: ...
    @property
    def machines(self) -> Any: ...
    @property
    def images(self) -> Any: ...
    @property
    def reaper(self) -> Any: ...
    @property
    def overlays(self) -> Any: ...
    @property
    def hypervisor(self) -> Hypervisor: ...
    def workshop(self) -> Any: ...
    def supervisor(self) -> Supervisor: ...
    def inspect(self) -> Any:
        """The settings as far as they can be understood, and the mistakes in them."""

    def be_lenient(self) -> None:
        """From now on go by what can be understood of the settings."""

    def of_user(self, uid: int, home: str) -> Self:
        """Another user's parts, for a process that became this user."""
