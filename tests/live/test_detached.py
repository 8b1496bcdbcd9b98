"""Machines that live on their own: nobody who asked for one is needed for it, and nothing of it stays when it is over."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import LONGEST, Belljar

from belljar.model import Account, MachineSpec, Payload, Request, RunPayload, dumps

WAITS = ("--", "sh", "-c", "echo up; echo err >&2; exec sleep 1000")


def detached(belljar: Belljar, *words: str, **options: Any) -> str:
    done = belljar.run("--detach", *words, **options)
    assert done.returncode == 0, done.stderr.decode()
    id = done.stdout.decode().strip()
    assert len(id) == 12
    return id


def until_it_said(belljar: Belljar, id: str, word: bytes = b"up") -> None:
    follower = belljar.popen("logs", "-f", "--stdout", id)
    assert follower.stdout is not None and word in follower.stdout.readline()
    follower.kill()


def keeper_of(belljar: Belljar, id: str) -> int:
    journal = belljar.run_folder / "machines" / id / "journal.jsonl"
    return int(json.loads(journal.read_text().splitlines()[0])["pid"])


def test_a_detached_machine_ends_as_its_payload_and_its_words_are_kept(belljar: Belljar) -> None:
    id = detached(belljar, "--name", "job", "--", "sh", "-c", "echo out; echo err >&2; cat; exit 7")
    done = belljar("wait", id, "--timeout", str(LONGEST))
    assert (done.returncode, done.stderr) == (7, b"")
    assert belljar("logs", "--stdout", "job").stdout == b"out\n"
    assert belljar("logs", "--stderr", id).stdout == b"err\n"
    assert belljar.leftovers() == []


def test_the_verbs_work_on_it(belljar: Belljar, tmp_path: Path) -> None:
    events = belljar.popen("events", "-f", "--format", "json")
    id = detached(belljar, *WAITS)
    until_it_said(belljar, id)
    assert belljar("exec", id, "--", "sh", "-c", "exit 3").returncode == 3
    (tmp_path / "file").write_bytes(b"\0words\n")
    assert belljar("cp", str(tmp_path / "file"), f"{id}:/tmp/file").returncode == 0
    assert belljar("cp", f"{id}:/tmp/file", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back").read_bytes() == b"\0words\n"
    assert belljar("stop", id).returncode == 0
    assert belljar("wait", id).returncode == 128 + signal.SIGTERM
    assert belljar("logs", "--stderr", id).stdout == b"err\n"
    assert events.stdout is not None
    told = []
    for line in events.stdout:
        told.append(json.loads(line))
        if told[-1].get("state") == "done":
            break
    assert {one["machine"] for one in told} == {id} and told[0]["event"] == "claim"
    assert belljar.leftovers() == []


def test_it_lives_on_after_everything_around_who_asked_was_killed(belljar: Belljar) -> None:
    words = " ".join(str(word) for word in belljar.argv("run", "--detach"))
    script = f"{words} -- sh -c 'echo up; sleep 2; exit 9'; echo asked; sleep 1000"
    asker = subprocess.Popen(
        ["sh", "-c", script], env=belljar.env, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert asker.stdout is not None and asker.stdin is not None
    id = asker.stdout.readline().decode().strip()
    assert asker.stdout.readline() == b"asked\n"
    os.killpg(asker.pid, signal.SIGKILL)
    asker.wait(LONGEST)
    assert asker.stdout.read() == b""  # nobody holds its pipe any more
    for pipe in (asker.stdin, asker.stdout):
        pipe.close()
    keeper = keeper_of(belljar, id)
    assert os.getsid(keeper) == keeper and os.readlink(f"/proc/{keeper}/cwd") == "/"
    assert [os.readlink(f"/proc/{keeper}/fd/{number}") for number in (0, 1)] == ["/dev/null"] * 2
    assert belljar("wait", id, "--timeout", str(LONGEST)).returncode == 9
    assert belljar.leftovers() == []


def test_who_asks_may_be_killed_at_any_moment(belljar: Belljar) -> None:
    """Then there is a machine that lives on, or there is none."""
    detached(belljar, "--", "true")  # everything is warm now
    for number in range(6):
        asker = belljar.popen("run", "--detach", "--name", f"job{number}", "--", "true", start_new_session=True)
        time.sleep(random.uniform(0.02, 0.25))
        asker.kill()
        asker.wait(LONGEST)
    for _ in range(2):  # one that was just begun may not have been claimed when we looked first
        for machine in belljar.json("ps"):
            assert belljar("wait", machine["id"], "--timeout", str(LONGEST)).returncode == 0
        time.sleep(1)
    assert belljar.leftovers() == []
    assert {row["exit_code"] for row in ledger(belljar)} == {0}


def test_a_keeper_that_is_killed_leaves_nothing_after_one_reap(belljar: Belljar) -> None:
    id = detached(belljar, *WAITS)
    until_it_said(belljar, id)
    waiting = belljar.popen("wait", id)
    os.kill(keeper_of(belljar, id), signal.SIGKILL)
    _, words = waiting.communicate(timeout=LONGEST)
    assert waiting.returncode == 125 and b"belljar was killed while the machine was running" in words
    assert belljar("reap").returncode == 0
    assert belljar.leftovers() == [] and [row["id"] for row in ledger(belljar)] == [id]
    assert belljar("logs", "--stdout", id).stdout == b"up\n"


def ledger(belljar: Belljar) -> list[dict[str, Any]]:
    files = sorted(belljar.logs.glob("ledger-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_file_is_read_from_where_it_stands_and_nothing_else_is(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"first\nrest\n")
    with open(tmp_path / "input", "rb", buffering=0) as file:
        file.read(6)
        id = detached(belljar, "--", "cat", stdin=file)
    assert belljar("wait", id).returncode == 0 and belljar("logs", "--stdout", id).stdout == b"rest\n"
    id = detached(belljar, "--", "cat", input=b"from a pipe")
    assert belljar("wait", id).returncode == 0 and belljar("logs", "--stdout", id).stdout == b""


def test_a_flood_fills_no_disk(belljar: Belljar) -> None:
    belljar.env["BELLJAR_MACHINE_OUTPUT_LIMIT"] = "1M"
    id = detached(belljar, "--", "seq", "1", "2000000")
    assert belljar("wait", id).returncode == 0
    kept = belljar("logs", "--stdout", id).stdout
    assert kept.endswith(b"\n1999999\n2000000\n") and 500_000 < len(kept) < 1_300_000


def test_a_deadline_is_moved_and_the_guest_is_told(belljar: Belljar) -> None:
    id = detached(belljar, "--timeout", "1h", "--user", "54321", *WAITS)
    until_it_said(belljar, id)
    told = (
        "exec",
        "--user",
        "0",
        id,
        "--",
        "sh",
        "-c",
        "cat /etc/machinefeatures/shutdowntime; echo; stat -c %a /etc/machinefeatures/shutdowntime",
    )
    before = int(belljar(*told).stdout.split()[0])
    moved = belljar("extend", id, "2h")
    assert moved.returncode == 0 and moved.stdout.decode().startswith(f"{id}  20")
    after, mode = belljar(*told).stdout.split()
    assert abs(int(after) - before - 7200) <= 2 and mode == b"644"
    assert belljar("stop", "--at", "+2s", id).returncode == 0
    assert belljar("wait", id, "--timeout", str(LONGEST)).returncode == 128 + signal.SIGTERM
    assert ledger(belljar)[0]["cause"] == "walltime" and belljar.leftovers() == []
    late = belljar("extend", id, "1h")
    assert late.returncode == 125 and b"is not running" in late.stderr


# -- what programs use -------------------------------------------------------------------------------------------------


def request(**changes: Any) -> Request:
    payload = Payload((b"sh", b"-c", b"echo up; exec sleep 1000"), Account("root", 0, 0, "root", home="/root"))
    return Request(
        os.urandom(6).hex(), MachineSpec("debian12", 1, 512 << 20), RunPayload(payload), created=time.time(), **changes
    )


def test_a_tied_machine_ends_with_who_holds_the_tie(belljar: Belljar) -> None:
    one = request()
    keeper = belljar.popen("internal", "keep", "--tied", stdin=subprocess.PIPE)
    assert keeper.stdin is not None and keeper.stdout is not None
    keeper.stdin.write(dumps(one) + b"\n")
    keeper.stdin.flush()
    assert json.loads(keeper.stdout.readline()) == {"id": one.id}
    assert keeper.wait(LONGEST) == 0
    until_it_said(belljar, one.id)
    keeper.stdin.close()
    assert belljar("wait", one.id, "--timeout", str(LONGEST)).returncode == 128 + signal.SIGTERM
    assert belljar.leftovers() == []


def test_the_same_request_makes_no_second_machine(belljar: Belljar) -> None:
    line = dumps(request())
    first, second = belljar("internal", "keep", input=line), belljar("internal", "keep", input=line)
    assert first.returncode == 0 and second.returncode == 125
    answer = json.loads(second.stdout)
    assert answer["error"] == "BadRequest" and answer["message"].startswith("id: ") and answer["hint"]
    id = json.loads(first.stdout)["id"]
    assert belljar("kill", id).returncode == 0
    assert json.loads(belljar("internal", "keep", input=line).stdout)["error"] == "BadRequest"  # nor does it afterwards


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"nonsense\n", "standard input: "),
        (b"{}\n", "standard input: id: is missing"),
        (dumps(request()).replace(b'"cpus":1', b'"cpus":"one"'), "standard input: machine.cpus: 'one'"),
        (dumps(request()).replace(b'"debian12"', b'"none-such"'), "no image is called 'none-such'"),
    ],
)
def test_what_cannot_be_kept_is_answered_with_class_and_hint(belljar: Belljar, line: bytes, told: str) -> None:
    done = belljar("internal", "keep", input=line)
    answer = json.loads(done.stdout)
    assert done.returncode == 125 and answer["message"].startswith(told) and answer["hint"] and answer["error"]
    assert belljar.leftovers() == []


@pytest.mark.parametrize("option", [["--tty"], ["--report", "/tmp/never"]])
def test_nobody_is_there_for_a_terminal_or_a_report(belljar: Belljar, option: list[str]) -> None:
    done = belljar.run("--detach", *option, "--", "true")
    assert done.returncode == 125 and option[0].encode() in done.stderr and not Path("/tmp/never").exists()


@pytest.mark.parametrize("verb", ["reap", "ps", "wait", "run"])
def test_after_a_power_cut_it_has_its_end_its_row_once_and_no_disk(belljar: Belljar, verb: str) -> None:
    id = detached(belljar, "--name", "lost", *WAITS)
    until_it_said(belljar, id)
    assert belljar.domains() and list(belljar.scratch.iterdir())
    belljar.power_cut()
    done = belljar(verb, *{"wait": [id], "run": ["--", "true"]}.get(verb, []))
    assert done.returncode == (125 if verb == "wait" else 0), done.stderr
    assert belljar("reap").returncode == 0 and belljar.leftovers() == []
    shown = belljar.json("show", id)
    assert shown["outcome"]["reason"] == "the host was restarted while the machine was running"
    rows = [json.loads(line) for path in belljar.logs.glob("ledger-*") for line in path.read_text().splitlines()]
    assert [(row["cause"], row["name"]) for row in rows if row["id"] == id] == [("node-fault", "lost")]
    assert not [path for folder in belljar.logs.glob(".begun-*") for path in folder.iterdir()]


@pytest.mark.parametrize(("redirect", "code"), [(">&-", "0"), (">/dev/full", "125"), ("| :", "141")])
def test_the_id_of_a_machine_that_lives_is_told_though_standard_output_takes_nothing(
    belljar: Belljar, redirect: str, code: str
) -> None:
    words = " ".join(str(word) for word in belljar.argv("run", "--detach", "--", "sleep", "1000"))
    words = f"{{ {words}; echo $? >&2; }} | : " if redirect.startswith("|") else f"{words} {redirect}; echo $? >&2"
    done = subprocess.run(["sh", "-c", words], env=belljar.env, stderr=subprocess.PIPE, timeout=LONGEST, check=False)
    (id,) = belljar.machines()
    assert id in done.stderr.decode() and done.stderr.decode().split()[-1] == code
    assert belljar("stop", id).returncode == 0 and belljar.leftovers() == []
