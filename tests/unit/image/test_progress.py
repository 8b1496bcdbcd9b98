"""What people and logs see of something long."""

from __future__ import annotations

import io
import sys

import pytest

from belljar.image import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.shown() as shown:
        shown.step("first")
        shown.amount(1, 2)
        shown.step("second")
    assert capsys.readouterr() == ("", "belljar: first\nbelljar: second\n")


def test_a_person_sees_the_present_step_and_its_amount(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress.shown() as shown:
        shown.step("Downloading [x]")
        shown.amount(1_500_000, 3_000_000)
        shown.lines.refresh()  # type: ignore[attr-defined]
        shown.step("Unpacking [red]")
    assert "Unpacking [red]" in terminal.getvalue()
    assert "50% of 3.0 MB" in terminal.getvalue()


def test_a_terminal_that_cannot_go_back_gets_one_line_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    with progress.shown() as shown:
        shown.step("first")
    assert terminal.getvalue() == "belljar: first\n"


def test_nobody_is_told_where_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for closed in (None, io.StringIO()):
        if closed:
            closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
        with progress.shown() as shown:
            shown.step("x")
