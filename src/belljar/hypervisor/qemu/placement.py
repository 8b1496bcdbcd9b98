"""Pins the threads of virtual processors. QEMU's other threads stay on all that this process may use."""

from __future__ import annotations

import os
from collections.abc import Sequence

from belljar.errors import HostError
from belljar.hints import Any

HINT = "Its batch system may have taken the cpu away meanwhile; `--pin none` does without."


def pin(answer: Any, cpus: Sequence[int]) -> dict[str, int]:
    """The cpu of each thread, by the threads that QEMU's `query-cpus-fast` tells. Raises HostError."""
    threads = [cpu["thread-id"] for cpu in sorted(answer, key=lambda cpu: int(cpu["cpu-index"]))]
    try:
        pinned = dict(zip(threads, cpus, strict=True))
        for thread, cpu in pinned.items():
            os.sched_setaffinity(thread, {cpu})
    except (OSError, ValueError) as exc:
        raise HostError(f"virtual processors cannot be pinned to the cpus {cpus}: {exc}", hint=HINT) from exc
    return {str(thread): cpu for thread, cpu in pinned.items()}
