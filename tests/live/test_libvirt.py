"""Jobs by a real libvirt: that they are the same jobs, and what becomes of them when its daemon does not do its part."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live import libvirt_lab
from tests.live.conftest import Belljar, marked_processes
from tests.live.libvirt_lab import Daemon

import belljar as belljar_package
from belljar.host.processes import all_pids
from belljar.host.processes import command_line as process_words
from belljar.hypervisor import LibvirtSettings, Settings
from belljar.hypervisor.libvirt.driver import LibvirtHypervisor

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SLOW_KILL, SLOW_STOP = (pytest.param(number, marks=pytest.mark.slow) for number in (KILL, STOP))
GOLDEN = Path(__file__).parents[1] / "unit/hypervisor/libvirt/golden"
QUICK = {"BELLJAR_LIBVIRT_TIMEOUT": "4s", "BELLJAR_LIBVIRT_START_TIMEOUT": "6s"}
SOON = 20.0  # seconds for what libvirt does by itself


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with libvirt_lab.running() as daemon:
        yield daemon


@pytest.fixture
def belljar(tmp_path: Path, daemon: Daemon) -> Iterator[Belljar]:
    command = Belljar(tmp_path, settings=daemon.settings)
    yield command
    command.close()


def outcome(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def nothing_is_left(belljar: Belljar, daemon: Daemon) -> None:
    assert belljar.leftovers() == []
    deadline = time.monotonic() + SOON
    while (names := daemon.names()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names == []


def next_job_works(belljar: Belljar, daemon: Daemon) -> None:
    done = belljar.run("--", "echo", "next")
    assert (done.returncode, done.stdout) == (0, b"next\n"), done.stderr
    nothing_is_left(belljar, daemon)


def test_a_job_is_the_same_job(belljar: Belljar, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "in").write_bytes(b"\0in\xff")
    script = "cat in; echo err >&2; echo written > /mnt/file; id -u; stat -c %s /dev/disk/by-id/virtio-scratch 2>/dev/null; df -k --output=target /scratch | tail -1; exit 7"
    done = belljar.run(
        "--report", str(tmp_path / "r"), "--share", f"{tmp_path}/shared:/mnt:rw", "--scratch", "64M", "--cwd", "/tmp",
        "--in", f"{tmp_path}/in:in", "--", "sh", "-c", script,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (7, b"err\n")
    assert done.stdout == b"\0in\xff0\n/scratch\n"
    assert (tmp_path / "shared/file").read_text() == "written\n"
    told = outcome(tmp_path / "r")
    assert (told["start"], told["class"]) == ("cold", "payload") and "booted cold" in told["start_reason"]
    assert told["host"]["user"] > 0 and told["host"]["peak_memory"] > 64 << 20
    nothing_is_left(belljar, daemon)


@pytest.mark.slow
def test_a_signal_to_the_command_reaches_the_payload(belljar: Belljar, daemon: Daemon) -> None:
    keeper = belljar.popen("run", "--", "sh", "-c", "trap 'exit 9' TERM; echo up; while :; do sleep 0.1; done")
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(60) == 9
    nothing_is_left(belljar, daemon)


@pytest.mark.parametrize(
    ("words", "settings", "named"),
    [
        (("--start", "clone"), {}, b"always booted cold"),
        (("--network", "user"), {"BELLJAR_NETWORK_EGRESS": "guarded"}, b"libvirt has no guard"),
        (("--network", "isolated:a"), {}, b"--network isolated"),
    ],
)
def test_what_libvirt_cannot_give_is_refused_by_name(
    belljar: Belljar, words: tuple[str, ...], settings: dict[str, str], named: bytes
) -> None:
    done = belljar.run(*words, "--", "true", env=settings)
    assert done.returncode == 125 and named in done.stderr, done.stderr
    assert belljar.leftovers() == []


def test_a_warm_image_is_not_prepared_with_libvirt(belljar: Belljar) -> None:
    done = belljar("image", "warm", "by-libvirt", "--from", "debian12", "--cwd", "/", "--", "true")
    assert done.returncode == 125 and b"always booted cold" in done.stderr, done.stderr
    assert belljar("image", "show", "by-libvirt").returncode == 125 and belljar.leftovers() == []


def test_a_disk_that_qemus_user_cannot_reach_is_named(belljar: Belljar, daemon: Daemon) -> None:
    """QEMU opens it by its name, as a user without rights, and the tests' folders are root's alone."""
    done = belljar.run("--", "true", env={"BELLJAR_QEMU_USER": "nobody"})
    assert done.returncode == 125 and b"Permission denied" in done.stderr, done.stderr
    nothing_is_left(belljar, daemon)


@pytest.mark.slow
def test_an_open_user_network_can_be_had(belljar: Belljar, daemon: Daemon) -> None:
    done = belljar.run(
        "--network", "user", "--", "sh", "-c", "cat /sys/class/net/e*/operstate", env={"BELLJAR_NETWORK_EGRESS": "open"}
    )
    assert (done.returncode, done.stdout) == (0, b"up\n"), done.stderr
    nothing_is_left(belljar, daemon)


@pytest.mark.parametrize("name", ["tcg", "kvm", "bios", "uefi", "disc", "all", "model"])
def test_libvirt_makes_a_command_line_of_what_it_is_told(daemon: Daemon, name: str) -> None:
    words = daemon.virsh("domxml-to-native", "qemu-argv", str(GOLDEN / f"{name}.xml"))
    assert "guest=belljar-0123456789ab" in words and "org.belljar.agent" in words
    assert ("tb-size=64" in words) == (name not in ("kvm", "model"))


def test_doctor_tells_who_answers(belljar: Belljar, daemon: Daemon) -> None:
    done = belljar("doctor", "--only", "libvirt")
    assert done.returncode == 0 and f"answers at {daemon.uri}".encode() in done.stdout, done.stdout
    done = belljar(
        "doctor", "--only", "libvirt", env={"BELLJAR_MACHINE_HYPERVISOR": "libvirt:qemu+unix:///system?socket=/x"}
    )
    assert done.returncode == 1 and b"cannot be reached" in done.stdout, done.stdout


# -- a daemon that does not do its part --------------------------------------------------------------------------------


def is_a_node_fault(done: Any, err: bytes, report: Path) -> None:
    assert done.returncode == 125, err
    told = outcome(report)
    assert (told["cause"], told["class"], told["error"]) == ("node-fault", "node", "LibvirtLost"), told


# Every point of a machine's life, and what becomes of a job whose daemon is lost there. By far the most take long.
STARTING = ("after-claim", "after-attachments", "after-network", "after-overlay")
RUNNING = ("after-spawn", "after-qmp", "after-agent", "after-boot", "payload-sent", "payload-started")
ENDING = ("payload-ended", "status-written", "before-stop", "after-stop", "before-release", "outcome-written")
# What is lost while the payload runs: test_libvirt_session.py, too.
QUICK_ONES = {("after-overlay", KILL)}


def matrix(*points: str) -> list[Any]:
    return [
        pytest.param(point, number, marks=[] if (point, number) in QUICK_ONES else [pytest.mark.slow])
        for point in points
        for number in (KILL, STOP)
    ]


def test_the_matrix_has_every_point_of_a_machines_life() -> None:
    sources = (Path(belljar_package.__file__).parent / "machine").rglob("*.py")
    points = {name for path in sources for name in re.findall(r'\bpoint\("([a-z-]+)"\)', path.read_text())}
    elsewhere = ("template-", "fork-", "freeze-", "restore-")  # of what machines by libvirt do not have
    assert {*STARTING, *RUNNING, *ENDING} == {point for point in points if not point.startswith(elsewhere)}


@pytest.mark.parametrize(("point", "number"), matrix(*STARTING, *RUNNING))
def test_a_daemon_lost_before_the_payload_has_ended_is_a_node_fault(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, point: str, number: signal.Signals
) -> None:
    words = ["--scratch", "64M", "--network", "user"] if point in STARTING else []
    keeper = belljar.popen("-v", "run", "--report", str(tmp_path / "r"), *words, "--", "sleep", "100", env=QUICK)
    until(keeper, point)
    daemon.send(number)
    _, err = keeper.communicate(timeout=90)
    is_a_node_fault(keeper, err, tmp_path / "r")
    daemon.restart()
    nothing_is_left(belljar, daemon)
    next_job_works(belljar, daemon)


@pytest.mark.parametrize("number", [SLOW_KILL, SLOW_STOP])
def test_a_daemon_lost_while_it_starts_the_domain(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, number: signal.Signals
) -> None:
    """By a QEMU that does this to whoever starts it, once it is asked for a guest."""
    qemu = tmp_path / "qemu-impostor"
    armed = tmp_path / "armed"
    qemu.write_text(f"""#!/bin/sh
