"""A batch system without words of its own, for tests that make one of values."""

from __future__ import annotations

from collections.abc import Sequence

from belljar.pool import JobView, Pool


class Plain:
    """What a system says where it says nothing: its machines' names, and how a job comes."""

    moves_whole_arrays, is_back, has_forgotten = Pool.moves_whole_arrays, Pool.is_back, Pool.has_forgotten
    refuse, tells_reasons = Pool.refuse, Pool.tells_reasons
    new_machine, name_of, machine_of = Pool.new_machine, Pool.name_of, Pool.machine_of

    def arrive(self, jobs: Sequence[JobView]) -> tuple[tuple[str, ...], ...]:
        return tuple(("take_back", job.id) for job in jobs)

    def create(self, node: str, job: JobView) -> tuple[tuple[str, ...], ...]:
        return ()


def nothing(job: JobView) -> str:
    """A judge without rules."""
    return ""
