"""A job waits until its image's template is made: who watches is told, and nobody else's stderr gets a byte."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.stories.conftest import House

from belljar import assembly, config
from belljar.guest.fake import Script
from belljar.image.progress import begin_and_end, clock, shown
from belljar.journal import Ledger
from belljar.machine import Folders
from belljar.model import Cause


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def slow(house: House, seconds: float = 40.0) -> None:
    house.plan(Script(boots_in=seconds), Script())


def test_at_a_terminal_a_clock_runs_and_leaves_no_trace(house: House) -> None:
    terminal = Terminal()
    house.showing = lambda what, digest: clock(what, " (the last one took 38 s)", terminal)
    slow(house)
    assert house.run().cause is Cause.FINISHED
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert "belljar: Making a template of debian12, once: 30 s (the last one took 38 s)" in drawn
    assert len(drawn) > 30 and drawn[-1] == "" and all(len(line) < 80 for line in drawn)
    before = len(drawn)
    house.run(house.request(id="0123456789ac"))  # a clone waits for nobody
    assert len(terminal.getvalue().split("\r\x1b[K")) == before


def test_what_is_shown_within_something_longer_is_not_shown(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that works for an import, or puts the agent into an image, may need a template first."""
    outer, inner = Terminal(), Terminal()

    async def work() -> None:
        with clock("Putting the agent in", "", outer), clock("Making a template", "", inner):
            await asyncio.sleep(5)
        with clock("Making another", "", inner):
            await asyncio.sleep(5)

    house.leap(work())
    assert "Putting the agent in: 3 s" in outer.getvalue()
    assert "Making another: 3 s" in inner.getvalue() and "a template" not in inner.getvalue()
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with shown() as steps:
        steps.step("Looking into its file system, in a machine")
        house.showing = lambda what, digest: clock(what, "", screen)
        slow(house)
        house.run()
    assert "Looking into" in screen.getvalue() and "Making a template" not in screen.getvalue()


def test_a_log_gets_a_line_at_the_beginning_and_one_at_the_end(house: House) -> None:
    log = io.StringIO()
    house.showing = lambda what, digest: begin_and_end(what, "", log)
    slow(house)
    house.run()
    first, last = log.getvalue().splitlines()
    assert first == "belljar: Making a template of debian12, once"
    assert re.fullmatch(rf"{first}: 4\d s", last)


def test_a_closed_stderr_does_not_turn_words_to_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    house = assembly.House(verbose=True)
    house.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    house._load = lambda: config.load(environ={}, etc=tmp_path)

    async def work() -> None:
        with house._showing("Making a template", "d"):
            house._point("after-claim")

    asyncio.run(work())
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("terminal", "term", "verbose", "kind"),
    [
        (True, "xterm", False, "clock"), (True, "dumb", False, ""), (True, "", False, ""), (False, "xterm", False, ""),
        (False, "xterm", True, "begin_and_end"), (True, "xterm", True, "begin_and_end"),
    ],
)  # fmt: skip
def test_only_who_watches_or_asked_for_it_is_told(
    terminal: bool, term: str, verbose: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", term)
    house = assembly.House(verbose=verbose)
    house.folders = Folders(tmp_path, tmp_path, tmp_path, tmp_path)
    shown: AbstractContextManager[None] = house._showing("x", "d")
    assert getattr(getattr(shown, "func", None), "__name__", "") == kind


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
