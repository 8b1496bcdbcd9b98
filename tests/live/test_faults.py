"""Whatever is killed, whenever: the outcome has the right class and a sentence, nothing is left, the next job works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.live.conftest import Belljar, marked_processes

from belljar.journal import Ledger, read

POINTS = [
    "after-claim", "after-overlay", "after-spawn", "after-boot", "after-qmp", "after-agent", "payload-sent",
    "payload-started", "payload-ended", "status-written", "before-stop", "after-stop", "before-release",
    "outcome-written",
]  # fmt: skip


def report(path: Path) -> dict[str, object]:
    return dict(json.loads(path.read_text()))


def next_job_works(belljar: Belljar) -> None:
    done = belljar.run("--", "echo", "next")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"next\n", b"")
    assert belljar.leftovers() == []


# The way of a cold start differs from a clone's at these points only.
COLD_POINTS = ["after-overlay", "after-spawn", "after-boot", "payload-started"]


@pytest.mark.parametrize(
    ("start", "point"), [*(("clone", point) for point in POINTS), *(("cold", point) for point in COLD_POINTS)]
)
def test_belljar_killed_at_any_point_leaves_nothing_after_one_reap(belljar: Belljar, point: str, start: str) -> None:
    died = belljar.run("--start", start, "--", "true", env={"BELLJAR_TESTING_ABORT_AT": point})
    assert died.returncode == -signal.SIGKILL
    reaped = belljar("reap")
    assert reaped.returncode == 0, reaped.stderr
    assert belljar.leftovers() == []
    rows = belljar.json("ps", "-a")
    assert len(rows) == 1 and rows[0]["state"] == "done"
    (row,) = [row for row, _ in Ledger(belljar.logs).since()]
    assert row["cause"] == ("finished" if point == "outcome-written" else "node-fault")
    next_job_works(belljar)


def test_the_next_start_of_belljar_reaps_too(belljar: Belljar) -> None:
    belljar.run("--", "true", env={"BELLJAR_TESTING_ABORT_AT": "payload-started"})
    next_job_works(belljar)


def started(belljar: Belljar, *words: str) -> subprocess.Popen[bytes]:
    """A machine whose payload has said that it runs."""
    keeper = belljar.popen("run", *words)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    return keeper


def domain_of(belljar: Belljar) -> int:
    (id,) = belljar.machines()
    return next(pid for pid, machine in marked_processes() if machine == id)


def test_qemu_killed_during_the_payload_is_told_as_that(belljar: Belljar, tmp_path: Path) -> None:
    keeper = started(belljar, "--report", str(tmp_path / "r"), "--", "sh", "-c", "echo up; sleep 1000")
    os.kill(domain_of(belljar), signal.SIGKILL)
    _, err = keeper.communicate(timeout=30)
    assert keeper.returncode == 125 and b"QEMU was killed from outside" in err
    outcome = report(tmp_path / "r")
    assert (outcome["cause"], outcome["class"], outcome["exit_code"]) == ("host-oom", "node", None)
    next_job_works(belljar)


def test_qemu_killed_while_it_boots_is_told_as_that(belljar: Belljar, tmp_path: Path) -> None:
    keeper = belljar.popen("run", "--start", "cold", "--report", str(tmp_path / "r"), "--", "true")
    pid = wait_for_domain(belljar)
    os.kill(pid, signal.SIGKILL)
    _, err = keeper.communicate(timeout=30)
    assert keeper.returncode == 125 and b"killed from outside" in err
    next_job_works(belljar)


def wait_for_domain(belljar: Belljar) -> int:
    """The machine's QEMU, as soon as its journal has its pid."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for machine in belljar.machines():
            for event in read(belljar.run_folder / "machines" / machine):
                if event["event"] == "spawned":
                    return int(event["pid"])
        os.sched_yield()
    raise AssertionError("no QEMU within 60 s")


def test_a_qemu_that_hangs_at_the_end_is_killed(belljar: Belljar) -> None:
    keeper = started(belljar, "--grace", "1s", "--", "sh", "-c", "echo up; sleep 1000")
    os.kill(domain_of(belljar), signal.SIGSTOP)
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=30)
    assert keeper.returncode == -signal.SIGTERM
    assert belljar.leftovers() == []


def test_a_panic_of_the_guests_kernel_is_told_as_that(belljar: Belljar, tmp_path: Path) -> None:
    crash = "echo 1 > /proc/sys/kernel/sysrq; echo c > /proc/sysrq-trigger; sleep 100"
    done = belljar.run("--report", str(tmp_path / "r"), "--", "sh", "-c", crash)
    assert done.returncode == 125 and b"kernel crashed" in done.stderr
    outcome = report(tmp_path / "r")
    assert (outcome["cause"], outcome["class"]) == ("guest-lost", "transient")
    next_job_works(belljar)


@pytest.mark.parametrize("how", ["echo o > /proc/sysrq-trigger", "echo b > /proc/sysrq-trigger"])
def test_a_payload_that_ends_its_machine_is_told_so(belljar: Belljar, tmp_path: Path, how: str) -> None:
    done = belljar.run(
        "--report", str(tmp_path / "r"), "--", "sh", "-c", f"echo 1 > /proc/sys/kernel/sysrq; {how}; sleep 100"
    )
    assert done.returncode == 125 and b"the payload" in done.stderr
    outcome = report(tmp_path / "r")
    assert (outcome["cause"], outcome["class"]) == ("guest-lost", "user")