case "$*" in *guest=belljar-*) [ -e {armed} ] && rm {armed} && kill -{number.value} $(cat {daemon.folder}/pid);; esac
exec /usr/bin/qemu-system-x86_64 "$@"
""")
    qemu.chmod(0o755)
    env = {**QUICK, "BELLJAR_QEMU_BINARY": str(qemu)}
    daemon.virsh("domcapabilities", "--emulatorbin", str(qemu))  # asks it all there is to know, which takes its time
    armed.touch()
    done = belljar.run("--report", str(tmp_path / "r"), "--", "true", env=env)
    assert not armed.exists()
    is_a_node_fault(done, done.stderr, tmp_path / "r")
    daemon.restart()
    belljar("reap")
    nothing_is_left(belljar, daemon)
    next_job_works(belljar, daemon)


@pytest.mark.slow
def test_a_first_start_that_takes_too_long_names_what_it_waited_for(
    belljar: Belljar, daemon: Daemon, tmp_path: Path
) -> None:
    """The daemon asks a QEMU it does not know what it can do. It is well all the while, and stays."""
    qemu = tmp_path / "qemu-unknown"
    qemu.write_text("""#!/bin/sh
case "$*" in *qmp.monitor*) sleep 6;; esac
exec /usr/bin/qemu-system-x86_64 "$@"
""")
    qemu.chmod(0o755)
    pid, env = daemon.pid, {"BELLJAR_QEMU_BINARY": str(qemu)}
    brief = {**env, "BELLJAR_LIBVIRT_START_TIMEOUT": "2s"}
    done = belljar.run("--report", str(tmp_path / "r"), "--", "true", env=brief)
    told = outcome(tmp_path / "r")
    assert (done.returncode, told["class"], told["error"]) == (125, "node", "LibvirtLost"), told
    for words in ("what QEMU can do", "within 2 s", "`libvirt.start_timeout`"):
        assert words in told["reason"], told["reason"]
    assert "libvirt.start_timeout" in told["hint"]
    nothing_is_left(belljar, daemon)
    assert belljar.run("--", "true", env=env).returncode == 0 and daemon.pid == pid


@pytest.mark.parametrize(("point", "number"), matrix(*ENDING))
def test_a_daemon_lost_after_the_payload_has_ended_costs_the_job_nothing(
    belljar: Belljar, daemon: Daemon, tmp_path: Path, point: str, number: signal.Signals
) -> None:
    keeper = belljar.popen("-v", "run", "--report", str(tmp_path / "r"), "--", "sh", "-c", "exit 3", env=QUICK)
    until(keeper, point)
    daemon.send(number)
    keeper.communicate(timeout=90)
    assert keeper.returncode == 3 and outcome(tmp_path / "r")["class"] == "payload"
    assert belljar.leftovers() == []
    daemon.restart()
    next_job_works(belljar, daemon)


def test_a_start_that_hangs_can_be_cancelled(belljar: Belljar, daemon: Daemon, tmp_path: Path) -> None:
    daemon.send(STOP)
    try:
        keeper = belljar.popen("-v", "run", "--report", str(tmp_path / "r"), "--", "true")
        until(keeper, "after-overlay")
        begin = time.monotonic()
        keeper.terminate()
        keeper.communicate(timeout=60)
        assert keeper.returncode == -signal.SIGTERM and time.monotonic() - begin < 10  # the daemon has 15 s to answer
        assert outcome(tmp_path / "r")["cause"] == "cancelled"
    finally:
        daemon.send(signal.SIGCONT)
    nothing_is_left(belljar, daemon)


# -- the process that holds the connection ---------------------------------------------------------------------------------


def test_a_job_whose_connection_is_killed_is_a_node_fault(belljar: Belljar, daemon: Daemon, tmp_path: Path) -> None:
    words = ("run", "--report", str(tmp_path / "r"), "--", "sh", "-c", "echo up; sleep 1000")
    keeper = belljar.popen(*words)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    (id,) = belljar.machines()
    (holder,) = (pid for pid in all_pids() if f"libvirt:belljar-{id}".encode() in process_words(pid))
    os.kill(holder, KILL)
    _, err = keeper.communicate(timeout=60)
    is_a_node_fault(keeper, err, tmp_path / "r")
    nothing_is_left(belljar, daemon)


@pytest.mark.slow
def test_qemu_is_the_user_that_the_settings_name(daemon: Daemon) -> None:
    """In folders that this user can walk through; QEMU opens its disk by name."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o711)
    belljar = Belljar(folder, settings={**daemon.settings, "BELLJAR_QEMU_USER": "nobody"})
    try:
        belljar.scratch.mkdir(mode=0o711)
        keeper = belljar.popen("run", "--network", "user", "--", "sh", "-c", "echo up; read line; echo $line", stdin=-1)
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"up\n", keeper.stderr and keeper.stderr.read()
        (guest,) = belljar.domains()
        assert os.stat(f"/proc/{guest}").st_uid == pwd.getpwnam("nobody").pw_uid
        out, err = keeper.communicate(b"well\n", timeout=60)
        assert (keeper.returncode, out) == (0, b"well\n"), err
        nothing_is_left(belljar, daemon)
    finally:
        belljar.close()
        shutil.rmtree(folder)


