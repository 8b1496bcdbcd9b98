"""Folders shared with a guest, and files copied in and out: nothing lost, nothing changed, nothing outside touched."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar
from tests.live.test_faults import report

from belljar.host.watch import IN_CREATE, Watch

MIB, GIB = 1 << 20, 1 << 30
SOMEBODY = 54321


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this host can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


# -- shares ----------------------------------------------------------------------------------------------------------


def test_a_share_is_read_only_unless_said_otherwise(belljar: Belljar, tmp_path: Path) -> None:
    shared = tmp_path / "a place\nwith ü"
    shared.mkdir()
    (shared / "name\nwith ü").write_text("content")
    script = 'cat "$1/name\nwith ü" && ! echo x 2>/dev/null >"$1/new" && ! rm "$1"/name* && ! chmod 0 "$1"; echo $?'
    done = belljar.run(
        "--report", str(tmp_path / "r"), "--share", str(shared), "--", "sh", "-c", script, "sh", str(shared)
    )
    assert done.stdout == b"content0\n", done.stderr
    assert b"Read-only file system" in done.stderr
    assert [path.name for path in shared.iterdir()] == ["name\nwith ü"]
    assert report(tmp_path / "r")["start"] == "clone"


def test_files_made_in_a_writable_share_are_the_callers(belljar: Belljar, open_folder: Path) -> None:
    for user in (0, SOMEBODY):
        shared = open_folder / f"of {user}"
        shared.mkdir()
        os.chown(shared, user, user)
        script = (
            "umask 027; cd /data && echo made > file && mkdir folder && ln -s file link && ln file hard && mv file moved && "
            "touch -d @1000000000 moved && chmod 751 folder && stat -c '%u %a' moved folder && rm hard && echo more >> moved"
        )
        words = ("--user", f"{user}:{user}") if user else ()
        done = belljar.run(*words, "--share", f"{shared}:/data:rw", "--", "sh", "-c", script)
        assert (done.returncode, done.stdout.decode()) == (0, f"{user} 640\n{user} 751\n"), done.stderr
        assert sorted(path.name for path in shared.iterdir()) == ["folder", "link", "moved"]
        for path in (*shared.iterdir(), shared):
            assert (path.lstat().st_uid, path.lstat().st_gid) == (user, user), path
        assert (shared / "moved").read_text() == "made\nmore\n" and os.readlink(shared / "link") == "file"


def test_both_sides_see_at_once_what_the_other_writes(belljar: Belljar, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "before").write_text("first")
    script = "echo inside > reply; cat before; echo; read line; cat before; cat later; ls | wc -l"
    job = belljar.popen(
        "run",
        "--share",
        f"{shared}:rw",
        "--cwd",
        str(shared),
        "--",
        "sh",
        "-c",
        script,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert job.stdout is not None and job.stdin is not None
    assert job.stdout.readline() == b"first\n" and (shared / "reply").read_text() == "inside\n"
    (shared / "before").write_text("other words")
    (shared / "later").write_text("!")
    assert job.communicate(b"\n", timeout=LONGEST)[0] == b"other words!3\n"


def test_a_share_that_the_payloads_user_cannot_reach_is_refused(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    words = ("--report", str(tmp_path / "r"), "--user", f"{SOMEBODY}:{SOMEBODY}", "--share", f"{tmp_path}/shared:/data")
    done = belljar.run(*words, "--", "true")
    assert done.returncode == 125 and b"shared" in done.stderr and b"denied" in done.stderr
    assert report(tmp_path / "r")["error"] == "NotPermitted"


def test_shares_may_lie_in_each_other_in_any_order(belljar: Belljar, tmp_path: Path) -> None:
    for name in ("outer", "inner", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name + "\n")
    (tmp_path / "outer/in").mkdir()
    words = (
        "--share",
        f"{tmp_path}/inner:/data/in:rw",
        "--share",
        f"{tmp_path}/outer:/data",
        "--share",
        f"{tmp_path}/other:/srv/some where",
    )
    script = "cat /data/name /data/in/name '/srv/some where/name'; echo x > /data/in/made; echo x > /data/made"
    done = belljar.run(*words, "--", "sh", "-c", script)
    assert done.stdout == b"outer\ninner\nother\n", done.stderr
    assert (tmp_path / "inner/made").exists() and not (tmp_path / "outer/made").exists()


def test_a_job_can_work_in_a_shared_folder_by_its_own_name(belljar: Belljar, tmp_path: Path) -> None:
    done = belljar.run("--share", ".:rw", "--", "sh", "-c", "pwd; echo done > result", cwd=tmp_path)
    assert (done.returncode, done.stdout.decode()) == (0, f"{tmp_path}\n"), done.stderr
    assert (tmp_path / "result").read_text() == "done\n"


def test_a_guest_cannot_leave_its_share(belljar: Belljar, tmp_path: Path) -> None:
    shared, secret = tmp_path / "shared", tmp_path / "secret"
    shared.mkdir()
    secret.write_text("secret")
    (shared / "up").symlink_to("../secret")
    (shared / "abroad").symlink_to(secret)
    script = "cat /data/up /data/abroad /data/../secret; ln -s ../../secret /data/made; cat /data/made; ls /data/../.."
    done = belljar.run("--share", f"{shared}:/data:rw", "--", "sh", "-c", script)
    assert b"secret" not in done.stdout and b"etc" in done.stdout
    assert os.readlink(shared / "made") == "../../secret" and secret.read_text() == "secret"


# -- files in and out ------------------------------------------------------------------------------------------------


def make_tree(top: Path) -> None:
    """A folder with all that a folder of a person can have."""
    (top / "empty").mkdir(parents=True)
    (top / "deep/er/est").mkdir(parents=True)
    (top / "deep/er/est/file").write_bytes(os.urandom(700_001))
    (top / "nothing").touch()
    (top / "name\nwith 'quotes' and ü").write_text("odd")
    (top / os.fsdecode(b"byte\x80\xff")).write_text("bytes")
    (top / ("long" * 60)).write_text("long")
    (top / "to file").symlink_to("deep/er/est/file")
    (top / "to nowhere").symlink_to(os.fsdecode(b"/no/where\x80"))
    os.link(top / "deep/er/est/file", top / "hard")
    with open(top / "holes", "wb") as file:
        file.write(b"begin")
        file.seek(GIB // 2)
        file.write(b"middle")
        file.truncate(GIB + 1)
    for number, mode in enumerate((0o400, 0o755, 0o604, 0o777, 0o000)):
        (top / f"mode{number}").write_text("x")
        (top / f"mode{number}").chmod(mode)
        os.utime(top / f"mode{number}", ns=(0, 10**18 + number))
    os.utime(top / "deep/er", ns=(10**17, 10**17 + 7))
    (top / "deep/er").chmod(0o711)


def described(top: Path) -> dict[str, tuple[object, ...]]:
    """What can be seen of a tree."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, _, files in os.walk(top):
        for path in (Path(folder), *(Path(folder) / name for name in files)):
            facts = path.lstat()
            is_link = stat.S_ISLNK(facts.st_mode)
            content = (
                os.readlink(path)
                if is_link
                else path.read_bytes()
                if 0 < facts.st_size < MIB and path.is_file()
                else b""
            )
            when = 0 if is_link or path == top else facts.st_mtime_ns
            size = facts.st_size if stat.S_ISREG(facts.st_mode) else 0
            links = facts.st_nlink if stat.S_ISREG(facts.st_mode) else 0
            found[str(path.relative_to(top))] = (oct(facts.st_mode), size, when, links, content)
        found.update({str((Path(folder) / name).relative_to(top)): () for name in ()})
    return found


