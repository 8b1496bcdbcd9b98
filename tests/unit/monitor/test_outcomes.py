"""The reader of ledgers: bad lines, other versions, several nodes, and machines that end while it reads."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BadOption, PositionLost
from belljar.journal import Ledger
from belljar.model import Cause, Outcome, OutcomeClass, Usage, dumps
from belljar.monitor import PARTS, PHASES, Machine, Outcomes, ended_of, places

END = 1767268800.0  # 2026-01-01 12:00 UTC


def row(id: str = "0123456789ab", **changes: Any) -> dict[str, Any]:
    return {
        "id": id, "cause": "finished", "class": "payload", "image": "debian12", "start": "clone", "account": "ada", "requester": "slurm:4711", "uid": 1000,
        "phases": {"prepare": 0.5, "start": 0.25, "boot": 1.0, "identify": 0.25, "run": 6.0, "stop": 0.5}, "started": END - 10,
        "ended": END, "guest": {"user": 4.0, "system": 1.0, "peak_memory": 1 << 20}, "labels": [["queue", "night"]],
        "host": {"user": 5.0, "system": 1.5, "peak_memory": 1 << 28}, "cpus": 2, "memory": 1 << 29, **changes,
    }  # fmt: skip


def write(folder: Path, *rows: dict[str, Any] | bytes, now: float = END) -> Path:
    folder.mkdir(exist_ok=True)
    for item in rows:
        if isinstance(item, bytes):
            with open(folder / "ledger-2026-01.jsonl", "ab") as file:
                file.write(item)
        else:
            Ledger(folder).append(item, now)
    return folder


def ids(rows: Any) -> list[str]:
    return [ended.id for ended in rows]


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":"half', b"\n", b"[1,2]\n", b'"text"\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b'{"id":7,"cause":"finished"}\n',
        b'{"id":"0123456789ab"}\n', b"NaN\n",
    ],
    ids=["half a line", "empty", "a list", "a text", "not UTF-8", "nested without end", "of no machine", "without an end", "no number"],
)  # fmt: skip
def test_what_is_not_a_row_is_left_out_and_the_next_row_is_read(tmp_path: Path, line: bytes) -> None:
    folder = write(tmp_path, row("a" * 12), line, row("b" * 12))
    assert ids(Outcomes({folder: "wn01"}).new()) == ["a" * 12, "b" * 12]


def test_rows_that_do_not_tell_which_machine_ended_are_counted(tmp_path: Path) -> None:
    outcomes = Outcomes({write(tmp_path, row(), {"id": 7}, {"cause": "finished"}): "wn01"})
    assert (len(list(outcomes.new())), outcomes.unreadable) == (1, 2)


def test_a_row_of_another_version_is_read_as_far_as_it_is_understood() -> None:
    newer = ended_of(
        row(cause="moved-away", warmth=7, phases={"thaw": 1.0, "run": "long"}, cpus=True, started=None), "wn01"
    )
    assert newer is not None and (newer.cause, newer.cpus, newer.started) == ("moved-away", 0, 0.0)
    assert newer.phases == {"thaw": 1.0, "run": 0.0} and newer.image == "debian12"
    older = ended_of({"id": "0123456789ab", "cause": "finished", "class": "payload"}, "wn01")
    assert older == Machine("wn01", "0123456789ab", "finished", "payload")


def test_a_row_as_a_machine_leaves_it_is_read_whole() -> None:
    outcome = Outcome(
        "0123456789ab", Cause.BOOT_FAILED, OutcomeClass.NODE, reason="why", hint="what to do", error="BootFailed", name="job",
        image="debian12", start="cold", context="ramdisk", accelerator="kvm", phases={"boot": 3.0}, guest=Usage(1.0, 2.0, 3),
        host=Usage(4.0, 5.0, 6), started=END - 4, ended=END, requester="slurm:1", labels=(("queue", "night"),), uid=7,
        account="ada", cpus=2, memory=1 << 30,
    )  # fmt: skip
    assert ended_of(json.loads(dumps(outcome)), "wn01") == Machine(
        "wn01", "0123456789ab", "boot-failed", "node", "why", "what to do", "BootFailed", "job", "debian12", "cold", "ramdisk", "kvm",
        "ada", 7, "slurm:1", (("queue", "night"),), {"boot": 3.0}, {"user": 1.0, "system": 2.0, "peak_memory": 3.0},
        {"user": 4.0, "system": 5.0, "peak_memory": 6.0}, END - 4, END, 2, 1 << 30,
    )  # fmt: skip


def test_every_phase_of_a_machine_has_its_place() -> None:
    texts = [path.read_text() for path in (Path(__file__).parents[3] / "src/belljar/machine").rglob("*.py")]
    assert {name for text in texts for name in re.findall(r"""\.phase\("(\w+)"\)""", text)} == {*PHASES, *PARTS}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300, "7", True, None, [7]])
def test_a_number_that_is_not_one_is_0(value: Any) -> None:
    ended = ended_of(row(ended=value, guest={"user": value}, phases={"run": value}), "wn01")
    assert ended is not None and type(ended.cpus) is int
    sums = ended.sums()
    assert (ended.ended, ended.guest.get("user", 0.0), sums["payload"], sums["wall"]) == (0.0, 0.0, 0.0, 0.0)


def test_the_machines_own_time_is_told_apart_from_the_payloads() -> None:
    ended = ended_of(row(), "wn01")
    assert ended is not None and ended.until_ready == 2.0
    assert [ended.sums()[name] for name in ("wall", "payload", "overhead")] == [10.0, 6.0, 4.0]
    assert ended.user == "ada" and ended.path == "clone"
    first = ended_of(row(account="", phases={"prepare": 9.0, "template": 8.5}), "wn01")
    assert first is not None and (first.user, first.path, first.until_ready) == ("1000", "template", 9.0)


def test_since(tmp_path: Path) -> None:
    folder = write(
        tmp_path, row("a" * 12, ended=END - 0.5), row("b" * 12, ended=END + 0.5), row("c" * 12, ended=END + 9)
    )
    outcomes = Outcomes({folder: "wn01"}, since=END)
    assert ids(outcomes.new()) == ["b" * 12, "c" * 12] and not ids(outcomes.new())
    assert ids(Outcomes({folder: "wn01"}, since=END + 40 * 86400).new()) == []


def test_each_row_is_new_once_though_another_reader_takes_over(tmp_path: Path) -> None:
    first = Outcomes({write(tmp_path, row("a" * 12)): "wn01"})
    assert ids(first.new()) == ["a" * 12]
    write(tmp_path, row("b" * 12))
    kept = json.loads(json.dumps(first.positions))
    assert ids(Outcomes({tmp_path: "wn01"}, kept).new()) == ["b" * 12]
    (tmp_path / "ledger-2026-01.jsonl").write_bytes(b"")
    with pytest.raises(PositionLost):
        list(first.new())


def test_a_reader_can_begin_with_what_comes(tmp_path: Path) -> None:
    outcomes = Outcomes({write(tmp_path, row("a" * 12)): "wn01"})
    outcomes.skip()
    write(tmp_path, row("b" * 12))
    assert ids(outcomes.new()) == ["b" * 12]


def test_a_shared_folder_has_a_ledger_for_each_node(tmp_path: Path) -> None:
    write(tmp_path / "wn01", row("a" * 12))
    (tmp_path / "not a node").mkdir()
    outcomes = Outcomes({tmp_path: "here"})
    assert [(ended.node, ended.id) for ended in outcomes.new()] == [("wn01", "a" * 12)]
    write(tmp_path / "wn02", row("b" * 12))
    assert [(ended.node, ended.id) for ended in outcomes.new()] == [("wn02", "b" * 12)]


def test_places_are_folders_with_or_without_the_name_of_a_node(tmp_path: Path) -> None:
    assert places([], tmp_path, "here") == {tmp_path: "here"}
    (tmp_path / "wn01").mkdir()
    folder = tmp_path / "wn01"
    assert places([str(folder)], tmp_path, "here") == {folder: "wn01"}
    assert places([f"first={folder}"], tmp_path, "here") == {folder: "first"}
    (odd := tmp_path / "a=b").mkdir()
    assert places([str(odd)], tmp_path, "here") == {odd: "a=b"}
    with pytest.raises(BadOption, match="is not a folder that can be read"):
        places([f"wn02={tmp_path}/nowhere"], tmp_path, "here")


def test_a_line_without_end_takes_no_memory_and_hides_no_other_row(tmp_path: Path) -> None:
    folder = write(tmp_path, row("a" * 12))
    with open(folder / "ledger-2026-01.jsonl", "r+b") as file:
        file.truncate(file.seek(0, 2) + (64 << 20))  # a hole
    outcomes = Outcomes({folder: "wn01"})
    tracemalloc.start()
    count = sum(1 for _ in outcomes.new())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1 and peak < 8 << 20
    write(folder, b"\n", row("b" * 12))
    assert ids(outcomes.new()) == ["b" * 12]


def test_memory_does_not_grow_with_the_ledger(tmp_path: Path) -> None:
    line = json.dumps(row()).encode() + b"\n"
    (tmp_path / "ledger-2026-01.jsonl").write_bytes(line * 10_000)
    outcomes = Outcomes({tmp_path: "wn01"})
    tracemalloc.start()
    count = sum(1 for _ in outcomes.new())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 10_000 and peak < 1 << 20