# -- a supervisor that does not do its part -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("point", ["after-spawn", "payload-started", "before-stop"])
def test_the_machine_of_a_supervisor_that_was_killed_ends(belljar: Belljar, daemon: Daemon, point: str) -> None:
    died = belljar.run("--", "true", env={"BELLJAR_TESTING_ABORT_AT": point})
    assert died.returncode == -KILL
    assert belljar("reap").returncode == 0
    nothing_is_left(belljar, daemon)


def test_a_machine_that_lost_both_is_closed_out(belljar: Belljar, daemon: Daemon) -> None:
    """Nobody ends it by itself: its supervisor is dead, and the daemon that knew so too."""
    keeper = belljar.popen("run", "--", "sh", "-c", "echo up; sleep 1000")
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    (id,) = belljar.machines()
    # Other tests of this user run `reap` meanwhile. They leave it alone while a process seems to hold its connection.
    holder = subprocess.Popen(["tail", "-f", "/dev/null", "--", f"libvirt:belljar-{id}"], stderr=subprocess.DEVNULL)
    try:
        daemon.send(STOP)
        os.kill(keeper.pid, KILL)
        keeper.wait(10)
        daemon.send(KILL)
        assert [machine for _, machine in marked_processes() if machine == id] == [id]
        daemon.restart()
        assert daemon.names() == [f"belljar-{id}"]
    finally:
        holder.kill()
        holder.wait()
    assert belljar("reap").returncode == 0
    nothing_is_left(belljar, daemon)


