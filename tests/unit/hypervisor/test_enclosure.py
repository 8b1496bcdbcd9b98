"""What virtiofsd runs in, tried with a program that looks around in its place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from belljar.hypervisor.qemu.virtiofs.virtiofsd import ENCLOSURE

LONGEST = 60
LOOK = """
import json, os, sys
def tried(what):
    try:
        what()
        return "done"
    except OSError as exc:
        return os.strerror(exc.errno)
place = "/mnt"
print(json.dumps({
    "argv0": open("/proc/self/cmdline").read().split("\\0")[0],
    "uid": os.getuid(), "gid": os.getgid(), "pid": os.getpid(),
    "files": sorted(os.listdir(place)),
    "make": tried(lambda: open(place + "/made", "x")),
    "make below": tried(lambda: open(place + "/below/made", "x")),
    "remove": tried(lambda: os.unlink(place + "/kept")),
    "device": tried(lambda: os.mknod(place + "/null", 0o020666, os.makedev(1, 3))),
    "setgroups": tried(lambda: os.setgroups([])),
    "cards": sorted(os.listdir("/proc/self/net/dev_snmp6")) if os.path.isdir("/proc/self/net/dev_snmp6") else ["lo"],
    "files to open": __import__("resource").getrlimit(__import__("resource").RLIMIT_NOFILE),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")][0],
}))
"""


def begin(
    folder: Path, how: str, *program: str, wanted: str = "all", uid: int = -1
) -> tuple[subprocess.Popen[str], int]:
    """The enclosure, and the pipe by which it tells that the program runs."""
    hear, tell = os.pipe()
    uid = os.geteuid() if uid < 0 else uid
    words = ["virtiofsd:belljar-0123456789ab:share0", str(os.getpid()), str(uid), str(uid or os.getegid()), how, wanted]
    argv = [sys.executable, "-IS", str(ENCLOSURE), *words, str(folder), "/mnt", str(tell), *program]
    try:
        process = subprocess.Popen(
            argv, pass_fds=[tell], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(tell)
    return process, hear


def told(hear: int) -> str:
    with os.fdopen(hear, "rb") as file:
        return file.read().decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    (made / "below").mkdir(parents=True)
    (made / "kept").write_text("as it was")
    return made


def look(folder: Path, how: str, *, wanted: str = "all", uid: int = -1) -> dict[str, object]:
    process, hear = begin(folder, how, "/usr/bin/python3", "-IS", "-c", LOOK, wanted=wanted, uid=uid)
    said, complaint = process.communicate(timeout=LONGEST)
    assert (told(hear), process.returncode) == ("", 0), complaint
    return dict(json.loads(said))


def test_a_folder_that_may_be_written_to(folder: Path) -> None:
    seen = look(folder, "rw")
    assert (seen["argv0"], seen["uid"], seen["pid"]) == ("virtiofsd:belljar-0123456789ab:share0", os.geteuid(), 1)
    assert seen["files"] == ["below", "kept"]
    assert (seen["make"], seen["make below"], seen["remove"]) == ("done", "done", "done")
    assert sorted(path.name for path in folder.iterdir()) == ["below", "made"]
    assert (folder / "made").stat().st_uid == os.geteuid()


def test_a_folder_that_may_only_be_read_cannot_be_written_to_by_whoever_is_inside(folder: Path) -> None:
    seen = look(folder, "ro")
    refused = "Read-only file system"
    assert (seen["make"], seen["make below"], seen["remove"], seen["device"]) == (refused,) * 4
    assert (folder / "kept").read_text() == "as it was"
    assert sorted(path.name for path in folder.iterdir()) == ["below", "kept"]


def test_inside_there_are_no_rights_over_the_host(folder: Path) -> None:
    seen = look(folder, "rw")
    assert seen["device"] == "Operation not permitted"
    assert seen["cards"] == ["lo"]
    assert seen["setgroups"] == "done"  # it is told so


def test_a_program_gets_the_capabilities_it_is_to_have_and_no_others() -> None:
    uid = os.geteuid() or 54321  # the root of a namespace has what the namespace has
    every, few = (look(Path("/usr"), "ro", wanted=wanted, uid=uid) for wanted in ("all", "0x3"))
    assert int(str(every["capabilities"]), 16) > 1 << 30
    assert int(str(few["capabilities"]), 16) == 3


def test_as_many_files_may_be_open_as_the_limit_allows(folder: Path) -> None:
    limits = look(folder, "ro")["files to open"]
    assert isinstance(limits, list) and limits[0] == limits[1]


@pytest.mark.parametrize("name", ["gone", "kept"])
def test_what_is_no_folder_is_told_of_before_the_program_starts(folder: Path, name: str) -> None:
    process, hear = begin(folder / name, "ro", "/bin/true")
    process.communicate(timeout=LONGEST)
    assert told(hear).startswith(f"F {folder / name}: No") and process.returncode != 0


def test_a_folder_that_its_user_cannot_enter_is_told_of(tmp_path: Path) -> None:
    closed, uid = tmp_path / "folder", 54321
    closed.mkdir(mode=0o700)
    if os.geteuid() != 0:  # only root can be somebody else
        closed, uid = Path("/root"), os.geteuid()
    process, hear = begin(closed, "ro", "/bin/true", uid=uid)
    process.communicate(timeout=LONGEST)
    assert told(hear) == f"F {closed}: Permission denied"


def test_a_program_that_is_not_there_is_told_of(folder: Path) -> None:
    process, hear = begin(folder, "ro", "/nowhere/virtiofsd")
    process.communicate(timeout=LONGEST)
    assert told(hear) == "P /nowhere/virtiofsd: No such file or directory"


def test_it_ends_as_its_program_does(folder: Path) -> None:
    for script, code in (("exit 3", 3), ("kill -9 $$", 128 + 9)):
        inner = f'sh -c "{script.replace("$$", chr(92) + "$$")}"; exit $?'  # the first of a namespace takes no signal of its own
        process, hear = begin(folder, "rw", "/bin/sh", "-c", inner)
        process.communicate(timeout=LONGEST)
        assert (told(hear), process.returncode) == ("", code)


def test_whoever_kills_it_kills_all_that_runs_inside(folder: Path) -> None:
    process, hear = begin(folder, "rw", "/bin/sh", "-c", "sleep 987654 & echo up; wait")
    assert process.stdout is not None and process.stdout.readline() == "up\n" and told(hear) == ""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=LONGEST)  # its output is closed when the last of them is gone
    assert not sleeping()


def test_it_does_not_outlive_who_started_it(folder: Path) -> None:
    """A parent in between, which is killed."""
    script = (
        "import os, subprocess, sys\n"
        "r, w = os.pipe()\n"
        f"argv = [sys.executable, '-IS', {str(ENCLOSURE)!r}, 'virtiofsd:belljar-0123456789ab:share0', str(os.getpid()),"
        f" str(os.geteuid()), str(os.getegid()), 'rw', 'all', {str(folder)!r}, '/mnt', str(w),"
        " '/bin/sh', '-c', 'sleep 987654 & echo up; wait']\n"
        "subprocess.Popen(argv, pass_fds=[w]); os.close(w); os.read(r, 100); os.close(r)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
        parent.kill()
        parent.wait(LONGEST)
        assert parent.stdout.read() == b""  # closed when the last of them is gone
    assert not sleeping()


def sleeping() -> list[str]:
    """Processes of these tests that are still there; a killed one takes a moment to be gone from the list."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    words = Path(f"/proc/{entry}/cmdline").read_bytes()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if words == b"sleep\x00987654\x00":
                    found.append(entry)
        if not found or time.monotonic() > deadline:
            return found
