"""The verbs that look at machines and wait for them, beside a machine that runs."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.live.conftest import LONGEST, Belljar

Process = subprocess.Popen[bytes]


@contextmanager
def waiting_job(belljar: Belljar, code: int = 7) -> Iterator[Process]:
    """A machine named `job` whose payload runs until its stdin ends, and then exits with *code*."""
    with belljar.popen("events", "-f", "--format", "json") as events:
        script = f"echo ready; cat >/dev/null; exit {code}"
        with belljar.popen("run", "--name", "job", "--", "sh", "-c", script, stdin=subprocess.PIPE) as job:
            assert job.stdout is not None and events.stdout is not None and job.stdin is not None
            try:
                assert job.stdout.readline() == b"ready\n"
                states = {json.loads(events.stdout.readline()).get("state") for _ in range(6)}
                assert "preparing" in states
                yield job
            finally:
                events.kill()
                job.stdin.close()
                job.wait(timeout=LONGEST)


def completed(line: str, belljar: Belljar) -> list[str]:
    """The words that belljar offers a shell at the end of this line."""
    words = belljar.folder / "words"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(words),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    belljar(env=asked)
    return words.read_text().replace("\v", " ").split()


def test_a_machine_that_runs_is_seen_by_every_reading_verb(belljar: Belljar) -> None:
    with waiting_job(belljar):
        (machine,) = belljar.json("ps")
        assert (machine["name"], machine["state"], machine["alive"]) == ("job", "running", True)
        id = machine["id"]
        shown = belljar.json("show", id[:6])
        assert shown["pid"] and os.path.exists(f"/proc/{shown['pid']}")
        assert b"running" in belljar("logs", "job", "--journal").stdout
        assert "job" in completed("belljar show ", belljar)
        doomed = belljar.json("kill-all", "--dry-run")
        assert [(one["machine"], one["pid"]) for one in doomed if one["machine"] == id] == [(id, shown["pid"])]
        assert belljar.json("reap", "--dry-run") == []
        beside = belljar("exec", "job", "--", "sh", "-c", "echo beside; exit 9")
        assert (beside.returncode, beside.stdout, beside.stderr) == (9, b"beside\n", b"")
    assert belljar.json("ps") == []
    (ended,) = belljar.json("ps", "-a")
    assert (ended["id"], ended["state"], ended["outcome"]["exit_code"]) == (id, "done", 7)
    assert belljar.leftovers() == []


def test_wait_exits_as_the_payload_did_and_followers_end_with_the_machine(belljar: Belljar) -> None:
    with waiting_job(belljar, code=42) as job:
        assert belljar("wait", "job", "--timeout", "0.2").returncode == 125
        waiter = belljar.popen("wait", "job")
        follower = belljar.popen("logs", "job", "-f")
        console = belljar.popen("logs", "job", "--console", "-f")
        assert follower.stdout is not None and job.stdin is not None
        while b"running" not in follower.stdout.readline():
            pass
        job.stdin.close()
        assert waiter.communicate(timeout=LONGEST) == (b"", b"")
        assert b"payload-ended" in follower.communicate(timeout=LONGEST)[0]
        console.communicate(timeout=LONGEST)
        assert (waiter.returncode, follower.returncode, console.returncode) == (42, 0, 0)
    assert belljar("wait", "job").returncode == 42  # also afterwards


def test_doctor_finds_this_host_fit(belljar: Belljar) -> None:
    findings: dict[str, Any] = {
        finding["name"]: finding for finding in json.loads(belljar("doctor", "--format", "json").stdout)["findings"]
    }
    failed = {name: one["text"] for name, one in findings.items() if one["grade"] == "fail"}
    assert failed == {}
    assert findings["accelerator"]["text"].startswith(("kvm: ", "tcg: "))
    assert findings["images"]["grade"] == "ok"
    assert findings["clone"]["grade"] == "ok" and "ready in" in findings["clone"]["text"]


@pytest.mark.parametrize("verb", ["show", "logs", "wait", "exec", "stop", "kill", "console"])
def test_a_machine_that_is_not_there_is_told_apart_at_once(belljar: Belljar, verb: str) -> None:
    begin = time.monotonic()
    done = belljar(verb, "nosuch", *(("--", "true") if verb == "exec" else ()))
    assert (done.returncode, done.stdout) == (125, b"")
    assert done.stderr.startswith(b"belljar: nosuch: no machine of this id or name\nhint: ")
    assert time.monotonic() - begin < 10
