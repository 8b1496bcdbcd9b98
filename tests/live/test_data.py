"""Scratch disks and packed folders in real machines."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from tests.live.conftest import Belljar
from tests.live.test_faults import report

from belljar.host.files import sha256_of
from belljar.model import MIB

SOMEBODY = 54321
needs_mksquashfs = pytest.mark.skipif(shutil.which("mksquashfs") is None, reason="no mksquashfs")
PACK_ALL = {"BELLJAR_MACHINE_PACK_FILES": "3"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    for number in range(4):
        (folder / f"d{number}").mkdir(parents=True)
        for one in range(5):
            (folder / f"d{number}/f{one}").write_bytes(b"%d.%d\n" % (number, one) * 1000)
    (folder / "d0/run").write_text("#!/bin/sh\necho ran\n")
    (folder / "d0/run").chmod(0o755)
    (folder / "link").symlink_to("d0/f0")
    (folder / os.fsdecode(b"8-bit \xff")).write_bytes(b"raw")
    return folder


def test_a_clone_has_a_scratch_disk_of_its_own(belljar: Belljar, tmp_path: Path) -> None:
    script = """
        stat -c '%u %g %a' /scratch; echo "$TMPDIR"; ls -A /scratch | wc -l; grep ' /scratch ' /proc/mounts
        mktemp > /dev/null && ls /scratch | wc -l
        head -c 100M /dev/zero > /scratch/large; echo "end $?"; echo still > /tmp/there && cat /tmp/there
    """
    done = belljar.run(
        "--report",
        str(tmp_path / "r"),
        "--user",
        f"{SOMEBODY}:{SOMEBODY}",
        "--scratch",
        "64M",
        "--",
        "sh",
        "-c",
        script,
    )
    lines = done.stdout.decode().splitlines()
    assert lines[:3] == [f"{SOMEBODY} {SOMEBODY} 700", "/scratch", "0"], done.stderr
    assert "nosuid,nodev" in lines[3] and lines[4:] == ["1", "end 1", "still"]
    assert b"No space left on device" in done.stderr
    assert report(tmp_path / "r")["start"] == "clone", report(tmp_path / "r")
    assert belljar.leftovers() == []


def test_a_cold_boot_has_it_too_and_ones_own_tmpdir_counts(belljar: Belljar, tmp_path: Path) -> None:
    words = ("--report", str(tmp_path / "r"), "--start", "cold", "--scratch", "2G", "--env", "TMPDIR=/tmp")
    done = belljar.run(*words, "--", "sh", "-c", "echo $TMPDIR; df -m --output=size /scratch | tail -1")
    place, size = done.stdout.decode().split()
    assert place == "/tmp" and 1900 < int(size) <= 2048, done.stderr
    assert report(tmp_path / "r")["start"] == "cold"


@needs_mksquashfs
def test_a_packed_folder_is_as_good_as_a_copy(belljar: Belljar, tree: Path, tmp_path: Path) -> None:
    script = """
        cd in; find . | wc -l; cat link | wc -c; d0/run; stat -c '%u %a' . d0/run; cat 8-bit*; echo
        echo more >> d1/f1; tail -n 1 d1/f1; mv d2 e2 && ls e2 | wc -l; rm -r d3; echo new > made; ln d1/f2 d1/hard
        cat /tmp/before; ls | tr '\\n' ' '
    """
    (tmp_path / "first").mkdir()
    (tmp_path / "first/kept").write_text("kept\n")
    words = ("--user", f"{SOMEBODY}:{SOMEBODY}", "--in", f"{tmp_path}/first:in", "--in", f"{tree}:in")
    words += ("--in", f"{tmp_path}/first/kept:/tmp/before", "--out", f"in/d1:{tmp_path}/back")
    done = belljar.run("--report", str(tmp_path / "r"), *words, "--", "sh", "-c", script, env=PACK_ALL)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode(errors="replace").splitlines()
    assert "pack" in report(tmp_path / "r")["phases"]
    assert lines[:5] == ["29", "4000", "ran", f"{SOMEBODY} 755", f"{SOMEBODY} 755"]
    assert lines[6:9] == ["more", "5", "kept"] and lines[9].split()[-4:] == ["e2", "kept", "link", "made"]
    assert (tmp_path / "back/f1").read_bytes().endswith(b"1.1\nmore\n")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["f0", "f1", "f2", "f3", "f4", "hard"]
    assert (tree / "d3/f0").exists() and not (tree / "made").exists()
    assert belljar.leftovers() == []


@needs_mksquashfs
def test_holes_in_a_large_folder_stay_holes_on_the_way_in_and_out(belljar: Belljar, tree: Path, tmp_path: Path) -> None:
    with (tree / "holes").open("wb") as file:
        file.write(b"begin")
        file.seek(16 * MIB + 5)
        file.write(os.urandom(MIB))
        file.seek(32 * MIB)
        file.write(b"end")
    words = (
        "--in",
        f"{tree}:/var/tmp/in",
        "--out",
        f"/var/tmp/in/holes:{tmp_path}/back",
        "--report",
        str(tmp_path / "r"),
    )
    done = belljar.run(*words, "--", "sh", "-c", "du -k /var/tmp/in/holes; sha256sum < /var/tmp/in/holes", env=PACK_ALL)
    size, _, digest, _ = done.stdout.decode().split()
    assert int(size) < 2048 and digest == sha256_of(tree / "holes"), done.stderr
    assert sha256_of(tmp_path / "back") == digest and (tmp_path / "back").stat().st_blocks * 512 < 2 * MIB
    assert "pack" in report(tmp_path / "r")["phases"]


@needs_mksquashfs
def test_a_packed_folder_comes_to_no_place_where_its_user_may_not_write(belljar: Belljar, tree: Path) -> None:
    words = ("--user", f"{SOMEBODY}:{SOMEBODY}", "--in", f"{tree}:/usr/share/mine", "--", "true")
    packed, copied = belljar.run(*words, env=PACK_ALL), belljar.run(*words)
    assert packed.returncode == copied.returncode == 125
    assert b"/usr/share/mine" in packed.stderr and b"Permission denied" in packed.stderr, packed.stderr
    assert belljar.leftovers() == []


@needs_mksquashfs
@pytest.mark.parametrize("point", ["after-attachments", "after-spawn", "payload-started"])
def test_killed_at_any_point_it_leaves_nothing(belljar: Belljar, tree: Path, point: str) -> None:
    words = ("--scratch", "64M", "--in", f"{tree}:/data", "--", "true")
    done = belljar.run(*words, env={**PACK_ALL, "BELLJAR_TESTING_ABORT_AT": point})
    assert done.returncode == -signal.SIGKILL
    assert belljar("reap").returncode == 0
    assert belljar.leftovers() == []


def test_large_files_come_and_go_by_a_disk(belljar: Belljar, tmp_path: Path) -> None:
    size = 80 * MIB + 123
    with (tmp_path / "large").open("wb") as file:
        file.write(os.urandom(40 * MIB))
        file.seek(size - 1000)
        file.write(os.urandom(1000))
    (tmp_path / "large").chmod(0o640)
    script = "stat -c '%a %s' in/large; mkdir out; cp in/large out/one; echo two >out/two; cp out/one alone; du -m in/large | cut -f1"
    words = ("--in", f"{tmp_path}/large:in/large", "--out", f"out:{tmp_path}/out", "--out", f"alone:{tmp_path}/alone")
    done = belljar.run("--user", f"{SOMEBODY}:{SOMEBODY}", "--cwd", "/tmp/work", *words, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    shown, used = done.stdout.decode().splitlines()
    assert shown == f"640 {size}" and int(used) < 45, "a hole stays a hole"
    for copy in ("out/one", "alone"):
        assert sha256_of(tmp_path / copy) == sha256_of(tmp_path / "large")
    assert (tmp_path / "out/two").read_text() == "two\n"
    assert belljar.leftovers() == []
