"""A job waits until its image's template is made: who watches is told, and nobody else's stderr gets a byte."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.stories.conftest import House

from belljar import assembly, config
from belljar.guest.fake import Script
from belljar.image.progress import begin_and_end
from belljar.journal import Ledger
from belljar.machine import Folders
from belljar.model import Cause


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def slow(house: House, seconds: float = 40.0) -> None:
    house.plan(Script(boots_in=seconds), Script())


def test_a_line_is_written_at_the_beginning_and_one_at_the_end(house: House) -> None:
    log = io.StringIO()
    house.showing = lambda what, digest: begin_and_end(what, " (the last one took 38 s)", log)
    slow(house)
    assert house.run().cause is Cause.FINISHED
    first, last = log.getvalue().splitlines()
    assert first == "belljar: Making a template of debian12, once (the last one took 38 s)"
    assert re.fullmatch(r"belljar: Making a template of debian12, once: 4\d s", last)
    house.run(house.request(id="0123456789ac"))  # a clone waits for nobody
    assert len(log.getvalue().splitlines()) == 2


def test_a_closed_stderr_does_not_turn_words_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    house = assembly.House(verbose=True)
    house.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    house.settings = config.inspect(environ={}, etc=tmp_path).settings

    async def work() -> None:
        with house._showing("Making a template", "d"):
            house._point("after-claim")

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
    house = assembly.House(verbose=verbose)
    house.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    assert isinstance(house._showing("x", "d"), nullcontext) is not is_told


def test_what_is_usual_is_what_was_measured_here(tmp_path: Path) -> None:
    house = assembly.House()
    house.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    assert "minutes" in house._usual("mine")
    ledger = Ledger(tmp_path)
    ledger.append({"image_digest": "other", "phases": {"template": 70.2}}, 1.0)
    ledger.append({"image_digest": "mine", "phases": {"run": 1.0}}, 2.0)
    assert house._usual("mine") == " (the last one, of another image, took 70 s)"
    ledger.append({"image_digest": "mine", "phases": {"template": 18.4}}, 3.0)
    ledger.append({"image_digest": "other", "phases": None}, 4.0)
    assert house._usual("mine") == " (the last one took 18 s)"