def test_a_tree_goes_in_and_comes_out_as_it_was(belljar: Belljar, tmp_path: Path) -> None:
    make_tree(tmp_path / "tree")
    begin = time.monotonic()
    inner = f"{tmp_path}/tree:/var/tmp/here/tree"
    done = belljar.run(
        "--in", inner, "--out", f"/var/tmp/here/tree:{tmp_path}/back", "--", "du", "-sk", "/var/tmp/here/tree"
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) < 4000  # KiB: the holes stayed holes in the guest
    assert time.monotonic() - begin < 30
    assert described(tmp_path / "back") == described(tmp_path / "tree")
    assert (tmp_path / "back/holes").stat().st_blocks * 512 < MIB
    assert (tmp_path / "back/hard").samefile(tmp_path / "back/deep/er/est/file")


def test_files_go_to_where_the_payload_is_and_are_its_users(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/file").write_text("2")
    script = "pwd; cat one two/file deep/er/three; stat -c %U one two/file deep/er; echo out > made"
    done = belljar.run(
        *("--user", f"{SOMEBODY}:{SOMEBODY}", "--cwd", "/var/tmp/work", "--in", "one", "--in", "two", "--in", "one:deep/er/three"),
        *("--out", "made", "--out", f"two:{tmp_path}/copy", "--", "sh", "-c", script),
        cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.decode() == "/var/tmp/work\n121" + f"user{SOMEBODY}\n" * 3, done.stderr
    assert (tmp_path / "made").read_text() == "out\n" and (tmp_path / "copy/file").read_text() == "2"


def test_files_come_out_after_a_failure_too(belljar: Belljar, tmp_path: Path) -> None:
    for end, code in (("exit 3", 3), ("kill -9 $$", -9)):
        done = belljar.run("--out", f"/tmp/log:{tmp_path}/log", "--", "sh", "-c", f"echo '{end}' > /tmp/log; {end}")
        assert done.returncode == code, done.stderr
        assert (tmp_path / "log").read_text() == end + "\n"


def test_files_come_out_at_the_time_limit_too(belljar: Belljar, tmp_path: Path) -> None:
    words = ("--timeout", "1.5s", "--out", f"/tmp/log:{tmp_path}/log")
    done = belljar.run(*words, "--", "sh", "-c", "echo so far > /tmp/log; exec sleep 1000")
    assert done.returncode == -15 and (tmp_path / "log").read_text() == "so far\n"


def test_an_output_that_is_missing_is_our_failure_and_the_others_are_copied(belljar: Belljar, tmp_path: Path) -> None:
    words = ("--report", str(tmp_path / "r"), "--out", f"/tmp/no:{tmp_path}/no", "--out", f"/tmp/yes:{tmp_path}/yes")
    done = belljar.run(*words, "--", "sh", "-c", "echo > /tmp/yes")
    assert done.returncode == 125 and (tmp_path / "yes").exists() and not (tmp_path / "no").exists()
    assert b"/tmp/no" in done.stderr and b"\nhint: Check what the job writes" in done.stderr
    told = report(tmp_path / "r")
    assert (told["error"], told["cause"], told["class"], told["exit_code"]) == ("OutputMissing", "refused", "user", 0)
    failed = belljar.run(*words, "--", "sh", "-c", "exit 4")
    assert (failed.returncode, failed.stderr) == (4, b"")  # its own code says more


def test_outputs_onto_what_is_there(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/sub/kept").write_text("kept")
    (tmp_path / "folder/sub/new").write_text("old")
    (tmp_path / "into").mkdir()
    make = "mkdir -p /tmp/sub && echo new > /tmp/sub/new && echo new > /tmp/file"
    words = ("--out", "/tmp/file", "--out", "/tmp/sub:folder/sub", "--out", "/tmp/file:into")
    done = belljar.run(*words, "--", "sh", "-c", make, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file() and "logs" not in path.parts
    }
    assert (
        found.items()
        >= {"file": "new\n", "folder/sub/kept": "kept", "folder/sub/new": "new\n", "into/file": "new\n"}.items()
    )
    clash = belljar.run("--out", "/tmp/sub:file", "--", "sh", "-c", make, cwd=tmp_path)
    assert clash.returncode == 125 and b"file" in clash.stderr and (tmp_path / "file").read_text() == "new\n"


def test_a_hostile_guest_writes_nothing_outside_of_the_output(belljar: Belljar, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/trap").symlink_to(outside)  # left by an earlier job
    make = f"mkdir -p /tmp/out/trap && echo hit > /tmp/out/trap/file && ln -s {outside} /tmp/out/link && echo x > /tmp/out/set && chmod 6777 /tmp/out/set"
    done = belljar.run("--out", f"/tmp/out:{tmp_path}/out", "--", "sh", "-c", make)
    assert list(outside.iterdir()) == []
    assert done.returncode in (0, 125)
    shutil_free = belljar.run("--out", f"/tmp/out:{tmp_path}/clean", "--", "sh", "-c", make)
    assert shutil_free.returncode == 0, shutil_free.stderr
    assert os.readlink(tmp_path / "clean/link") == str(outside) and list(outside.iterdir()) == []
    assert (tmp_path / "clean/set").stat().st_mode & 0o7000 == 0  # no set-uid bit from a guest
    special = belljar.run(
        "--out",
        f"/tmp/out:{tmp_path}/special",
        "--",
        "sh",
        "-c",
        "mkdir /tmp/out; mkfifo /tmp/out/pipe; mknod /tmp/out/null c 1 3; echo > /tmp/out/file",
    )
    assert special.returncode == 0 and [path.name for path in (tmp_path / "special").iterdir()] == ["file"]


def test_what_the_payloads_user_may_not_read_does_not_come_out(belljar: Belljar, tmp_path: Path) -> None:
    words = ("--user", f"{SOMEBODY}:{SOMEBODY}", "--cwd", "/var/tmp/x", "--out", f"/etc/shadow:{tmp_path}/shadow")
    done = belljar.run(*words, "--", "true")
    assert done.returncode == 125 and b"shadow" in done.stderr and not (tmp_path / "shadow").exists()


def test_a_full_guest_is_the_payloads_affair_and_its_output_still_comes(belljar: Belljar, tmp_path: Path) -> None:
    script = "echo kept > /tmp/log; fallocate -l 100G /tmp/all; cat /dev/zero > /tmp/rest; echo more > /tmp/more && exit 1; exit 28"
    done = belljar.run("--out", f"/tmp/log:{tmp_path}/log", "--", "sh", "-c", script)
    assert done.returncode == 28 and b"No space left" in done.stderr, done.stderr
    assert (tmp_path / "log").read_text() == "kept\n"
    assert belljar.leftovers() == []


def test_an_input_that_does_not_fit_is_said_before_the_payload_runs(belljar: Belljar, tmp_path: Path) -> None:
    with open(tmp_path / "large", "wb") as file:
        for _ in range(100):
            file.write(os.urandom(MIB))
    done = belljar.run("--in", f"{tmp_path}/large:/run/large", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"No space left" in done.stderr and b"hint: Ask for a larger disk" in done.stderr


def test_a_larger_disk_is_larger_inside(belljar: Belljar) -> None:
    done = belljar.run("--disk", "20G", "--", "df", "--output=size", "-BG", "/")
    assert int(done.stdout.split()[-1].rstrip(b"G")) >= 19, done.stderr


def test_a_copy_can_be_cancelled_on_the_way_in(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(300 * MIB))
    events = belljar.popen("events", "-f", "--format", "json")
    job = belljar.popen("run", "--in", f"{tmp_path}/large:/tmp/large", "--", "echo", "ran")
    until(events, "state", state="running")
    begin = time.monotonic()
    job.terminate()
    assert job.communicate(timeout=30)[0] == b"" and job.returncode == -signal.SIGTERM
    assert time.monotonic() - begin < 2 and belljar.leftovers() == []


def test_a_copy_can_be_cancelled_on_the_way_out(belljar: Belljar, tmp_path: Path) -> None:
    target = tmp_path / "large"
    words = ("--grace", "0s", "--report", str(tmp_path / "r"), "--out", f"/dev/shm/large:{target}")
    watch = Watch()
    watch.add(tmp_path, IN_CREATE)
    job = belljar.popen("run", *words, "--", "sh", "-c", "head -c 200M /dev/zero > /dev/shm/large")
    while not target.exists():
        watch.wait()
    watch.close()
    begin = time.monotonic()
    job.terminate()
    job.communicate(timeout=30)
    assert job.returncode == -signal.SIGTERM  # its output is not whole: this is no success
    assert time.monotonic() - begin < 2 and belljar.leftovers() == []
    assert report(tmp_path / "r")["cause"] == "cancelled"


def until(events: subprocess.Popen[bytes], name: str, **facts: object) -> None:
    """Wait for an event of the only machine."""
    assert events.stdout is not None
    while line := events.stdout.readline():
        event = json.loads(line)
        if event["event"] == name and facts.items() <= event.items():
            return
    raise AssertionError(f"no event {name}")