STRANGER = """<domain type='qemu'><name>belljar-0123456789ab</name><memory unit='MiB'>64</memory>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""


def test_somebody_elses_domain_of_a_machines_name_is_left_alone(daemon: Daemon, tmp_path: Path) -> None:
    """Its name is a belljar machine's, its UUID is another: it is not ended."""
    (tmp_path / "stranger.xml").write_text(STRANGER)
    daemon.virsh("create", str(tmp_path / "stranger.xml"), "--paused")
    try:
        settings = LibvirtSettings(log_folder=str(daemon.folder / "log/qemu"))
        hypervisor = LibvirtHypervisor(daemon.driver, Settings(), settings, tmp_path)
        hypervisor.discard("0123456789ab")
        assert daemon.names() == ["belljar-0123456789ab"]
    finally:
        daemon.virsh("destroy", "belljar-0123456789ab")


@pytest.mark.slow
def test_a_reaper_with_other_folders_leaves_a_living_machine_alone(
    belljar: Belljar, daemon: Daemon, tmp_path: Path
) -> None:
    keeper = belljar.popen("run", "--", "sh", "-c", "echo up; read line; echo $line", stdin=subprocess.PIPE)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    other = Belljar(tmp_path / "other", settings=daemon.settings)
    assert other.run("--", "true").returncode == 0
    assert other("reap").returncode == 0
    out, _ = keeper.communicate(b"still here\n", timeout=60)
    assert (keeper.returncode, out) == (0, b"still here\n")


def until(keeper: subprocess.Popen[bytes], point: str) -> None:
    """It has passed this point of the machine's life."""
    assert keeper.stderr is not None
    for line in keeper.stderr:
        if line.split()[-1:] == [point.encode()]:
            return
    raise AssertionError(f"it ended before {point}")
