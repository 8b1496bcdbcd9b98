"""One test looks at everything a rule is for, and names all that offend."""

from __future__ import annotations

from collections.abc import Iterable


def assert_none(offenders: Iterable[object]) -> None:
    """Fail with every one of them on a line of its own."""
    lines = [str(one) for one in offenders]
    assert not lines, "\n".join(["", *lines])
