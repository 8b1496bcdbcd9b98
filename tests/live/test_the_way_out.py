"""Disks of the host that turn read-only or fill up under a machine: its payload's end is delivered all the same."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.test_faults import next_job_works, report

from belljar.journal import Ledger, read

# belljar itself; at one point of a machine's life the kernel is told of an error of a file system, as by a broken disk.
BREAKS_AT = """
import sys
from belljar import cli
from belljar.assembly import Runtime
point, trigger = sys.argv.pop(1), sys.argv.pop(1)
def reached(self, name):
    if name == point:
        with open(trigger, "w") as file:
            file.write("1")
Runtime._point = reached
cli.entry()
"""


@contextmanager
def ext4(folder: Path, size: int) -> Iterator[Path]:
    """An ext4 of small blocks on *folder* that turns read-only at its first error. Gives the file by which one is made."""
    disk = folder.with_suffix(".disk")
    with open(disk, "wb") as file:
        file.truncate(size)
    made = ["mke2fs", "-q", "-t", "ext4", "-b", "1024", "-m", "0", "-e", "remount-ro", str(disk)]
    subprocess.run(made, check=True, timeout=60)
    loop = subprocess.run(["losetup", "-f", "--show", disk], check=True, capture_output=True, timeout=30).stdout
    device = loop.decode().strip()
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "errors=remount-ro", device, str(folder)], check=True, timeout=30)
    try:
        yield Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)
        subprocess.run(["losetup", "-d", device], check=True, timeout=30)


def repaired(folder: Path) -> None:
    """What an administrator does: unmount, check, mount.

    A copy of the disk is mounted: the disk itself is busy while a mount namespace that another test made at the wrong
    moment lives, and stays read-only.
    """
    subprocess.run(["umount", str(folder)], check=True, timeout=30)
    copy = folder.with_suffix(".repaired")
    subprocess.run(["cp", "--sparse=always", folder.with_suffix(".disk"), copy], check=True, timeout=60)
    checked = subprocess.run(["e2fsck", "-y", "-f", copy], check=False, capture_output=True, timeout=60)
    assert checked.returncode in (0, 1), checked.stdout
    subprocess.run(["mount", "-o", "loop,errors=remount-ro", copy, str(folder)], check=True, timeout=30)


def run_until_broken(belljar: Belljar, point: str, trigger: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    argv = [sys.executable, "-I", "-c", BREAKS_AT, point, str(trigger), "run", *words]
    return subprocess.run(argv, env=belljar.env, capture_output=True, stdin=subprocess.DEVNULL, timeout=240)


def rows(belljar: Belljar) -> list[tuple[object, object, object]]:
    return [(row["cause"], row["class"], row["exit_code"]) for row, _ in Ledger(belljar.logs).since()]


@pytest.mark.parametrize("code", [0, 3])
def test_scratch_that_turned_read_only_after_the_payloads_end_changes_nothing_of_it(
    belljar: Belljar, tmp_path: Path, code: int
) -> None:
    with ext4(belljar.scratch, 512 << 20) as trigger:  # more than `image.reserve`
        belljar.scratch.chmod(0o711)
        done = run_until_broken(
            belljar,
            "status-written",
            trigger,
            "--report",
            str(tmp_path / "r"),
            "--",
            "sh",
            "-c",
            f"echo ran; exit {code}",
        )
        assert (done.returncode, done.stdout) == (code, b"ran\n"), done.stderr
        assert done.stderr.count(b"\n") == 2 and b".qcow2: Read-only file system" in done.stderr, done.stderr
        told = report(tmp_path / "r")
        assert (told["cause"], told["class"], told["exit_code"]) == ("finished", "payload", code) and told["troubles"]
        assert belljar.machines() == [] and belljar.domains() == []
        repaired(belljar.scratch)
        assert belljar("reap").returncode == 0
        assert [path.name for path in belljar.scratch.iterdir()] == ["lost+found"]
    assert rows(belljar) == [("finished", "payload", code)]


def test_a_node_whose_only_disk_turned_read_only_delivers_what_ended_well(belljar: Belljar, tmp_path: Path) -> None:
    node = tmp_path / "node"
    with ext4(node, 512 << 20) as trigger:
        node.chmod(0o755)
        for name in ("run", "scratch", "logs"):
            belljar.env[f"BELLJAR_PATHS_{name.upper()}"] = str(node / name)
        done = run_until_broken(
            belljar, "status-written", trigger, "--report", str(tmp_path / "r"), "--", "sh", "-c", "exit 3"
        )
        assert done.returncode == 3 and b"Read-only file system" in done.stderr, done.stderr
        assert report(tmp_path / "r")["exit_code"] == 3
        repaired(node)
        assert belljar("reap").returncode == 0
        (row,) = [row for row, _ in Ledger(node / "logs").since()]  # nothing of it could be written when it was known
        assert str(row["reason"]).endswith("the payload had ended with exit code 3")
        assert list((node / "run/machines").iterdir()) == [] and list((node / "scratch").iterdir()) == []


def fill(folder: Path) -> None:
    """Not a block is free when it returns."""
    descriptor = os.open(folder / "filler", os.O_WRONLY | os.O_CREAT, 0o600)
    for size in (1 << 20, *3 * [1 << 10]):  # what was promised to writes that failed is free again after a sync
        with suppress(OSError):
            while os.write(descriptor, bytes(size)):
                os.fsync(descriptor)
        os.sync()
    with pytest.raises(OSError) as full:
        os.write(descriptor, bytes(1 << 10))
    assert full.value.errno == errno.ENOSPC
    os.close(descriptor)


def test_a_full_disk_of_the_journal_hinders_neither_suspend_and_resume_nor_the_outputs(
    belljar: Belljar, tmp_path: Path
) -> None:
    cycles = 60  # each takes some 120 bytes; a block has 1024
    with ext4(belljar.run_folder, 16 << 20):
        belljar.run_folder.chmod(0o700)
        keeper = belljar.popen(
            "run", "--report", str(tmp_path / "r"), "--out", f"/tmp/result:{tmp_path}/result", "--",
            "sh", "-c", "echo up; read line; echo $line > /tmp/result; exit 3", stdin=subprocess.PIPE,
        )  # fmt: skip
        assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
        (id,) = belljar.machines()
        fill(belljar.run_folder)
        for _ in range(cycles):
            keeper.send_signal(signal.SIGTSTP)
            os.waitid(os.P_PID, keeper.pid, os.WSTOPPED)
            keeper.send_signal(signal.SIGCONT)
        events = [event["event"] for event in read(belljar.run_folder / "machines" / id)]
        assert events.count("paused") < cycles  # it was full indeed
        _, err = keeper.communicate(b"fetched\n", timeout=60)
        assert (keeper.returncode, err) == (3, b"")
        assert (tmp_path / "result").read_bytes() == b"fetched\n"
        assert "paused" in [event["event"] for event in read(belljar.logs / id)]
        assert report(tmp_path / "r")["exit_code"] == 3 and belljar.machines() == []
    assert rows(belljar) == [("finished", "payload", 3)]


def test_a_report_that_cannot_be_written_changes_nothing_of_the_payloads_end(belljar: Belljar) -> None:
    for script, code in (("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV)):
        done = belljar.run("--report", "/dev/full", "--", "sh", "-c", script)
        assert done.returncode == code and b"belljar: --report /dev/full: No space left on device\n" in done.stderr
    next_job_works(belljar)


def test_a_file_of_the_kernel_gets_into_the_machine_whole(belljar: Belljar) -> None:
    done = belljar.run("--in", "/proc/version:/tmp/version", "--", "cat", "/tmp/version")
    assert (done.returncode, done.stdout) == (0, Path("/proc/version").read_bytes())


# A payload that is root takes the agent's line, stops the agent when it has passed on our word, and answers the next call.
IMPOSTOR = r"""
import ctypes, os, signal, struct, time
def agents_line():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                if "vport" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                    line = ctypes.CDLL(None).syscall(438, os.pidfd_open(int(pid)), int(fd), 0)  # pidfd_getfd
                    return int(pid), line
            except OSError:
                pass
pid, line = agents_line()
print("up" if line >= 0 else "no line", flush=True)
time.sleep(0.5)
os.kill(pid, signal.SIGSTOP)
os.set_blocking(line, True)
while True:
    os.read(line, 65536)
    os.write(line, b"".join(struct.pack("!BBII", 3, 0, number, 5) + b"1\0002\0003" for number in range(1, 100)))
"""


@pytest.mark.slow
def test_an_agent_replaced_by_the_payload_is_the_guests_fault_when_the_job_is_resumed(
    belljar: Belljar, tmp_path: Path
) -> None:
    keeper = belljar.popen("run", "--report", str(tmp_path / "r"), "--", "python3", "-c", IMPOSTOR)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    keeper.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, keeper.pid, os.WSTOPPED)
    keeper.send_signal(signal.SIGCONT)
    _, err = keeper.communicate(timeout=60)
    told = report(tmp_path / "r")
    assert keeper.returncode == 125 and b"not the agent's protocol" in err and b"defect" not in err, err
    assert (told["error"], told["cause"], told["class"]) == ("ProtocolViolation", "guest-lost", "transient")
    next_job_works(belljar)
