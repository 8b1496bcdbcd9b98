"""Folders shared by virtiofs: whose files they become, that read-only is, and that nothing of their servers outlives a machine."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar, command_line
from tests.live.test_faults import report
from tests.rust_virtiofsd import rust_virtiofsd

SOMEBODY = 54321
MARK = "BELLJAR_SERVES="


@pytest.fixture(autouse=True)
def in_rust(belljar: Belljar) -> None:
    belljar.env["BELLJAR_QEMU_VIRTIOFSD"] = rust_virtiofsd()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this host can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def servers(belljar: Belljar) -> list[int]:
    """Processes that serve folders of our machines: virtiofsd, which has the mark in its environment, and what waits for it."""
    known = {name[:12] for name in os.listdir(belljar.logs)} if belljar.logs.exists() else set()
    ids = {f"{MARK}{id}" for id in known | set(belljar.machines())}
    pids = []
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        with suppress(OSError):
            words = command_line(pid) + Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
            if any(word.partition(":")[0] in ids for word in words.split("\0")):
                pids.append(pid)
    return sorted(pids)


def left(belljar: Belljar) -> list[str]:
    """What may not be left: processes, files of a machine, mounts, sockets."""
    sockets = [
        str(path) for path in (*belljar.logs.rglob("virtiofs*.sock"), *belljar.run_folder.rglob("virtiofs*.sock"))
    ]
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        mounts = [line for line in file if "virtiofs" in line or str(belljar.folder) in line]
    return belljar.leftovers() + [f"server {pid}" for pid in servers(belljar)] + sockets + mounts


def gone(belljar: Belljar) -> list[str]:
    """`left`, once the kernel is done with what was killed."""
    deadline = time.monotonic() + 20
    while (found := left(belljar)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def next_job_works(belljar: Belljar, shared: Path) -> None:
    (shared / "word").write_text("next")
    done = belljar.run("--share", f"virtiofs:{shared}:/data", "--", "cat", "/data/word")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"next", b"")
    assert left(belljar) == []


# -- what the job sees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["clone", pytest.param("cold", marks=pytest.mark.slow)])
def test_files_made_in_a_writable_folder_are_the_callers(belljar: Belljar, open_folder: Path, start: str) -> None:
    for user in (0, SOMEBODY):
        shared = open_folder / f"of {user}"
        shared.mkdir()
        (shared / "word").write_text("content")
        os.chown(shared, user, user)
        script = (
            "umask 027; cd /data && cat word && echo made > file && mkdir folder && ln -s file link && ln file hard &&"
            " mv file moved && touch -d @1000000000 moved && chmod 751 folder && stat -c '%u %a' moved folder && rm hard"
            " && echo more >> moved && grep -c 'share0 /data virtiofs rw,nosuid,nodev' /proc/mounts"
        )
        who = ("--user", f"{user}:{user}") if user else ()
        made = ("--start", "cold") if start == "cold" else ()
        words = ("--report", str(open_folder / "r"), *made, *who, "--share", f"virtiofs:{shared}:/data:rw")
        done = belljar.run(*words, "--", "sh", "-c", script)
        assert (done.returncode, done.stdout.decode()) == (0, f"content{user} 640\n{user} 751\n1\n"), done.stderr
        assert sorted(path.name for path in shared.iterdir()) == ["folder", "link", "moved", "word"]
        for path in (shared / "folder", shared / "link", shared / "moved", shared):
            assert (path.lstat().st_uid, path.lstat().st_gid) == (user, user), path
        assert (shared / "moved").read_text() == "made\nmore\n" and os.readlink(shared / "link") == "file"
        assert report(open_folder / "r")["start"] == start
    assert left(belljar) == []


@pytest.mark.parametrize("start", ["clone", pytest.param("cold", marks=pytest.mark.slow)])
def test_a_folder_is_read_only_whatever_the_guest_does(belljar: Belljar, tmp_path: Path, start: str) -> None:
    shared = tmp_path / "a place\nwith ü"
    shared.mkdir()
    (shared / "name\nwith ü").write_text("content")
    script = (
        'cat "$1/name\nwith ü"; mount -o remount,rw "$1" && grep -c virtiofs.rw /proc/mounts;'
        ' ! echo x 2>/dev/null >"$1/new" && ! rm "$1"/name* && ! chmod 0 "$1" && ! touch "$1"/name* && ! mkdir "$1/x"; echo $?'
    )
    made = ("--start", "cold") if start == "cold" else ()
    done = belljar.run(*made, "--share", f"virtiofs:{shared}", "--", "sh", "-c", script, "sh", str(shared))
    assert done.stdout == b"content1\n0\n", done.stderr  # it may be mounted to be written to, and yet cannot be
    assert b"Read-only file system" in done.stderr
    assert [(path.name, path.read_text()) for path in shared.iterdir()] == [("name\nwith ü", "content")]


def test_both_sides_see_what_the_other_writes(belljar: Belljar, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "before").write_text("first")
    seen = 'for i in $(seq 100); do [ "$(cat before)" = "other words" ] && [ -e later ] && break; sleep 0.1; done'
    script = f"echo inside > reply; cat before; echo; read line; {seen}; cat before; cat later; ls | wc -l"
    share = ("--share", f"virtiofs:{shared}:rw", "--cwd", str(shared))
    job = belljar.popen("run", *share, "--", "sh", "-c", script, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert job.stdout is not None
    assert job.stdout.readline() == b"first\n" and (shared / "reply").read_text() == "inside\n"
    (shared / "before").write_text("other words")
    (shared / "later").write_text("!")
    assert job.communicate(b"\n", timeout=LONGEST)[0] == b"other words!3\n"


def test_what_is_written_through_memory_is_there_when_the_job_has_ended(belljar: Belljar, tmp_path: Path) -> None:
    script = (
        "import mmap, os; fd = os.open('/data/file', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 1 << 20);"
        "memory = mmap.mmap(fd, 1 << 20); memory[:] = b'x' * (1 << 20); os.kill(os.getpid(), 9)"
    )
    done = belljar.run("--share", f"virtiofs:{tmp_path}:/data:rw", "--", "python3", "-c", script)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / "file").read_bytes() == b"x" * (1 << 20)


def test_a_guest_cannot_leave_its_folder(belljar: Belljar, tmp_path: Path) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    shared.mkdir()
    secret.write_text("secret")
    (shared / "up").symlink_to("../secret")
    (shared / "abroad").symlink_to(secret)
    script = "cat /data/up /data/abroad /data/../secret; ln -s ../../secret /data/made; cat /data/made; ls /data/../.."
    done = belljar.run("--share", f"virtiofs:{shared}:/data:rw", "--", "sh", "-c", script)
    assert b"secret" not in done.stdout and b"etc" in done.stdout
    assert os.readlink(shared / "made") == "../../secret" and secret.read_text() == "secret"


def test_a_guest_makes_no_device_and_nobody_elses_file(belljar: Belljar, open_folder: Path) -> None:
    """Even as the root of its own."""
    os.chown(open_folder, SOMEBODY, SOMEBODY)
    (open_folder / "mine").write_text("mine")
    os.chown(open_folder / "mine", SOMEBODY, SOMEBODY)
    script = (
        "su='setpriv --reuid=0 --clear-groups'; python3 -c 'import os; os.mknod(\"/data/null\", 0o020666, os.makedev(1, 3))';"
        " chown 0:0 /data/mine; chmod 4755 /data/mine; echo over"
    )
    done = belljar.run(
        "--user", f"{SOMEBODY}:{SOMEBODY}", "--share", f"virtiofs:{open_folder}:/data:rw", "--", "sh", "-c", script
    )
    assert done.stdout == b"over\n"
    assert [path.name for path in open_folder.iterdir()] == ["mine"]
    facts = (open_folder / "mine").stat()
    assert facts.st_uid == SOMEBODY


def test_several_folders_beside_9p_a_network_and_a_scratch_disk(belljar: Belljar, tmp_path: Path) -> None:
    for name in ("outer", "inner", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name + "\n")
    (tmp_path / "outer/in").mkdir()
    words = [
        *("--share", f"virtiofs:{tmp_path}/inner:/data/in:rw", "--share", f"virtiofs:{tmp_path}/outer:/data"),
        *("--share", f"{tmp_path}/other:/srv/some where", "--network", "user", "--scratch", "64M"),
    ]
    script = "cat /data/name /data/in/name '/srv/some where/name'; echo x > /data/in/made; df /scratch | wc -l"
    for _ in range(2):
        done = belljar.run(*words, "--", "sh", "-c", script)
        assert done.stdout == b"outer\ninner\nother\n2\n", done.stderr
    assert (tmp_path / "inner/made").exists() and left(belljar) == []


def test_a_folder_that_the_payloads_user_cannot_reach_is_refused(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    who = ("--user", f"{SOMEBODY}:{SOMEBODY}", "--share", f"virtiofs:{tmp_path}/shared:/data")
    done = belljar.run("--report", str(tmp_path / "r"), *who, "--", "true")
    assert done.returncode == 125 and b"virtiofs:" in done.stderr and b"denied" in done.stderr
    assert report(tmp_path / "r")["error"] == "NotPermitted" and left(belljar) == []


def test_a_host_without_virtiofsd_refuses_and_names_the_package(belljar: Belljar, tmp_path: Path) -> None:
    env = {"BELLJAR_QEMU_VIRTIOFSD": "/nowhere/virtiofsd"}
    done = belljar.run("--share", f"virtiofs:{tmp_path}:/data", "--", "true", env=env)
    assert done.returncode == 125 and b"/nowhere/virtiofsd: no such program" in done.stderr
    assert left(belljar) == []


# -- what is killed ----------------------------------------------------------------------------------------------------


def started(belljar: Belljar, shared: Path, *words: str) -> subprocess.Popen[bytes]:
    """A machine whose payload writes into its folder for ever."""
    script = "echo up; while echo x >> /data/file; do :; done; echo over"
    keeper = belljar.popen("run", *words, "--share", f"virtiofs:{shared}:/data:rw", "--", "sh", "-c", script)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    return keeper


@pytest.mark.parametrize(
    "which",
    [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2],
    ids=["outside", "waiting", "serving"],
)
def test_a_server_that_is_killed_ends_the_job_with_a_sentence(belljar: Belljar, tmp_path: Path, which: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    keeper = started(belljar, shared, "--report", str(tmp_path / "r"))
    pids = servers(belljar)
    assert len(pids) == 3
    os.kill(pids[which], signal.SIGKILL)
    _, err = keeper.communicate(timeout=LONGEST)
    assert keeper.returncode == 125 and b"virtiofsd ended: " in err and b"killed" in err, err
    outcome = report(tmp_path / "r")
    assert (outcome["cause"], outcome["class"], outcome["error"]) == ("guest-lost", "transient", "ShareLost")
    assert gone(belljar) == []
    next_job_works(belljar, shared)


POINTS = ["after-overlay", "after-spawn", "after-boot", "payload-started", "before-stop", "after-stop"]


QUICK_ONES = {("after-spawn", "auto"), ("payload-started", "auto"), ("after-stop", "auto")}
MATRIX = [
    pytest.param(point, start, marks=[] if (point, start) in QUICK_ONES else [pytest.mark.slow])
    for point in POINTS
    for start in ("auto", "cold")
]


@pytest.mark.parametrize(("point", "start"), MATRIX)
def test_belljar_killed_at_any_point_leaves_nothing_after_one_reap(
    belljar: Belljar, tmp_path: Path, point: str, start: str
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    words = ("--start", start, "--share", f"virtiofs:{shared}:/data:rw")
    died = belljar.run(*words, "--", "true", env={"BELLJAR_TESTING_ABORT_AT": point})
    assert died.returncode == -signal.SIGKILL
    reaped = belljar("reap")
    assert reaped.returncode == 0, reaped.stderr
    assert left(belljar) == []
    next_job_works(belljar, shared)


def test_belljar_killed_while_the_job_writes_leaves_nothing(belljar: Belljar, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    keeper = started(belljar, shared)
    keeper.kill()
    keeper.communicate(timeout=LONGEST)
    assert belljar("reap").returncode == 0
    assert left(belljar) == []
    next_job_works(belljar, shared)


def test_a_job_that_is_cancelled_leaves_nothing(belljar: Belljar, tmp_path: Path) -> None:
    keeper = started(belljar, tmp_path)
    keeper.send_signal(signal.SIGTERM)
    keeper.communicate(timeout=LONGEST)
    assert left(belljar) == []


def test_a_job_that_stands_still_goes_on(belljar: Belljar, tmp_path: Path) -> None:
    script = "echo up; for i in 1 2 3; do read line; echo $line >> /data/file; done; cat /data/file"
    share = ("--share", f"virtiofs:{tmp_path}:/data:rw")
    keeper = belljar.popen("run", *share, "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"up\n"
    keeper.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, keeper.pid, os.WSTOPPED)
    keeper.send_signal(signal.SIGCONT)
    out, err = keeper.communicate(b"a\nb\nc\n", timeout=LONGEST)
    assert (out, keeper.returncode) == (b"a\nb\nc\n", 0), err
