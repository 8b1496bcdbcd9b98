"""How a factory is seen: checks, metrics, and what it writes down of itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from belljar.records import replace
from belljar.service.kept import keep, read
from belljar.service.metrics import registry
from belljar.vacuum import MachineType, Space, TypeStatus
from belljar.vacuum.decisions.backoff import TypePast
from belljar.vacuum.decisions.decide import Decision, Reason, Verdict
from belljar.vacuum.factory.monitor import Level, check, metrics
from belljar.vacuum.factory.state import MEMORY, STATUS, Decisions, Finished, Memory, Status, decision_at

STATE = Status(
    "vac.example.org", "vf1.example.org", 77, 1000.0, 60.0, 5000.0, took=0.25, machines=3, processors=10, most_processors=16, hs06=110.0
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "now", "level", "words"),
    [
        ({}, 5010.0, Level.OK, "OK: running; 3 machines, 10 of 16 processors | "),
        ({"draining": True}, 5010.0, Level.OK, "OK: draining; "),
        ({}, 5180.0, Level.OK, "OK: "),
        ({}, 5181.0, Level.WARNING, "WARNING: no sign of life for 181 s; "),
        ({}, 5601.0, Level.CRITICAL, "CRITICAL: no sign of life for 601 s; "),
        ({"error": "no | image\nof this\tname"}, 5010.0, Level.WARNING, "WARNING: machines fail on this host: no / image of this name; "),
        ({"settings_error": "x" * 900}, 5010.0, Level.WARNING, f"settings are not obeyed: {'x' * 200}; "),
        ({"troubles": {"pipe gds": "no\nanswer"}}, 5010.0, Level.WARNING, "WARNING: pipe gds: no answer; "),
        ({}, 4000.0, Level.OK, "age=0s;180;600;0"),
    ],
)  # fmt: skip
def test_a_check_says_how_the_factory_is(changes: dict[str, object], now: float, level: Level, words: str) -> None:
    found, line = check(replace(STATE, **changes), now)
    assert found is level and words in line
    assert line.count("|") == 1 and "\n" not in line and "processors=10;;;0;16 machines=3;;;0 " in line


def test_a_factory_that_never_wrote_its_status_is_critical() -> None:
    level, line = check(None, 0.0)
    assert level is Level.CRITICAL and "is `belljar vacuum run` started?" in line


def test_metrics_are_read_anew_each_time() -> None:
    from prometheus_client import generate_latest

    lhcb = TypeStatus("vf1.example.org", "lhcb", running_hs06=90.0, running_machines=2)
    factory = SimpleNamespace(
        status=STATE, space=Space("vac.example.org", "vf1.example.org", types=(MachineType("lhcb", share=4.0),)),
        decision=Decision((), (Verdict("lhcb", Reason.TURN),), {}, 0.0), started={"lhcb": 7}, ended={("lhcb", "200"): 5, ("lhcb", "none"): 1},
        troubles=SimpleNamespace(now={}),
    )  # fmt: skip
    made = registry(lambda: metrics(factory, [lhcb], {"answered": 12, "refused": 3}))
    text = generate_latest(made).decode()
    space = 'space="vac.example.org"'
    assert f"belljar_vacuum_processors_used{{{space}}} 10.0" in text
    assert f'belljar_vacuum_type_machines{{machinetype="lhcb",{space}}} 2.0' in text
    assert f'belljar_vacuum_type_verdict{{machinetype="lhcb",{space},verdict="turn"}} 1.0' in text
    assert f'belljar_vacuum_machines_ended_total{{machinetype="lhcb",message="200",{space}}} 5.0' in text
    assert f'belljar_vacuum_packets_total{{result="refused",{space}}} 3.0' in text
    factory.status, factory.troubles.now = replace(STATE, processors=11), {"pipe gds": "no answer"}
    assert f'belljar_vacuum_trouble{{about="pipe gds",{space}}} 1.0' in generate_latest(made).decode()
    assert f"belljar_vacuum_processors_used{{{space}}} 11.0" in generate_latest(made).decode()


# -- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", "[]", '{"space": 7}', '{"space": "a", "no_such": 1}'])
def test_a_file_that_is_none_is_as_if_it_were_not_there(tmp_path: Path, text: str) -> None:
    (tmp_path / STATUS).write_text(text)
    assert read(tmp_path / STATUS, Status) is None and read(tmp_path / "missing", Status) is None


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    memory = Memory(
        "2026-11:77",
        {"lhcb": Finished("vf1-03.example.org", 9, "300 no work", 8)},
        {"lhcb": TypePast(5.0, 2, 1.5, 7.0)},
    )
    for name, value in ((STATUS, STATE), (MEMORY, memory)):
        keep(tmp_path / name, value)
        assert read(tmp_path / name, type(value)) == value


def decided(reason: str, hs06: float = 0.0) -> dict[str, object]:
    return {"verdicts": [{"machinetype": "lhcb", "reason": reason, "hs06": hs06}], "starts": []}


def test_a_decision_is_written_when_it_differs_and_found_by_its_moment(tmp_path: Path) -> None:
    journal = Decisions(tmp_path)
    for now, one in (
        (100.0, decided("turn")),
        (160.0, decided("turn", 5.0)),
        (220.0, decided("full")),
        (280.0, decided("turn")),
    ):
        journal.tell(now, one)
    assert (tmp_path / "decisions.jsonl").read_text().count("\n") == 3  # the second one says nothing new
    with open(tmp_path / "decisions.jsonl", "a") as file:
        file.write('{"time": 290, "verd')
    found = [decision_at(tmp_path, moment) for moment in (99.0, 219.0, 220.0, 1e9)]
    assert [one and (one["time"], one["verdicts"][0]["reason"]) for one in found] == [
        None, (100.0, "turn"), (220.0, "full"), (280.0, "turn"),
    ]  # fmt: skip


def test_decisions_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.vacuum.factory.state.LARGEST_DECISIONS", 500)
    journal = Decisions(tmp_path)
    for number in range(100):
        journal.tell(float(number), decided(f"reason-{number}"))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2000
    last = decision_at(tmp_path, 1e9)
    assert last is not None and json.dumps(last).count("reason-99") == 1
