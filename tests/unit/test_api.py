"""What the Python door takes, and what it refuses where it is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from belljar import api
from belljar.model import GIB, MIB, NetworkMode, Start


@pytest.fixture(autouse=True)
def _a_host_that_has_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STORE", "RUN", "SCRATCH", "LOGS"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name}", str(tmp_path / name))
    api._runtime.cache_clear()
    yield
    api._runtime.cache_clear()


def test_sizes_times_and_choices_are_understood_as_on_the_command_line() -> None:
    asked = api.request(
        ["true"], memory="256M", disk="2G", scratch="1GiB", timeout="5m", grace="1:30", network="user", start="cold"
    )
    machine = asked.machine
    assert (machine.memory, machine.disk, machine.scratch) == (256 * MIB, 2 * GIB, GIB)
    assert (asked.timeout, asked.grace) == (300.0, 90.0)
    assert machine.network is NetworkMode.USER and machine.start is Start.COLD
    assert api.request(["true"], memory=MIB, timeout=2.5).machine.memory == MIB


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    ("echo a", {}, TypeError, "'echo a': give a list of words"),
    (b"true", {}, TypeError, "give a list of words"),
    ([], {}, ValueError, "not a command"),
    (["a\0b"], {}, ValueError, "not a command"),
    ([1], {}, TypeError, "int"),
    (["true"], {"memory": "much"}, ValueError, "'much' is not a size"),
    (["true"], {"timeout": "soon"}, ValueError, "'soon' is not a duration"),
    (["true"], {"network": "every"}, ValueError, "'every' is not a valid NetworkMode"),
    (["true"], {"env": {"": "x"}}, ValueError, "cannot be a variable"),
    (["true"], {"env": {"A=B": "x"}}, ValueError, "b'A=B'=b'x' cannot be a variable"),
    (["true"], {"env": {"A": "x\0y"}}, ValueError, "cannot be a variable"),
]


@pytest.mark.parametrize(("argv", "options", "kind", "words"), WRONG)
def test_what_cannot_be_meant_is_refused_where_it_is_given(
    argv: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    for act in (api.request, api.start):
        with pytest.raises(kind, match=words):
            act(argv, **options)
