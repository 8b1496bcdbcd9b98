"""What a soak's rows say together."""

from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BadOption
from belljar.journal import Ledger
from belljar.soak import Plan, plots, report
from belljar.soak.report import NOISE, growth
from belljar.soak.run import argv_of

PLAN = Plan(10, 2, 5, ("ramdisk",), "none", "debian12", ("belljar",), (), (), ("--mem=600",))


def job(start: float | None, **more: Any) -> dict[str, Any]:
    row = {
        "kind": "job",
        "batch": "none",
        "context": "ramdisk",
        "begin": 100.0,
        "time": 101.0,
        "run": 1.0,
        "start": start,
    }
    return {**row, "failure": "", "class": "payload", "cause": "finished", "reason": "", "is_clone": True, **more}


def folder_with(path: Path, *rows: dict[str, Any]) -> Path:
    for row in rows:
        Ledger(path).append(row, 0.0)
    return path


def samples(values: list[float], run: float = 1.0) -> list[dict[str, Any]]:
    return [{"run": run, "jobs": at * 20, **dict.fromkeys(NOISE, value)} for at, value in enumerate(values)]


def test_a_folder_without_jobs_has_an_empty_report(tmp_path: Path) -> None:
    made = report.of(tmp_path)
    assert (made["jobs"], made["failed"], made["starts"]) == (0, 0, [report.VMBATCH])
    assert not any(row["grows"] for row in made["growth"])


def test_failures_are_counted_by_their_cause_and_half_a_row_is_none(tmp_path: Path) -> None:
    boot = {"failure": "exit 125: x", "class": "transient", "cause": "boot-failed", "reason": "no sign of life"}
    folder_with(tmp_path, job(1.0), job(None, **boot), job(None, **boot), job(2.0, failure="it printed ''"))
    with open(next(tmp_path.glob("ledger-*")), "a") as file:
        file.write('{"kind": "job", "torn')
    made = report.of(tmp_path)
    assert [(row["cause"], row["jobs"], row["example"]) for row in made["failures"]] == [
        ("transient: boot-failed", 2, "no sign of life"),
        ("job", 1, "it printed ''"),
    ]
    assert (made["jobs"], made["failed"]) == (4, 3)


def test_start_times_stand_beside_those_of_vmbatch(tmp_path: Path) -> None:
    folder_with(tmp_path, *(job(float(number)) for number in range(1, 102)), job(None, is_clone=False))
    ours, vmbatch = report.of(tmp_path)["starts"]
    assert (ours["min"], ours["mean"], ours["p50"], ours["p90"], ours["max"]) == (
        1,
        51,
        51,
        pytest.approx(91, abs=1),
        101,
    )
    assert (ours["jobs"], ours["clones"]) == (102, 101)
    assert (vmbatch["min"], vmbatch["mean"], vmbatch["max"], vmbatch["jobs"]) == (24, 38.41, 66, 20_000)


def test_runs_add_up_and_the_time_between_them_does_not_count(tmp_path: Path) -> None:
    hour = 3600.0
    rows = [job(1.0, run=run, time=run + at) for run in (0.0, 100 * hour) for at in (0.0, hour)]
    made = report.of(folder_with(tmp_path, *rows))
    assert (made["jobs"], made["runs"], made["hours"]) == (4, 2, 2.0)


def test_one_thing_a_job_that_stays_is_a_leak() -> None:
    found = growth("files", samples([float(at * 20) for at in range(50)]))
    assert found["grows"] and found["per_1000_jobs"] == pytest.approx(1000)


def test_what_goes_up_and_down_is_no_leak() -> None:
    assert not growth("files", samples([100.0 * (at % 3) for at in range(50)]))["grows"]


def test_a_host_that_holds_more_after_a_restart_is_no_leak() -> None:
    first, second = (
        samples([10.0] * 20),
        [{**row, "jobs": row["jobs"] + 400} for row in samples([9000.0] * 20, run=2.0)],
    )
    found = growth("files", first + second)
    assert not found["grows"] and found["per_1000_jobs"] == 0


@pytest.mark.parametrize("name", ["a.pdf", "nowhere/a.png"])
def test_a_picture_that_cannot_be_drawn_is_refused_before_any_job_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadOption, match=r"not a \.png or \.svg file"):
        plots.check(tmp_path / name)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_is_drawn(tmp_path: Path, kind: str) -> None:
    rows = [
        job(0.3),
        job(30.0, context="inject"),
        job(None, failure="exit 125"),
        {**samples([1.0])[0], "kind": "sample"},
    ]
    plots.draw(folder_with(tmp_path, *rows), tmp_path / f"a.{kind}")
    assert (tmp_path / f"a.{kind}").read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_a_batch_system_runs_as_many_at_once_as_there_are_names() -> None:
    from belljar.records import replace

    names = {
        word
        for place in range(7)
        for word in argv_of(replace(PLAN, batch="slurm"), "inject", place, "word", Path("/out"))
        if word.startswith("--job-name=")
    }
    assert names == {"--job-name=soak-0", "--job-name=soak-1"}
    words = argv_of(replace(PLAN, batch="gridengine"), "inject", 3, "word", Path("/out"))
    assert words[:3] == ["qsub", "-sync", "y"] and words[-4:] == ["-b", "y", "echo", "word"]
    assert {"vm_image=debian12", "BELLJAR_MACHINE_CONTEXT=inject", "--mem=600"} <= set(words)
