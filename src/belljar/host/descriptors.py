"""The standard descriptors of this process, looked at once, before anything is opened."""

from __future__ import annotations

import os


def _cover() -> tuple[int, ...]:
    """Open /dev/null on every standard descriptor that is closed, so that no file of ours lands there."""
    closed = []
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
            assert opened == descriptor  # the lowest free number; those below it are open by now
            os.set_inheritable(descriptor, True)
            closed.append(descriptor)
    return tuple(closed)


CLOSED = _cover()
"""Those that were closed when the program began."""
