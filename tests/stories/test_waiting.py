"""A job waits until its image's template is made: who watches is told, and nobody else's stderr gets a byte."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar import assembly, config
from belljar.image.progress import begin_and_end
from belljar.machine import Folders
from belljar.model import Cause, Transfer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def slow(runtime: Runtime, seconds: float = 40.0) -> None:
    runtime.plan(Script(boots_in=seconds), Script())


def test_a_line_is_written_at_the_beginning_and_one_at_the_end(runtime: Runtime) -> None:
    log = io.StringIO()
    runtime.showing = lambda what: begin_and_end(what, log)
    slow(runtime)
    assert runtime.run().cause is Cause.FINISHED
    first, last = log.getvalue().splitlines()
    assert first == "belljar: Making a template of debian12, once (without KVM this takes minutes)"
    assert re.fullmatch(r"belljar: Making a template of debian12, once: 4\d s", last)
    runtime.run(runtime.request(id="0123456789ac"))  # a clone waits for nobody
    assert len(log.getvalue().splitlines()) == 2


def test_a_closed_stderr_does_not_turn_words_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    runtime = assembly.Runtime(verbose=True)
    runtime.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    runtime.settings = config.inspect(environ={}, etc=tmp_path).settings

    async def work() -> None:
        with runtime._showing("Making a template"):
            runtime._point("after-claim")

    asyncio.run(work())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("terminal", "verbose", "is_told"),
    [(True, False, True), (False, False, False), (False, True, True), (True, True, True)],
)
def test_only_who_watches_or_asked_for_it_is_told(
    terminal: bool, verbose: bool, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    runtime = assembly.Runtime(verbose=verbose)
    runtime.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    assert isinstance(runtime._showing("x"), nullcontext) is not is_told


def test_copying_that_takes_long_has_its_lines_and_a_quick_one_has_none(runtime: Runtime) -> None:
    log = io.StringIO()
    runtime.showing = lambda what: begin_and_end(what, log)
    slow(runtime, 0.5)
    runtime.run()
    assert log.getvalue() == ""
    runtime.plan(Script(gets_for=30.0))
    outputs = (Transfer("/nowhere/out", "out"),)
    runtime.run(runtime.request(id="0123456789ad", payload={"outputs": outputs}))
    assert log.getvalue().splitlines() == [
        "belljar: Copying files out of the machine",
        "belljar: Copying files out of the machine: 30 s",
    ]
