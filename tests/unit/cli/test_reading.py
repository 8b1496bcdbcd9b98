"""The verbs that read: ps, show, logs, events, wait, reap."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from belljar.cli import parser_of
from belljar.cli.machine.show import story
from belljar.cli.render import moment
from belljar.errors import BadOption, BelljarError, NoSuchMachine, OutputMissing, UsageError
from belljar.host.locks import try_lock
from belljar.jobs import plain
from belljar.jobs.starting import finish_the_dead
from belljar.machine.cleaning.reaper import Undone

Call = Callable[..., int]
Said = pytest.CaptureFixture[str]


def test_ps_of_a_host_that_never_ran_a_machine_is_an_empty_table(call: Call, capsys: Said) -> None:
    assert call("ps") == 0
    assert capsys.readouterr().out.startswith("ID ")
    assert call("ps", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_ps_shows_live_machines_and_with_a_the_ended_ones_and_how_they_ended(
    call: Call, runtime: Any, capsys: Said
) -> None:
    runtime.machine("aaaaaaaaaaaa", name="first")
    runtime.machine("bbbbbbbbbbbb", ended=True, outcome={"cause": "finished", "exit_code": 3, "signal": None})
    runtime.machine("cccccccccccc", ended=True, outcome={"cause": "walltime", "exit_code": None, "signal": 15})
    call("ps")
    only_live = capsys.readouterr().out
    assert "first" in only_live and "bbbbbbbbbbbb" not in only_live
    call("ps", "--all")
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["bbbbbbbbbbbb"].endswith("exit 3")
    assert lines["cccccccccccc"].endswith("walltime signal 15")


def test_ps_with_a_has_the_newest_machine_first(call: Call, runtime: Any, capsys: Said) -> None:
    for number, id in enumerate(("bbbbbbbbbbbb", "cccccccccccc", "aaaaaaaaaaaa")):
        folder = runtime.machine(id, ended=True)
        (folder / "journal.jsonl").unlink()
        runtime.journal(folder, "claim", time=1.6e9 + number)
    call("ps", "-a", "-q")
    assert capsys.readouterr().out.split() == ["aaaaaaaaaaaa", "cccccccccccc", "bbbbbbbbbbbb"]


def test_json_has_moments_as_people_write_them_beside_the_seconds(call: Call, runtime: Any, capsys: Said) -> None:
    folder = runtime.machine("aaaaaaaaaaaa", ended=True, outcome={"started": 1.6e9 - 60.5, "phases": {"started": 0.5}})
    (folder / "request.json").write_text(json.dumps({"id": "aaaaaaaaaaaa", "created": 0.0}))
    call("show", "aaa", "--format", "json")
    told = json.loads(capsys.readouterr().out)
    assert (told["ended"], told["ended_at"]) == (1.6e9, "2020-09-13T12:26:40Z")
    assert told["outcome"]["started_at"] == "2020-09-13T12:25:39Z"
    assert "began_at" not in told and "created_at" not in told["request"]


def test_show_tells_where_its_deadline_was_moved(call: Call, runtime: Any, capsys: Said) -> None:
    folder = runtime.machine("aaaaaaaaaaaa")
    for at in (1.6e9, 1.7e9):
        runtime.journal(folder, "deadline", at=at)
    call("show", "aaa")
    assert f"deadline       {moment(1.7e9)}\n" in capsys.readouterr().out


def test_stop_at_a_moment_that_has_passed_is_refused(call: Call, runtime: Any) -> None:
    runtime.machine("aaaaaaaaaaaa")
    with pytest.raises(BadOption, match="--at: this moment has passed"):
        call("stop", "--at", "2020-12-24T18:00", "aaa")


def test_ps_marks_a_machine_whose_supervisor_is_dead(call: Call, runtime: Any, capsys: Said) -> None:
    runtime.machine("aaaaaaaaaaaa")
    call("ps")
    assert "(abandoned)" in capsys.readouterr().out


def test_a_name_with_escape_sequences_is_shown_harmlessly(call: Call, runtime: Any, capsys: Said) -> None:
    runtime.machine("aaaaaaaaaaaa", name="\x1b[2Jgone")
    call("ps")
    call("show", "aaa")
    assert "\x1b" not in capsys.readouterr().out


def test_show_tells_what_was_asked_and_how_it_ended(call: Call, runtime: Any, capsys: Said) -> None:
    outcome = {
        "cause": "finished", "class": "payload", "exit_code": 0, "phases": {"boot": 0.12345},
        "guest": {"user": 1.0, "system": 0.5, "peak_memory": 1 << 20}, "start": "clone", "accelerator": "tcg",
        "accelerator_reason": "/dev/kvm may not be used by uid 7",
    }  # fmt: skip
    runtime.machine("aaaaaaaaaaaa", name="mine", ended=True, outcome=outcome)
    assert call("show", "mine") == 0
    shown = capsys.readouterr().out
    for fact in (
        "echo 'a b'",
        "512 MiB",
        "clone tcg",
        "why tcg        /dev/kvm may not be used by uid 7",
        "boot           0.123",
        "1.00 s user",
        "exit code      0",
    ):
        assert fact in shown
    call("show", "aaa", "--format", "json")
    assert json.loads(capsys.readouterr().out)["outcome"]["phases"] == {"boot": 0.12345}


def test_show_tells_programs_what_it_tells_people(call: Call, runtime: Any, capsys: Said) -> None:
    folder = runtime.machine("aaaaaaaaaaaa", ended=True)
    runtime.journal(folder, "spawned", argv=["qemu", "-S"])
    runtime.journal(folder, "network-refused", address="10.0.0.1", port=22, transport="tcp", reason="private", count=1)
    (folder / "virtiofsd.log").write_text("words")
    (folder / "overlay.qcow2").write_bytes(b"disk")
    call("show", "aaa")
    shown = capsys.readouterr().out
    assert "qemu -S" not in shown and "10.0.0.1:22/tcp (private)" in shown
    assert f"{folder}/virtiofsd.log (5 B)" in shown and f"{folder}/overlay.qcow2 (4 B)" in shown
    runtime.verbose = True
    call("show", "aaa")
    assert "\nQEMU\n  started as     qemu -S\n" in capsys.readouterr().out
    call("show", "aaa", "--format", "json")
    told = json.loads(capsys.readouterr().out)
    assert told["qemu"] == ["qemu", "-S"] and told["network"][0]["address"] == "10.0.0.1"
    assert {"what": "disk", "path": f"{folder}/overlay.qcow2", "size": 4} in told["records"]


def test_show_lives_with_a_record_that_is_broken(call: Call, runtime: Any, capsys: Said) -> None:
    folder = runtime.machine("aaaaaaaaaaaa")
    (folder / "request.json").write_text("{")
    (folder / "journal.jsonl").write_bytes(b"\xff\n{}\n[]\n")
    assert call("show", "aaa") == 0


def test_an_unknown_or_ambiguous_machine_is_refused(call: Call, runtime: Any) -> None:
    runtime.machine("aaaaaaaaaaaa")
    runtime.machine("aaaaaaaaaaab")
    with pytest.raises(NoSuchMachine):
        call("show", "b")
    with pytest.raises(UsageError, match="fits"):
        call("logs", "aaaa")


# -- logs --------------------------------------------------------------------------------------------------------------


def test_logs_shows_journal_qemu_and_console_also_where_one_was_never_written(
    call: Call, runtime: Any, capfd: Any
) -> None:
    folder = runtime.machine("aaaaaaaaaaaa", ended=True)
    (folder / "console.log").write_bytes(b"Linux version 6\r\n\xff")
    assert call("logs", "aaa") == 0
    out = capfd.readouterr().out
    assert out.index("== journal ==") < out.index("claim") < out.index("== qemu ==") < out.index("Linux version 6")


def test_logs_of_one_kind_are_the_bytes_themselves(call: Call, runtime: Any, capfdbinary: Any) -> None:
    folder = runtime.machine("aaaaaaaaaaaa", ended=True)
    (folder / "console.log").write_bytes(b"\x1b[31mred\xff\x00")
    call("logs", "aaa", "--console")
    assert capfdbinary.readouterr().out == b"\x1b[31mred\xff\x00"
    call("logs", "aaa", "--qemu")
    assert capfdbinary.readouterr().out == b""


def test_a_guests_console_cannot_steer_the_terminal_that_shows_it() -> None:
    assert plain("ok\n\x1b]0;title\x07\x9b�\tend\r", "\n\t") == "ok\n\\x1b]0;title\\x07\\x9b�\tend\\r"


def test_an_event_is_one_line_whatever_its_facts_hold() -> None:
    line = story(
        {"time": 0.5, "event": "state", "state": "booting", "reason": "a b\nc\x1b", "start": "clone", "empty": ""}
    )
    assert line.endswith('.500 booting    reason="a b\\nc\\u001b" start=clone')


@pytest.mark.parametrize("which", ["--journal", "--console", "--qemu"])
def test_following_a_machine_that_has_ended_ends(call: Call, runtime: Any, which: str) -> None:
    folder = runtime.machine("aaaaaaaaaaaa", ended=True)
    (folder / "console.log").write_bytes(b"one\n")
    assert call("logs", "aaa", which, "-f") == 0


def test_following_the_journal_ends_with_the_machine(call: Call, runtime: Any, capsys: Said) -> None:
    folder = runtime.machine("aaaaaaaaaaaa")
    runtime.journal(folder, "state", state="done")
    lock = try_lock(folder / "lock")
    assert lock and call("logs", "aaa", "-f") == 0
    lock.release()
    assert "done" in capsys.readouterr().out


# -- events ------------------------------------------------------------------------------------------------------------


def test_events_of_all_machines_come_in_the_order_of_time(call: Call, runtime: Any, capsys: Said) -> None:
    import time

    now = time.time()
    first, second = runtime.machine("aaaaaaaaaaaa"), runtime.machine("bbbbbbbbbbbb")
    runtime.journal(second, "state", time=now - 1, state="booting")
    runtime.journal(first, "state", time=now, state="ready")
    call("events", "--format", "json")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(event["machine"], event["state"]) for event in events] == [
        ("bbbbbbbbbbbb", "booting"),
        ("aaaaaaaaaaaa", "ready"),
    ]


# -- wait --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"exit_code": 0, "signal": None}, 0),
        ({"exit_code": 7, "signal": None}, 7),
        ({"exit_code": 125, "signal": None}, 125),
        ({"exit_code": None, "signal": 9}, 137),
    ],
)
def test_wait_exits_as_the_payload_did(call: Call, runtime: Any, outcome: dict[str, Any], code: int) -> None:
    runtime.machine("aaaaaaaaaaaa", ended=True, outcome=outcome)
    assert call("wait", "aaa") == code


def test_wait_for_a_machine_that_never_ran_its_payload_says_why(call: Call, runtime: Any) -> None:
    runtime.machine(
        "aaaaaaaaaaaa", ended=True, outcome={"exit_code": None, "signal": None, "reason": "no agent", "hint": "h"}
    )
    with pytest.raises(BelljarError, match="no agent"):
        call("wait", "aaa")


def test_wait_gives_up_at_its_deadline(call: Call, runtime: Any) -> None:
    holder = try_lock(runtime.machine("aaaaaaaaaaaa") / "lock")
    with pytest.raises(BelljarError, match="still running after"):
        call("wait", "aaa", "--timeout", "0.01")
    assert holder


def test_wait_for_a_machine_whose_keeper_was_killed_has_it_finished(call: Call, runtime: Any) -> None:
    runtime.machine("aaaaaaaaaaaa")
    with pytest.raises(BelljarError, match="cannot be finished"):  # this reaper only counts
        call("wait", "aaa")
    assert runtime.reaper.reaped == 1


# -- reap --------------------------------------------------------------------------------------------------------------


def test_reap_reports_what_was_undone_and_is_silent_when_there_was_nothing(
    call: Call, runtime: Any, capsys: Said
) -> None:
    assert call("reap") == 0
    assert capsys.readouterr().out == ""
    runtime.reaper.found = [Undone("aaaaaaaaaaaa", "domain", "pid 7")]
    call("reap")
    assert "aaaaaaaaaaaa  domain  pid 7" in capsys.readouterr().out
    call("reap", "--format", "json")
    assert json.loads(capsys.readouterr().out) == [
        {"user": "", "machine": "aaaaaaaaaaaa", "what": "domain", "where": "pid 7", "error": ""}
    ]


def test_what_could_not_be_cleared_away_is_in_the_table_and_in_the_exit_code(
    call: Call, runtime: Any, capsys: Said
) -> None:
    runtime.reaper.found = [
        Undone("aaaaaaaaaaaa", "not finished", error="QEMU does not go away"),
        Undone("b", "machine"),
    ]
    assert call("reap") == 1
    said = capsys.readouterr().out
    assert "aaaaaaaaaaaa  not finished  QEMU does not go away" in said and "b             machine" in said
    assert call("reap", "--format", "json") == 1
    assert [one["error"] for one in json.loads(capsys.readouterr().out)] == ["QEMU does not go away", ""]


def test_a_start_tells_what_could_not_be_cleared_away_in_one_line(runtime: Any, capsys: Said) -> None:
    runtime.reaper.found = [Undone(id, "not finished", error="no") for id in ("aaaaaaaaaaaa", "bbbbbbbbbbbb")]
    finish_the_dead(runtime)
    assert capsys.readouterr().err == (
        "belljar: what is left of aaaaaaaaaaaa, bbbbbbbbbbbb cannot be cleared away; see `belljar reap`\n"
    )
    runtime.reaper.found = [Undone("aaaaaaaaaaaa", "machine")]
    finish_the_dead(runtime)
    assert capsys.readouterr().err == ""


def test_reap_can_only_look(call: Call, runtime: Any, capsys: Said) -> None:
    runtime.reaper.found = [Undone("aaaaaaaaaaaa", "domain", "pid 7")]
    call("reap", "--dry-run")
    assert runtime.reaper.reaped == 0
    assert "aaaaaaaaaaaa" in capsys.readouterr().out


# -- several at once -----------------------------------------------------------------------------------------------------


def test_several_machines_are_waited_for_each_by_itself(
    runtime: Any, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    for id, code in (("aaa", 0), ("bbb", 3), ("ccc", 4)):
        runtime.machine(id, ended=True, outcome={"exit_code": code, "cause": "finished", "class": "payload"})
    assert call("wait", "aaa", "bbb", "ccc", "aaa") == 3
    assert call("wait", "ccc", "nosuch", "bbb") == 4
    assert "nosuch" in capfd.readouterr().err
    assert call("stop", "aaa", "bbb") == 0 == call("kill", "aaa", "bbb")
    assert call("kill", "aaa", "nosuch") == 125
    said = capfd.readouterr().err
    assert said.startswith("belljar: nosuch") and "hint: " in said


def test_ids_alone(runtime: Any, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    runtime.machine("aaa", ended=True, outcome={"exit_code": 0})
    runtime.machine("bbb")
    assert call("ps", "-aq") == 0
    assert sorted(capsys.readouterr().out.split()) == ["aaa", "bbb"]


def test_an_option_whose_value_may_be_left_out_is_given_all_the_same() -> None:
    given = [parser_of("reap").parse_args(words).batch for words in ([], ["--batch"], ["--batch", "slurm"])]
    assert given == [None, False, "slurm"]


def test_the_files_that_a_guest_left_are_listed_and_shown(
    runtime: Any, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runtime.machine("aaaa")
    (folder / "joboutputs").mkdir()
    (folder / "joboutputs/log").write_text("hello")
    assert call("logs", "--joboutputs", "aaaa") == 0
    assert capsys.readouterr().out.split() == ["5", "log"]
    assert call("logs", "--joboutput", "log", "aaaa") == call("logs", "aaaa", "--joboutput", "log") == 0
    assert capsys.readouterr().out == "hellohello"
    with pytest.raises(OutputMissing, match="the guest has left no 'other'"):
        call("logs", "aaaa", "--joboutput", "other")
    for words in ([], ["--console"], ["--joboutputs"]):
        with pytest.raises(BadOption, match="ID"):
            call("logs", *words)
