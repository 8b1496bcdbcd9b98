"""Exports of a file server that the guest mounts itself: what is written is there, and a server that fails is told of."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar
from tests.live.nfs_server import NfsServer, free_port, nfs_server
from tests.live.test_faults import report

SOMEBODY = 54321
NET = ("--network", "user")
# Written through memory, and neither closed in the usual way nor synced: the server learns of it when somebody cares.
DIRTY = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 1 << 20)
memory = mmap.mmap(fd, 1 << 20)
os.close(fd)
print("open", flush=True)
sys.stdin.readline()
memory[:] = b"x" * (1 << 20)
print("written", flush=True)
"""


@pytest.fixture
def belljar(belljar: Belljar) -> Belljar:
    """The servers of these tests have ports of their own."""
    belljar.env["BELLJAR_NETWORK_ALLOW"] = "127.0.0.1"
    return belljar


@pytest.fixture(scope="module")
def server() -> Iterator[NfsServer]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-nfs-") as folder:
        os.chmod(folder, 0o755)
        with nfs_server(Path(folder) / "server") as started:
            yield started


@pytest.fixture
def own_server() -> Iterator[NfsServer]:
    """One that the test may stop."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-nfs-") as folder:
        os.chmod(folder, 0o755)
        with nfs_server(Path(folder) / "server") as started:
            yield started


def test_what_a_user_writes_is_on_the_server_and_the_users(belljar: Belljar, server: NfsServer, tmp_path: Path) -> None:
    for user in (0, SOMEBODY):
        folder = server.data / f"of {user}"
        folder.mkdir()
        os.chown(folder, user, user)
        (folder / "word").write_text("content")
        script = (
            "umask 027; cd \"$1\" && cat word && echo made > file && mv file moved && stat -c '%u %g %a' moved . word"
        )
        who = ("--user", f"{user}:{user}") if user else ()
        words = ("--report", str(tmp_path / "r"), *who, *NET, "--share", server.share())
        done = belljar.run(*words, "--", "sh", "-c", script, "sh", f"/data/of {user}")
        assert done.stdout.decode() == f"content{user} {user} 640\n{user} {user} 755\n0 0 644\n", done.stderr
        made = folder / "moved"
        assert (made.read_text(), made.stat().st_uid, made.stat().st_gid) == ("made\n", user, user)
        assert report(tmp_path / "r")["start"] == "clone"
    assert belljar.leftovers() == []


def test_an_export_is_read_only_unless_said_otherwise(belljar: Belljar, server: NfsServer) -> None:
    (server.data / "kept").write_text("as it was")
    script = "cat /data/kept && ! echo x 2>/dev/null >/data/new && ! rm /data/kept && grep ' /data ' /proc/mounts"
    for share in (server.share(mode="ro"), server.share().removesuffix(":rw")):
        done = belljar.run(*NET, "--share", share, "--", "sh", "-c", script)
        assert done.returncode == 0 and done.stdout.startswith(b"as it was"), done.stderr
        assert b" nfs4 ro,nosuid,nodev," in done.stdout and b"Read-only file system" in done.stderr
    assert not (server.data / "new").exists()


def test_exports_and_host_folders_may_lie_in_each_other(belljar: Belljar, server: NfsServer, tmp_path: Path) -> None:
    (tmp_path / "host/in").mkdir(parents=True)
    (tmp_path / "host/name").write_text("host\n")
    (server.data / "in/deep").mkdir(parents=True)
    (server.data / "name").write_text("server\n")
    words = ("--share", server.share("/a/in"), "--share", f"{tmp_path}/host:/a", "--share", server.share("/b"),
             "--share", f"{tmp_path}/host:/b/in/deep:rw")  # fmt: skip
    script = "cat /a/name /a/in/name /b/name /b/in/deep/name; echo x > /a/in/made; echo y > /b/in/deep/made"
    done = belljar.run(*NET, *words, "--", "sh", "-c", script)
    assert done.stdout == b"host\nserver\nserver\nhost\n", done.stderr
    assert (server.data / "made").read_text() == "x\n" and (tmp_path / "host/made").read_text() == "y\n"


def test_a_cold_start_mounts_too(belljar: Belljar, server: NfsServer, tmp_path: Path) -> None:
    (server.data / "cold").write_text("cold")
    words = ("--start", "cold", "--report", str(tmp_path / "r"), *NET, "--share", server.share(mode="ro"))
    done = belljar.run(*words, "--", "cat", "/data/cold")
    assert done.stdout == b"cold" and report(tmp_path / "r")["start"] == "cold", done.stderr


def test_clones_of_one_template_are_two_clients(belljar: Belljar, server: NfsServer) -> None:
    """A server tells clients apart by their names: of twins, the second would take the first one's open files away."""
    script = "exec 3>/data/$0; echo ready; read line; echo $line >&3; exec 3>&-; cat /data/$0"
    jobs = [
        belljar.popen("run", *NET, "--share", server.share(), "--", "sh", "-c", script, name, stdin=subprocess.PIPE)
        for name in ("one", "two")
    ]
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == b"ready\n"
    for word, job in zip((b"first\n", b"second\n"), jobs, strict=True):
        out, error = job.communicate(word, timeout=LONGEST)
        assert (job.returncode, out) == (0, word), error


