"""What a real payload finds of its machine's features, and what is kept of its guest."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path

import pytest
from tests.live.conftest import Belljar

READ = 'for f in "$MACHINEFEATURES"/* "$JOBFEATURES"/*; do printf "%s=%s\\n" "${f#/etc/}" "$(cat "$f")"; done'


@pytest.mark.parametrize("start", ["clone", "cold"])
def test_a_payload_reads_its_limits_from_files(belljar: Belljar, start: str) -> None:
    before = int(time.time())
    done = belljar.run(
        "--start", start, "--cpus", "1", "--memory", "640M", "--timeout", "600s", "--env", "JOBFEATURES=/nowhere", "--", "sh", "-c",
        f"{READ}; nproc; stat -c %U:%a $JOBFEATURES/job_id",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    *lines, processors, last = done.stdout.decode().splitlines()
    told = dict(line.split("=", 1) for line in lines)
    assert told["machinefeatures/total_cpu"] == told["jobfeatures/allocated_cpu"] == processors == "1"
    assert told["jobfeatures/max_rss_bytes"] == str(640 << 20)
    assert (told["jobfeatures/wall_limit_secs"], told["jobfeatures/cpu_limit_secs"]) == ("600", "600")
    start = int(told["jobfeatures/jobstart_secs"])
    assert before <= start <= time.time() and told["jobfeatures/shutdowntime_job"] == str(start + 600)
    assert told["jobfeatures/job_id"] == json.loads(belljar("ps", "-a", "--format", "json").stdout)[0]["id"]
    assert last == "root:644"


def test_chosen_folders_are_kept_also_of_a_job_that_failed(belljar: Belljar, tmp_path: Path) -> None:
    made = "mkdir -p /tmp/kept/deep; echo $((6*7)) >/tmp/kept/deep/answer; chmod 0 /tmp/kept/deep/answer; exit 9"
    done = belljar.run("--name", "kept", "--collect", "/tmp/kept", "--collect", "/nowhere", "--", "sh", "-c", made)
    assert done.returncode == 9, done.stderr.decode()
    target = tmp_path / "kept.tar"
    target.write_bytes(belljar("logs", "kept", "--collected").stdout)
    with tarfile.open(target) as archive:
        assert archive.getnames() == ["tmp/kept", "tmp/kept/deep", "tmp/kept/deep/answer"]
        content = archive.extractfile("tmp/kept/deep/answer")
        assert content is not None and content.read() == b"42\n"
    assert belljar.leftovers() == []


def test_an_archive_is_cut_off_at_its_limit_and_said(belljar: Belljar) -> None:
    settings = {"BELLJAR_BATCH_COLLECT_LIMIT": "1M"}
    words = ("--collect", "/tmp/large", "--", "sh", "-c", "head -c 5000000 /dev/urandom >/tmp/large")
    assert belljar.run("--name", "large", *words, env=settings).returncode == 0
    assert len(belljar("logs", "large", "--collected").stdout) == 1 << 20
    assert b"cut_off=true" in belljar("logs", "large", "--journal").stdout


def test_a_machine_of_which_nothing_was_kept_says_so(belljar: Belljar) -> None:
    assert belljar.run("--name", "plain", "--", "true").returncode == 0
    done = belljar("logs", "plain", "--collected")
    assert done.returncode != 0 and b"nothing was collected" in done.stderr and done.stdout == b""
    for wrong in ("relative", "/", "/tmp/.."):
        assert b"--collect" in belljar.run("--collect", wrong, "--", "true").stderr
