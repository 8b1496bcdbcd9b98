"""The verbs that do something to a machine that runs: exec, cp, console, stop, kill, kill-all; and what stays of it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar
from tests.live.terminal import terminal
from tests.live.test_faults import next_job_works, report, started

WAITS = ("--", "sh", "-c", "echo up; exec sleep 1000")


def ended(job: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    return job.communicate(timeout=LONGEST)


def reading(belljar: Belljar, script: str) -> subprocess.Popen[bytes]:
    """A machine named `job` whose payload said `up` and listens to us."""
    job = belljar.popen("run", "--name", "job", "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert job.stdout is not None and job.stdout.readline() == b"up\n"
    return job


# -- exec ------------------------------------------------------------------------------------------------------------


def test_a_second_command_has_the_same_contract(belljar: Belljar) -> None:
    job = started(belljar, "--name", "job", *WAITS)
    data = os.urandom(3_000_000)
    done = belljar("exec", "job", "--", "sh", "-c", "cat; echo err >&2; exit 77", input=data)
    assert (done.returncode, done.stdout == data, done.stderr) == (77, True, b"err\n")
    assert belljar("exec", "job", "--", "sh", "-c", "kill -USR1 $$").returncode == -signal.SIGUSR1
    missing = belljar("exec", "job", "--", "/no/such/program")
    assert missing.returncode == 127 and missing.stderr.startswith(b"belljar: ")
    assert belljar("exec", "job", "--", "/etc/passwd").returncode == 126
    words = [b"new\nline", b"'\"`$(id)", b"\x80\xff", b""]
    done = belljar("exec", "--env", "ODD=\udc80 x", "job", "--", "sh", "-c", 'printf "%s\\0" "$@" "$ODD"', "sh", *words)
    assert done.stdout.split(b"\0")[:-1] == [*words, b"\x80 x"]
    assert job.poll() is None


def test_a_second_command_is_the_jobs_user_where_its_payload_is(belljar: Belljar, tmp_path: Path) -> None:
    started(belljar, "--name", "job", "--user", "54321:54322", "--cwd", "/var/tmp/here", *WAITS)
    assert belljar("exec", "job", "--", "sh", "-c", "id -u; id -g; pwd").stdout.split() == [
        b"54321",
        b"54322",
        b"/var/tmp/here",
    ]
    done = belljar(
        "exec", "--user", "0", "--cwd", "/etc", "job", "--", "sh", "-c", "id -un; pwd; touch /var/tmp/here/mine"
    )
    assert done.stdout.split() == [b"root", b"/etc"]
    done = belljar("exec", "--user", "999:999", "job", "--", "sh", "-c", "id -u; touch /etc/not 2>&1")
    assert done.stdout.startswith(b"999\n") and b"denied" in done.stdout


def test_two_commands_at_once_do_not_wait_for_each_other(belljar: Belljar) -> None:
    started(belljar, "--name", "job", *WAITS)
    first = belljar.popen("exec", "job", "--", "sh", "-c", "echo first; cat", stdin=subprocess.PIPE)
    assert first.stdout is not None and first.stdin is not None and first.stdout.readline() == b"first\n"
    assert belljar("exec", "job", "--", "echo", "second").stdout == b"second\n"
    first.stdin.write(b"still here")
    first.stdin.close()
    assert first.stdout.read() == b"still here" and first.wait(LONGEST) == 0


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR2"])
def test_a_signal_to_exec_goes_to_its_command_alone(belljar: Belljar, name: str) -> None:
    job = started(
        belljar, "--name", "job", "--", "sh", "-c", f"trap 'echo hit' {name}; echo up; while :; do sleep 0.05; done"
    )
    script = f"trap 'echo got; exit 3' {name}; echo ready; while :; do sleep 0.05; done"
    second = belljar.popen("exec", "job", "--", "sh", "-c", script)
    assert second.stdout is not None and second.stdout.readline() == b"ready\n"
    second.send_signal(getattr(signal, f"SIG{name}"))
    assert ended(second)[0] == b"got\n" and second.returncode == 3
    assert job.poll() is None and belljar("kill", "job").returncode == 0
    assert b"hit" not in ended(job)[0]


def test_a_client_that_is_killed_takes_its_command_along_and_nothing_else(belljar: Belljar) -> None:
    job = reading(belljar, "echo up; cat")
    second = belljar.popen("exec", "job", "--", "sh", "-c", "mkfifo /tmp/gone; echo ready; exec sleep 999")
    assert second.stdout is not None and second.stdout.readline() == b"ready\n"
    second.kill()
    second.wait(LONGEST)
    looks = "while pgrep -x sleep >/dev/null 2>&1 || grep -qs sleep /proc/[0-9]*/comm; do sleep 0.02; done; echo gone"
    assert belljar("exec", "job", "--", "sh", "-c", looks, timeout=30).stdout == b"gone\n"
    assert job.stdin is not None
    job.stdin.write(b"alive")
    assert ended(job)[0] == b"alive" and job.returncode == 0


def test_a_second_command_ends_with_the_payload(belljar: Belljar) -> None:
    job = reading(belljar, "echo up; read line; exit 4")
    second = belljar.popen("exec", "job", "--", "sh", "-c", "echo ready; exec sleep 1000")
    assert second.stdout is not None and second.stdout.readline() == b"ready\n"
    assert job.stdin is not None
    job.stdin.write(b"\n")
    ended(job)
    assert job.returncode == 4
    _, words = ended(second)
    assert second.returncode == 125 and words.startswith(b"belljar: ") and b"\nhint: " in words
    late = belljar("exec", "job", "--", "true")
    assert late.returncode == 125 and b"not running" in late.stderr
    assert belljar.leftovers() == []


# -- cp --------------------------------------------------------------------------------------------------------------


def test_files_and_folders_go_both_ways(belljar: Belljar, tmp_path: Path) -> None:
    started(belljar, "--name", "job", "--cwd", "/var/tmp/work", *WAITS)
    source = tmp_path / "source\nü"
    (source / "deep").mkdir(parents=True)
    (source / "deep/file").write_bytes(os.urandom(1_500_000))
    (source / "link").symlink_to("deep/file")
    (source / "deep/file").chmod(0o640)
    os.utime(source / "deep/file", ns=(10**18, 10**18 + 1))
    (source / os.fsdecode(b"byte\x80")).write_text("x")
    assert belljar("cp", str(source), "job:there").returncode == 0
    digest = hashlib.sha256((source / "deep/file").read_bytes()).hexdigest()
    assert belljar("exec", "job", "--", "sha256sum", "there/deep/file").stdout.split()[0] == digest.encode()
    assert belljar("cp", "job:/var/tmp/work/there", str(tmp_path / "back")).returncode == 0
    compared = subprocess.run(["diff", "-r", "--no-dereference", str(source), str(tmp_path / "back")], check=False)
    assert compared.returncode == 0
    facts = (tmp_path / "back/deep/file").stat()
    assert (facts.st_mtime_ns, facts.st_mode & 0o7777) == (10**18 + 1, 0o640)
    (tmp_path / "folder").mkdir()
    assert belljar("cp", "job:there/deep/file", str(tmp_path / "folder")).returncode == 0
    assert (tmp_path / "folder/file").stat().st_size == 1_500_000
    assert belljar("cp", str(source / "deep/file"), "job:/tmp/").returncode == 0
    assert belljar("exec", "job", "--", "stat", "-c", "%s", "/tmp/file").stdout == b"1500000\n"


def test_what_cannot_be_copied_is_said_and_the_job_goes_on(belljar: Belljar, tmp_path: Path) -> None:
    job = started(belljar, "--name", "job", "--user", "54321:54321", *WAITS)
    (tmp_path / "file").write_text("x")
    for words, says in (
        (("job:/no/such", str(tmp_path / "x")), b"/no/such"),
        ((str(tmp_path / "nosuch"), "job:/tmp"), b"nosuch: does not exist"),
        ((str(tmp_path / "file"), "job:/etc/denied"), b"denied"),
        ((str(tmp_path / "file"), "nosuch:/tmp"), b"nosuch: no machine"),
        ((str(tmp_path / "file"), str(tmp_path / "other")), b"must be ID:PATH"),
        (("job:/etc/shadow", str(tmp_path / "x")), b"shadow"),
        (("job:/etc/passwd", str(tmp_path / "no/folder/x")), b"no/folder"),
    ):
        done = belljar("cp", *words)
        lines = done.stderr.splitlines()
        assert done.returncode == 125 and says in done.stderr, done
        assert len(lines) == 2 and lines[0].startswith(b"belljar: ") and lines[1].startswith(b"hint: "), lines
        assert not {b"--in", b"--out"} & set(lines[1].replace(b"`", b" ").split()), lines
    assert sorted(path.name for path in tmp_path.iterdir() if path.name in ("x", "other", "no")) == []
    assert job.poll() is None
    belljar("kill", "job")
    late = belljar("cp", str(tmp_path / "file"), "job:/tmp")
    assert late.returncode == 125 and b"not running" in late.stderr


# -- console -----------------------------------------------------------------------------------------------------------


def test_the_console_shows_what_the_kernel_says_until_one_leaves(belljar: Belljar) -> None:
    started(belljar, "--name", "job", *WAITS)
    with terminal() as seat:
        before = seat.modes()
        console = seat.start(belljar.argv("console", "job"), belljar.env)
        seat.expect(rb"Ctrl-\] leaves\r\n")
        done = belljar("exec", "job", "--", "sh", "-c", "echo 8 > /proc/sys/kernel/printk; echo '<0>knock' > /dev/kmsg")
        assert done.returncode == 0, done.stderr
        seat.expect(b"knock")
        seat.type(b"\x1d")
        seat.rest()
        assert console.returncode == 0 and seat.modes() == before
    assert b"knock" in belljar("logs", "job", "--console").stdout


def test_the_console_ends_with_the_machine(belljar: Belljar) -> None:
    job = started(belljar, "--name", "job", *WAITS)
    with terminal() as seat:
        before = seat.modes()
        console = seat.start(belljar.argv("console", "job"), belljar.env)
        seat.expect(rb"leaves\r\n")
        job.terminate()
        seat.rest()
        assert console.returncode == 0 and seat.modes() == before
    looked = belljar("console", "job")
    assert looked.returncode == 125 and b"not running" in looked.stderr


def test_the_console_of_a_cold_boot_is_in_the_logs(belljar: Belljar) -> None:
    assert (
        belljar.run("--start", "cold", "--name", "job", "--", "sh", "-c", "echo '<0>said' > /dev/kmsg").returncode == 0
    )
    whole = belljar("logs", "job").stdout
    for part in (b"== journal ==", b"== qemu ==", b"== console ==", b"said"):
        assert part in whole


# -- stop, kill, kill-all --------------------------------------------------------------------------------------------


def test_stop_asks_first(belljar: Belljar, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 6' TERM; echo up; while :; do sleep 0.05; done"
    job = started(belljar, "--name", "job", "--report", str(tmp_path / "r"), "--", "sh", "-c", script)
    assert belljar("stop", "job").returncode == 0
    assert belljar.leftovers() == []  # it returns when the machine is gone
    assert ended(job)[0] == b"bye\n" and job.returncode == 6
    assert report(tmp_path / "r")["cause"] == "cancelled"
    assert belljar("stop", "job").returncode == 0  # an ended machine is success


def test_stop_uses_force_after_the_grace(belljar: Belljar, tmp_path: Path) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    job = started(belljar, "--name", "job", "--grace", "1h", "--report", str(tmp_path / "r"), "--", "sh", "-c", script)
    begin = time.monotonic()
    assert belljar("stop", "job", "--grace", "0.3s").returncode == 0
    assert 0.3 < time.monotonic() - begin < 5
    ended(job)
    assert job.returncode == -signal.SIGTERM and report(tmp_path / "r")["cause"] == "cancelled"


def test_kill_does_not_ask(belljar: Belljar, tmp_path: Path) -> None:
    job = started(
        belljar,
        "--report",
        str(tmp_path / "r"),
        "--",
        "sh",
        "-c",
        "trap 'echo asked' TERM; echo up; while :; do sleep 0.05; done",
    )
    (id,) = belljar.machines()
    assert belljar("kill", id[:4]).returncode == 0
    assert belljar.leftovers() == []
    assert ended(job)[0] == b"" and job.returncode == -signal.SIGKILL
    assert report(tmp_path / "r")["cause"] == "cancelled"
    assert belljar("kill", id).returncode == 0


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_a_machine_that_is_suspended_can_be_ended(belljar: Belljar, verb: str) -> None:
    job = started(belljar, "--name", "job", *WAITS)
    job.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, job.pid, os.WSTOPPED | os.WNOWAIT)
    assert belljar.json("show", "job")["state"] == "paused"
    begin = time.monotonic()
    assert belljar(verb, "job").returncode == 0
    assert time.monotonic() - begin < 5
    ended(job)
    assert job.returncode == (-signal.SIGTERM if verb == "stop" else -signal.SIGKILL)
    assert belljar.leftovers() == []


def test_a_machine_whose_supervisor_is_killed_can_be_ended_by_name(belljar: Belljar) -> None:
    job = started(belljar, "--name", "job", *WAITS)
    job.kill()
    job.wait(LONGEST)
    assert belljar("stop", "job").returncode == 0
    assert belljar.leftovers() == []
    waited = belljar("wait", "job")
    assert waited.returncode == 125 and b"belljar was killed while the machine was running" in waited.stderr


@pytest.fixture
def alone(belljar: Belljar, tmp_path: Path) -> Iterator[Belljar]:
    """belljar where no process of anybody else can be seen: `kill-all` means every machine, and others test here too."""
    words = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "sh", "-c", "echo up; exec sleep infinity")
    world = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert world.stdout is not None and world.stdout.readline() == b"up\n"
    (first,) = children(world.pid)

    class Alone(Belljar):
        def argv(self, *words: str | bytes) -> list[str | bytes]:
            return ["nsenter", "-t", str(first), "--pid", "--mount", "--", *super().argv(*words)]

    command = Alone(tmp_path)
    yield command
    world.kill()
    world.wait()
    world.stdout.close()
    command.close()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_kill_all_works_when_everything_else_is_broken(alone: Belljar, tmp_path: Path) -> None:
    jobs = [
        started(alone, "--name", f"job{number}", "--report", str(tmp_path / f"r{number}"), *WAITS)
        for number in range(3)
    ]
    (stopped,) = children(jobs[0].pid)
    os.kill(stopped, signal.SIGSTOP)
    (tmp_path / "broken.toml").write_text("[[[")
    broken = {"BELLJAR_PATHS_STORE": "/no/where", "BELLJAR_MACHINE_CPUS": "many", "HOME": "/nonexistent"}
    ids = set(alone.machines())
    done = alone("--config", str(tmp_path / "broken.toml"), "kill-all", "--format", "json", env=broken)
    assert done.returncode == 0, done.stderr
    assert {one["machine"]: one["result"] for one in json.loads(done.stdout)} == dict.fromkeys(ids, "killed")
    for pid in (stopped, jobs[0].pid):  # nsenter stops with its child
        os.kill(pid, signal.SIGCONT)
    for number, job in enumerate(jobs):
        words = ended(job)[1]
        assert job.returncode == 125 and b"QEMU was killed from outside" in words
        assert report(tmp_path / f"r{number}")["class"] == "node"
    assert alone.leftovers() == [] and alone.json("kill-all") == []
    next_job_works(alone)


def test_wait_tells_a_signal_as_a_shell_does(belljar: Belljar) -> None:
    belljar.run("--name", "job", "--", "sh", "-c", "kill -ABRT $$")
    assert belljar("wait", "job").returncode == 128 + signal.SIGABRT


# -- names and records -----------------------------------------------------------------------------------------------


def test_a_name_means_the_live_machine_then_the_latest(belljar: Belljar) -> None:
    belljar.run("--name", "job", "--", "sh", "-c", "exit 1")
    assert belljar("wait", "job").returncode == 1
    belljar.run("--name", "job", "--", "sh", "-c", "exit 2")
    assert belljar("wait", "job").returncode == 2
    started(belljar, "--name", "job", *WAITS)
    assert belljar.json("show", "job")["state"] == "running"
    belljar("kill", "job")
    assert [row["name"] for row in belljar.json("ps", "-a")] == ["job"] * 3


def test_a_prefix_that_fits_two_is_refused(belljar: Belljar) -> None:
    for _ in range(2):
        belljar.run("--", "true")
    for row in belljar.json("ps", "-a"):
        folder = belljar.logs / row["id"]
        folder.rename(folder.with_name("ab" + row["id"][2:]))
    done = belljar("show", "ab")
    assert done.returncode == 125 and done.stderr.startswith(b"belljar: ab: fits ab")


def test_a_kept_machine_can_be_looked_into(belljar: Belljar) -> None:
    assert belljar.run("--keep", "--name", "job", "--", "sh", "-c", "echo kept > /root/found; exit 5").returncode == 5
    assert belljar.machines() == [] and belljar.domains() == []
    (row,) = belljar.json("ps", "-a")
    overlay = Path(row["folder"]) / "overlay.qcow2"
    assert (Path(row["folder"]) / "journal.jsonl").exists()
    checked = subprocess.run(["qemu-img", "check", str(overlay)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert overlay.stat().st_mode & 0o077 == 0
    belljar("reap")
    assert overlay.exists()


def test_the_report_tells_everything_of_an_outcome(belljar: Belljar, tmp_path: Path) -> None:
    path = tmp_path / "report"
    assert belljar.run("--name", "job", "--report", str(path), "--", "sh", "-c", "exit 3").returncode == 3
    told = report(path)
    shown = belljar.json("show", "job")
    assert told == {name: shown["outcome"][name] for name in told}  # there the times are in words, too
    assert (told["cause"], told["class"], told["exit_code"], told["signal"], told["error"]) == (
        "finished",
        "payload",
        3,
        None,
        "",
    )
    assert (
        told["reason"] == "the payload ended with exit code 3"
        and told["image"] == "debian12"
        and told["start"] == "clone"
    )
    phases = told["phases"]
    assert isinstance(phases, dict) and {"prepare", "start", "boot", "identify", "run", "stop"} <= set(phases)
    assert isinstance(told["guest"], dict) and told["guest"]["peak_memory"] > 0
    assert isinstance(told["host"], dict) and told["host"]["peak_memory"] > 0
    assert isinstance(told["started"], float) and isinstance(told["ended"], float) and told["started"] < told["ended"]


def test_a_report_that_cannot_be_written_is_said_before_anything_starts(belljar: Belljar, tmp_path: Path) -> None:
    done = belljar.run("--report", str(tmp_path / "no/folder"), "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (125, b"") and b"--report" in done.stderr
    assert belljar.json("ps", "-a") == []


def test_every_reading_verb_gives_valid_json(belljar: Belljar) -> None:
    started(belljar, "--name", "odd:name", *WAITS)
    for words in (
        ("ps",),
        ("ps", "-a"),
        ("show", "odd:name"),
        ("image", "list"),
        ("template", "list"),
        ("config", "show"),
    ):
        assert belljar.json(*words) == belljar.json(*words), words
    lines = belljar("events", "--format", "json").stdout.splitlines()
    assert {json.loads(line)["event"] for line in lines} >= {"claim", "state", "spawned", "identity", "payload"}


def test_events_of_all_machines_come_as_they_happen(belljar: Belljar) -> None:
    events = belljar.popen("events", "-f", "--format", "json")
    belljar.run("--", "true")
    belljar.run("--", "true")
    assert events.stdout is not None
    seen: dict[str, list[str]] = {}
    while [states[-1] for states in seen.values()] != ["done", "done"]:
        event = json.loads(events.stdout.readline())
        if event["event"] == "state":
            seen.setdefault(event["machine"], []).append(event["state"])
    life = ["requested", "preparing", "starting", "booting", "ready", "running", "stopping", "cleaning", "done"]
    assert list(seen.values()) == [life, life]


def test_reap_says_what_it_did_and_then_has_nothing_to_do(belljar: Belljar) -> None:
    belljar.run("--name", "job", "--", "true", env={"BELLJAR_TESTING_ABORT_AT": "payload-started"})
    before = belljar.json("reap", "--dry-run")
    assert next(one["what"] for one in before if one["machine"]) == "machine without a supervisor"
    done = belljar.json("reap")
    assert {"domain", "machine"} <= {one["what"] for one in done}
    assert belljar.json("reap") == []
    next_job_works(belljar)
