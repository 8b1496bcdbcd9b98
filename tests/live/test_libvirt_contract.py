"""The payload contract again, by libvirt: a few of its tests each time, the whole of it where slow tests are asked for."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live import libvirt_lab, test_contract
from tests.live.conftest import Belljar
from tests.live.libvirt_lab import Daemon

ALWAYS = (
    "test_stdout_and_stderr_stay_apart_and_stdin_arrives_with_its_end",
    "test_words_and_variables_arrive_to_the_byte",
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with libvirt_lab.running() as daemon:
        yield daemon


@pytest.fixture
def belljar(tmp_path: Path, daemon: Daemon) -> Iterator[Belljar]:
    command = Belljar(tmp_path, settings=daemon.settings)
    yield command
    command.close()


def again(test: types.FunctionType, always: tuple[str, ...] = ALWAYS) -> types.FunctionType:
    """The test once more, with marks of its own."""
    copy = types.FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    copy.__dict__.update(test.__dict__)
    copy.__annotations__ = test.__annotations__
    if test.__name__ not in always:
        copy.__dict__["pytestmark"] = [*test.__dict__.get("pytestmark", ()), pytest.mark.slow]
    return copy


for _name, _test in vars(test_contract).items():
    if _name.startswith("test_") and isinstance(_test, types.FunctionType):
        globals()[_name] = again(_test)
