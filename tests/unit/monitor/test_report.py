"""`belljar report`: sums by user, image, cause, node and day; plots; ledgers of users, for root."""

import csv
import io
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.monitor.test_outcomes import END, row, write

from belljar.cli import main
from belljar.errors import CommandFailed
from belljar.host.privileges import User, as_user
from belljar.journal import Ledger
from belljar.monitor import AskedLedger, Outcomes
from belljar.monitor.report import report

NOBODY = User(65534, 65534, "nobody", "/nonexistent")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads for others")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["report", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    failed = row("c" * 12, cause="node-fault", account="bob", phases={"stop": 1.0}, started=END - 1)
    return write(
        tmp_path / "wn01", row("a" * 12), row("b" * 12, image="alma9", ended=END + 86400, started=END + 86380), failed
    )


def test_what_machines_took_is_told_apart_from_the_payloads(folder: Path, capsys: Any) -> None:
    ada, bob = json.loads(call(capsys, "--by", "user", "--ledger", str(folder), "--format", "json"))
    assert ada == {
        "user": "ada", "machines": 2, "failed": 0, "started": 2, "wall": 30.0, "payload": 12.0, "overhead": 18.0, "payload_cpu": 10.0,
        "host_cpu": 13.0, "ready_mean": 2.0, "ready_longest": 2.0,
    }  # fmt: skip
    assert (bob["user"], bob["failed"], bob["payload"], bob["overhead"], bob["ready_mean"]) == ("bob", 1, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("image", ["alma9", "debian12"]),
        ("cause", ["finished", "node-fault"]),
        ("node", ["wn01"]),
        ("day", ["2026-01-01", "2026-01-02"]),
    ],
)
def test_a_row_for_each(folder: Path, capsys: Any, by: str, names: list[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(call(capsys, "--by", by, "--ledger", str(folder), "--format", "csv"))))
    assert [row[by] for row in rows] == names
    assert sum(int(row["machines"]) for row in rows) == 3


def test_a_report_has_a_beginning(folder: Path, capsys: Any) -> None:
    ago = int(time.time() - END)
    assert "2026-01-01" not in call(capsys, "--ledger", str(folder), "--since", f"{ago - 3600}s")


def test_rows_that_were_left_out_are_told_on_stderr(folder: Path, capsys: Any) -> None:
    write(folder, {"id": 7})
    assert main(["report", "--ledger", str(folder)]) == 0
    assert "1 rows of ledgers do not tell which machine ended" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "begin"), [("plot.png", b"\x89PNG\r\n"), ("plot.svg", b"<?xml")])
def test_it_is_drawn(folder: Path, tmp_path: Path, capsys: Any, name: str, begin: bytes) -> None:
    for by in ("user", "day"):
        call(capsys, "--by", by, "--ledger", str(folder), "--plot", str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begin)


def test_a_plot_says_what_it_lacks(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["report", "--ledger", str(folder), "--plot", str(tmp_path / "plot.pdf")]) == 125
    assert "neither PNG nor SVG" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", "--ledger", str(folder), "--plot", str(tmp_path / "plot.png")]) == 125
    assert "EXTRAS=plots" in capsys.readouterr().err


def test_an_empty_ledger_is_an_empty_report(tmp_path: Path, capsys: Any) -> None:
    assert json.loads(call(capsys, "--ledger", str(tmp_path), "--format", "json")) == []
    assert report([], "user") == []


# -- ledgers of users --------------------------------------------------------------------------------------------------


def of_nobody(folder: Path, *rows: dict[str, Any] | bytes) -> Path:
    write(folder, *rows)
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY.uid, NOBODY.gid)
    folder.chmod(0o700)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and "pytest" in str(parent):
            parent.chmod(0o755)
    return folder


def ledger_of(folder: Path) -> Ledger:
    """The ledger that nobody may write into."""

    def ask(look: Callable[[Ledger], Any]) -> Any:
        return json.loads(as_user(NOBODY, lambda: json.dumps(look(Ledger(folder))).encode(), timeout=30.0, what="read"))

    return AskedLedger(folder, ask)


@as_root
def test_a_users_ledger_is_read_as_the_user_whoever_it_names(tmp_path: Path) -> None:
    folder = of_nobody(tmp_path / "logs", row("a" * 12, account="root"))
    outcomes = Outcomes({tmp_path / "none": "here"}, users=lambda: {"nobody": ledger_of(folder)})
    assert [(ended.id, ended.user) for ended in outcomes.new()] == [("a" * 12, "nobody")]
    assert not list(outcomes.new())
    (folder / "ledger-2026-01.jsonl").unlink()
    assert not list(outcomes.new())
    of_nobody(folder, row("b" * 12))
    assert [ended.id for ended in outcomes.new()] == ["b" * 12]


@as_root
def test_what_only_root_may_read_a_user_cannot_have_read(tmp_path: Path) -> None:
    """A link to another's ledger is opened with the user's own rights."""
    folder, secret = of_nobody(tmp_path / "logs"), write(tmp_path / "secret", row("5" * 12))
    secret.chmod(0o700)
    (folder / "ledger-2026-01.jsonl").symlink_to(secret / "ledger-2026-01.jsonl")
    own = write(tmp_path / "own", row("a" * 12))
    outcomes = Outcomes({own: "here"}, users=lambda: {"nobody": ledger_of(folder)})
    assert [ended.id for ended in outcomes.new()] == ["a" * 12]
    assert "Permission denied" in outcomes.troubles["the ledger of nobody"]


@as_root
def test_a_users_ledger_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.monitor.PART", 3)
    folder = of_nobody(tmp_path / "logs", *[row(f"{number:012x}") for number in range(20)])
    outcomes = Outcomes({tmp_path / "none": "here"}, users=lambda: {"nobody": ledger_of(folder)})
    assert [int(ended.id, 16) for ended in outcomes.new()] == list(range(20)) and not outcomes.troubles
    outcomes.skip()
    assert not list(outcomes.new())


@pytest.mark.parametrize("answer", [7, [7], [[7, 7]], [[{}]], {"a": 1}, "text"])
def test_a_user_may_report_anything(tmp_path: Path, answer: Any) -> None:
    forged = AskedLedger(tmp_path, lambda look: answer)
    outcomes = Outcomes({write(tmp_path, row()): "here"}, users=lambda: {"nobody": forged})
    assert len(list(outcomes.new())) == 1 and len(outcomes.troubles) == 1


def test_a_users_ledger_that_is_not_read_in_time_is_given_up(tmp_path: Path) -> None:
    def late(look: object) -> None:
        raise CommandFailed("read as nobody: not done after 10 s")

    outcomes = Outcomes(
        {write(tmp_path, row()): "here"}, users=lambda: {"nobody": AskedLedger(tmp_path / "theirs", late)}
    )
    assert len(list(outcomes.new())) == 1
    outcomes.skip()
    assert outcomes.troubles == {"the ledger of nobody": "read as nobody: not done after 10 s"}