def test_an_older_server_is_spoken_to_in_its_version(belljar: Belljar, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-nfs-") as folder:
        os.chmod(folder, 0o755)
        with nfs_server(Path(folder) / "server", versions="0") as old:
            done = belljar.run(*NET, "--share", old.share(), "--", "sh", "-c", "echo x > /data/y; cat /proc/mounts")
            assert done.returncode == 0 and b"vers=4.0," in done.stdout, done.stderr
            assert (old.data / "y").read_text() == "x\n"


def test_where_root_is_nobody_to_the_server_the_users_files_arrive(belljar: Belljar, server: NfsServer) -> None:
    os.chown(server.squashed, SOMEBODY, SOMEBODY)
    server.squashed.chmod(0o700)
    words = (*NET, "--user", f"{SOMEBODY}:{SOMEBODY}", "--cwd", "/data", "--share", server.share(name="/squashed"))
    done = belljar.run(*words, "--", "python3", "-c", DIRTY, "dirty", input=b"\n")
    assert done.returncode == 0, done.stderr
    found = server.squashed / "dirty"
    assert found.read_bytes() == b"x" * (1 << 20) and found.stat().st_uid == SOMEBODY


def test_an_export_that_is_not_there_is_refused(belljar: Belljar, server: NfsServer, tmp_path: Path) -> None:
    words = ("--report", str(tmp_path / "r"), *NET, "--share", f"nfs://localhost:{server.port}/no/such:/data")
    done = belljar.run(*words, "--", "echo", "never")
    assert done.returncode == 125 and done.stdout == b"" and b"/no/such" in done.stderr
    told = report(tmp_path / "r")
    assert (told["error"], told["class"]) == ("ExportRefused", "user"), told


def test_a_server_that_is_down_is_named_and_the_payload_never_starts(belljar: Belljar, tmp_path: Path) -> None:
    port, began = free_port(), time.monotonic()
    words = ("--report", str(tmp_path / "r"), *NET, "--share", f"nfs://127.0.0.1:{port}/data:/data")
    done = belljar.run(*words, "--", "echo", "never")
    assert done.returncode == 125 and done.stdout == b"" and f"127.0.0.1:{port}".encode() in done.stderr
    told = report(tmp_path / "r")
    assert (told["error"], told["class"], told["exit_code"]) == ("ServerSilent", "transient", None)
    assert time.monotonic() - began < 40 and belljar.leftovers() == []


def test_a_server_that_falls_silent_does_not_keep_a_machine(
    belljar: Belljar, own_server: NfsServer, tmp_path: Path
) -> None:
    script = "exec 3>/data/file; echo ready; read line; dd if=/dev/zero bs=1M count=4 >&3; sync; echo never"
    words = ("--report", str(tmp_path / "r"), "--timeout", "10", "--grace", "2", *NET, "--share", own_server.share())
    job = belljar.popen("run", *words, "--", "sh", "-c", script, stdin=subprocess.PIPE)
    assert job.stdin is not None and job.stdout is not None
    assert job.stdout.readline() == b"ready\n"
    own_server.pause()
    began = time.monotonic()
    out, _ = job.communicate(b"\n", timeout=LONGEST)
    assert out == b"" and time.monotonic() - began < 10 + 2 + 15
    assert report(tmp_path / "r")["cause"] == "walltime" and belljar.leftovers() == []


def test_what_did_not_fit_on_the_server_is_told(belljar: Belljar, tmp_path: Path) -> None:
    """The payload wrote to memory and ended well; it cannot know that the file never got there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="belljar-nfs-") as folder:
        os.chmod(folder, 0o755)
        with nfs_server(Path(folder) / "server", size="256k") as full:
            words = ("--report", str(tmp_path / "r"), *NET, "--share", full.share(), "--", "python3", "-c", DIRTY)
            done = belljar.run(*words, "/data/dirty", input=b"\n")
    assert (done.returncode, done.stdout) == (125, b"open\nwritten\n"), done.stderr
    assert b"/data" in done.stderr and b"No space" in done.stderr
    told = report(tmp_path / "r")
    assert (told["error"], told["exit_code"]) == ("ShareNotFlushed", 0), told
    assert belljar.leftovers() == []