def test_a_guest_out_of_memory_ends_the_payload_as_the_oom_killer_does(belljar: Belljar, tmp_path: Path) -> None:
    hog = "keep = []\nwhile True: keep.append(b'x' * (1 << 20))"
    done = belljar.run("-m", "256M", "--report", str(tmp_path / "r"), "--", "python3", "-c", hog)
    outcome = report(tmp_path / "r")
    assert done.returncode == -signal.SIGKILL, outcome
    assert (outcome["cause"], outcome["class"]) == ("guest-oom", "payload") and b"memory" in done.stderr


def test_a_full_host_disk_is_told_as_that(belljar: Belljar, tmp_path: Path) -> None:
    belljar.scratch.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,mode=711", "tmpfs", str(belljar.scratch)], check=True)
    try:
        fill = "head -c 200M /dev/urandom > /var/tmp/x; sync; sleep 100"
        done = belljar.run(
            "--report", str(tmp_path / "r"), "--", "sh", "-c", fill, env={"BELLJAR_IMAGE_RESERVE": "16M"}
        )
        outcome = report(tmp_path / "r")
        assert done.returncode == 125 and b"no space" in done.stderr.lower(), outcome
        assert (outcome["cause"], outcome["class"]) == ("node-fault", "node")
        assert belljar.leftovers() == []
    finally:
        subprocess.run(["umount", str(belljar.scratch)], check=True)


def test_a_start_that_is_cancelled_is_gone_at_once_and_ran_nothing(belljar: Belljar, tmp_path: Path) -> None:
    keeper = belljar.popen("run", "--start", "cold", "--report", str(tmp_path / "r"), "--", "echo", "ran")
    wait_for_domain(belljar)
    begin = time.monotonic()
    keeper.send_signal(signal.SIGTERM)
    out, _ = keeper.communicate(timeout=30)
    assert time.monotonic() - begin < 2
    assert keeper.returncode == -signal.SIGTERM and out == b""
    assert report(tmp_path / "r")["cause"] == "cancelled"
    assert belljar.leftovers() == []


def test_a_second_term_ends_what_ignores_the_first(belljar: Belljar, tmp_path: Path) -> None:
    script = "trap 'echo ignored' TERM; echo up; while :; do sleep 0.05; done"
    keeper = started(belljar, "--grace", "1h", "--report", str(tmp_path / "r"), "--", "sh", "-c", script)
    assert keeper.stdout is not None
    keeper.send_signal(signal.SIGTERM)
    assert keeper.stdout.readline() == b"ignored\n"
    begin = time.monotonic()
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=30)
    assert time.monotonic() - begin < 2 and keeper.returncode == -signal.SIGTERM
    assert report(tmp_path / "r")["cause"] == "cancelled"
    assert belljar.leftovers() == []


def test_the_grace_ends_what_ignores_term(belljar: Belljar) -> None:
    keeper = started(
        belljar, "--grace", "0.5s", "--", "sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"
    )
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=30)
    assert keeper.returncode == -signal.SIGTERM
    assert belljar.leftovers() == []


def test_a_time_limit_ends_by_term_and_after_the_grace_by_kill(belljar: Belljar, tmp_path: Path) -> None:
    words = ("--grace", "0.5s", "--report", str(tmp_path / "r"), "--timeout")
    obeys = belljar.run(*words, "0.5s", "--", "sleep", "1000")
    assert obeys.returncode == -signal.SIGTERM and report(tmp_path / "r")["cause"] == "walltime"
    # A shell on a busy host may take a second until it ignores anything.
    ignores = belljar.run(*words, "3s", "--", "sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
    assert ignores.returncode == -signal.SIGKILL and b"time limit" in ignores.stderr
    outcome = report(tmp_path / "r")
    assert (outcome["cause"], outcome["class"]) == ("walltime", "walltime")


def test_suspending_halts_the_guest_and_its_clock_is_right_afterwards(belljar: Belljar, tmp_path: Path) -> None:
    script = "echo up; i=0; while [ $i -lt 20 ]; do sleep 0.1; i=$((i+1)); done; date +%s.%N"
    keeper = started(belljar, "--timeout", "15s", "--", "sh", "-c", script)
    domain = domain_of(belljar)
    keeper.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(keeper.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    before = cpu_ticks(domain)
    subprocess.run(["sleep", "1"], check=True)
    assert cpu_ticks(domain) - before <= 10, "the vcpus went on"
    keeper.send_signal(signal.SIGCONT)
    out, err = keeper.communicate(timeout=60)
    assert keeper.returncode == 0, err
    assert abs(float(out) - time.time()) < 2


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_template_in_the_making_that_is_killed_is_made_anew(belljar: Belljar, tmp_path: Path) -> None:
    keeper = belljar.popen("run", "--memory", "320M", "--", "echo", "made")
    deadline = time.monotonic() + 60
    while not (making := [pid for pid in marked_or_making(belljar)]):
        assert time.monotonic() < deadline
        os.sched_yield()
    keeper.kill()
    keeper.communicate()
    belljar("reap")
    assert not set(making) & {pid for pid, _ in marked_processes()}
    done = belljar.run("--memory", "320M", "--start", "clone", "--", "echo", "made")
    assert (done.returncode, done.stdout) == (0, b"made\n"), done.stderr
    belljar.run("--memory", "320M", "--", "true")


def marked_or_making(belljar: Belljar) -> list[int]:
    """QEMU processes started by our belljar, a template's too."""
    ids = set(belljar.machines())
    return [pid for pid, id in marked_processes() if id in ids]
