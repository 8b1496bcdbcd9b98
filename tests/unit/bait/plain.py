"""A batch system without words of its own, for tests that make one of values."""

from __future__ import annotations

from collections.abc import Sequence

from belljar.pool import JobView
from belljar.pool.terms import Client, Nodes


class Plain:
    """What a system says where it says nothing: its machines' names, and how a job comes."""

    moves_whole_arrays, is_back, has_forgotten = Client.moves_whole_arrays, Client.is_back, Client.has_forgotten
    refuse = Client.refuse
    tells_reasons, new_machine, name_of, machine_of = (
        Nodes.tells_reasons,
        Nodes.new_machine,
        Nodes.name_of,
        Nodes.machine_of,
    )

    def arrive(self, jobs: Sequence[JobView]) -> tuple[tuple[str, ...], ...]:
        return tuple(("take_back", job.id) for job in jobs)

    def create(self, node: str, job: JobView) -> tuple[tuple[str, ...], ...]:
        return ()


def nothing(job: JobView) -> str:
    """A judge without rules."""
    return ""
