"""`--report`: the outcome as JSON, beside the payload's end and never in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from belljar.cli.machine.run import leave, open_report, write_report
from belljar.errors import BadOption
from belljar.jobs import tell_troubles
from belljar.model import Cause, Outcome, OutcomeClass

END = Outcome("0123456789ab", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=3)


def report(path: str) -> None:
    write_report(open_report(path), path, END)


def test_what_was_in_the_file_before_is_gone(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("x" * 10_000)
    report(str(tmp_path / "r"))
    assert json.loads((tmp_path / "r").read_text())["exit_code"] == 3


def test_a_file_that_cannot_be_made_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="no/r: No such file or directory"):
        open_report(str(tmp_path / "no/r"))


def test_a_file_that_cannot_be_written_is_named_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    report("/dev/full")
    said = capsys.readouterr().err
    assert said.startswith("belljar: --report /dev/full: No space left on device\nhint: ") and END.id in said
    assert leave(END) == 3


def test_half_a_report_is_none(tmp_path: Path) -> None:
    code = """
import resource, sys
from belljar.cli.machine.run import open_report, write_report
from belljar.model import Cause, Outcome, OutcomeClass
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
end = Outcome("0123456789ab", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=3)
write_report(open_report(sys.argv[1]), sys.argv[1], end)
"""
    path = tmp_path / "r"
    done = subprocess.run([sys.executable, "-IB", "-c", code, str(path)], capture_output=True, timeout=30)
    assert done.returncode == 0 and f"--report {path}: File too large".encode() in done.stderr
    assert path.read_bytes() == b""


def test_the_exit_code_stays_where_nothing_can_be_told() -> None:
    code = """
import sys
from belljar import cli
from belljar.jobs import complain
def main(*arguments):
    complain("a word", "a hint")
    return 3
cli.main = main
cli.entry()
"""
    full = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, stderr=full, timeout=30)
    os.close(full)
    assert done.returncode == 3


def test_what_a_machines_end_left_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    left = "its disk was not removed: /scratch/0123456789ab.qcow2: Read-only file system"
    tell_troubles(Outcome("0123456789ab", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=0, troubles=(left, "more")))
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(f"{left}; more") and said[1].startswith("hint: `belljar reap`") and len(said) == 2
