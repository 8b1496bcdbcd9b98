"""What Prometheus reads: counters that go on, a file that is whole, alerts that fire, a dashboard whose metrics there are."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.monitor.test_outcomes import row, write

from belljar.cli import main
from belljar.cli.monitor import GAUGES
from belljar.monitor import Outcomes
from belljar.monitor.metrics import HISTOGRAM, LAST, METRICS, Tally, collected
from belljar.service.metrics import Metric

DOCS = Path(__file__).parents[3] / "docs/operate/monitor"
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="Debian's package prometheus is not installed")


@pytest.fixture(autouse=True)
def own_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "store", "logs", "scratch"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name.upper()}", str(tmp_path / "host" / name))


def textfile(folder: Path) -> dict[tuple[str, ...], float]:
    """Each sample, by its name and the values of its labels."""
    words = ["--ledger", f"wn01={folder / 'logs'}", "--state", str(folder / "state.json")]
    assert main(["monitor", "textfile", str(folder / "belljar.prom"), *words]) == 0
    return samples((folder / "belljar.prom").read_text())


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_machines_are_counted_by_class_and_cause_and_timed_by_phase_and_path(tmp_path: Path) -> None:
    write(
        tmp_path / "logs", row(), row("b" * 12, cause="node-fault", **{"class": "node"}, start="", phases={"stop": 0.1})
    )
    values = textfile(tmp_path)
    assert values["belljar_machines_ended_total", "finished", "payload", "slurm", "wn01"] == 1
    assert values["belljar_machines_ended_total", "node-fault", "node", "slurm", "wn01"] == 1
    boot = {
        key[1]: value for key, value in values.items() if key[0].endswith("start_seconds_bucket") and key[4] == "boot"
    }
    assert (boot["0.5"], boot["1.0"], boot["+Inf"]) == (0, 1, 1)
    assert values["belljar_machine_ready_seconds_sum", "wn01", "clone"] == 2.0
    assert values["belljar_machine_payload_seconds_total", "wn01"] == 6.0
    assert values["belljar_machine_overhead_seconds_total", "wn01"] == 14.0
    assert values["belljar_ledger_rows_unreadable_total",] == 0


def test_a_second_call_reads_only_what_is_new_and_counts_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "logs", row("a" * 12), {"id": 7})
    textfile(tmp_path)
    write(tmp_path / "logs", row("b" * 12))
    read = list[str]()
    new = Outcomes.new
    monkeypatch.setattr(Outcomes, "new", lambda self: (read.append(ended.id) or ended for ended in new(self)))  # type: ignore[func-returns-value]
    values = textfile(tmp_path)
    assert read == ["b" * 12]
    assert values["belljar_machines_ended_total", "finished", "payload", "slurm", "wn01"] == 2
    assert values["belljar_ledger_rows_unreadable_total",] == 1


@pytest.mark.parametrize("state", [b"", b"{", b'{"positions":{},"values":{},"buckets":[1.0]}', b'{"positions":7}'])
def test_a_state_that_is_damaged_or_of_another_version_only_costs_time(tmp_path: Path, state: bytes) -> None:
    write(tmp_path / "logs", row())
    (tmp_path / "state.json").write_bytes(state)
    assert textfile(tmp_path)["belljar_machines_ended_total", "finished", "payload", "slurm", "wn01"] == 1


def test_a_ledger_that_was_cut_begins_again(tmp_path: Path) -> None:
    write(tmp_path / "logs", row("a" * 12), row("b" * 12))
    textfile(tmp_path)
    (tmp_path / "logs/ledger-2026-01.jsonl").unlink()
    write(tmp_path / "logs", row("c" * 12))
    assert textfile(tmp_path)["belljar_machines_ended_total", "finished", "payload", "slurm", "wn01"] == 1


def test_words_that_nobody_knows_make_no_series_of_their_own(tmp_path: Path) -> None:
    forged = [row(f"{n:012x}", cause=f"c{n}", start=f"s{n}", phases={f"p{n}": 1.0}) for n in range(50)]
    values = textfile(write(tmp_path / "logs", *forged).parent)
    assert values["belljar_machines_ended_total", "other", "payload", "slurm", "wn01"] == 50
    assert len(values) < 60


def test_a_node_may_have_any_name(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(bytes(tmp_path / "logs") + b'-\xff"\n'))
    write(folder, row())
    assert (
        main(["monitor", "textfile", str(tmp_path / "out"), "--ledger", str(folder), "--state", str(tmp_path / "s")])
        == 0
    )
    assert samples((tmp_path / "out").read_text())["belljar_machine_payload_seconds_total", 'logs-?"\n'] == 6.0


def test_everybody_may_read_the_file_and_it_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "logs", row())
    (tmp_path / "belljar.prom").write_text("old")
    with open(tmp_path / "belljar.prom") as reader:
        textfile(tmp_path)
        assert reader.read() == "old"
    assert (tmp_path / "belljar.prom").stat().st_mode & 0o777 == 0o644


def test_metrics_are_served_as_openmetrics(tmp_path: Path) -> None:
    from prometheus_client.openmetrics.exposition import generate_latest

    tally = Tally(lambda positions: Outcomes({write(tmp_path, row()): 'a "node"\n'}, positions))
    registry = collected(tally, lambda: [Metric("belljar_machines", "Living", ("node",), {("wn01",): 3})])
    families = {family.name: family for family in openmetrics(generate_latest(registry).decode())}
    assert families["belljar_machine_start_seconds"].type == "histogram"
    assert families["belljar_machines_ended"].samples[0].labels["node"] == 'a "node"\n'
    write(tmp_path, row("b" * 12))
    again = {family.name: family for family in openmetrics(generate_latest(registry).decode())}
    assert again["belljar_machines_ended"].samples[0].value == 2


def test_what_this_host_has_is_told(tmp_path: Path) -> None:
    write(tmp_path / "logs", row())
    values = textfile(tmp_path)
    assert {values[f"belljar_{name}", os.uname().nodename] for name in GAUGES} == {0.0}


def test_a_machine_without_a_keeper_is_counted_and_left_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "logs", row())
    folder = tmp_path / "host/run/machines" / ("a" * 12)
    for parent in (folder, folder.parent, folder.parents[1]):
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "journal.jsonl").write_text('{"time":1.0,"event":"state","state":"running"}\n')
    values = textfile(tmp_path)
    assert values["belljar_machines_abandoned", os.uname().nodename] == 1
    assert [path.name for path in folder.iterdir()] == ["journal.jsonl"]


# -- alerts and dashboard ----------------------------------------------------------------------------------------------


def run_promtool(*words: str) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_the_file_is_as_prometheus_wants_it(tmp_path: Path) -> None:
    textfile(write(tmp_path / "logs", row()).parent)
    text = (tmp_path / "belljar.prom").read_bytes()
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@promtool
def test_each_alert_fires_on_what_it_is_for(tmp_path: Path) -> None:
    alerts = DOCS / "alerts.yml"
    run_promtool("check", "rules", str(alerts))
    rules = (Path(__file__).parent / "alerts_test.yml").read_text()
    (tmp_path / "test.yml").write_text(rules.replace("ALERTS", str(alerts)))
    run_promtool("test", "rules", str(tmp_path / "test.yml"))
    assert re.findall(r"alert: (\w+)", alerts.read_text()) == list(
        dict.fromkeys(re.findall(r"alertname: (\w+)", rules))
    )


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]


def dashboard() -> Any:
    return json.loads((DOCS / "grafana.json").read_text())


def test_alerts_and_dashboard_ask_for_metrics_that_there_are() -> None:
    names = {f"belljar_{name}" for name in (*GAUGES, LAST)} | {f"belljar_{name}_total" for name in METRICS}
    histograms = [name for name, (kind, *_) in METRICS.items() if kind == HISTOGRAM]
    names |= {f"belljar_{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    asked = set(re.findall(r"\bbelljar_\w+", " ".join([(DOCS / "alerts.yml").read_text(), *expressions()])))
    assert asked <= names


def test_the_dashboard_has_its_panels_side_by_side() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and all(x < 24 for x, _ in cells)
    assert {target["datasource"]["uid"] for panel in panels for target in panel["targets"]} == {"${datasource}"}


@promtool
def test_the_dashboards_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expr.replace("$__rate_interval", "5m").replace("$node", "wn01")}
        for number, expr in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    run_promtool("check", "rules", str(tmp_path / "rules.yml"))
