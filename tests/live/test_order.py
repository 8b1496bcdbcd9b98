"""Output and errors in one file stand there in the order they were written, as without a machine."""

import subprocess
from pathlib import Path

import pytest
from tests.live.conftest import Belljar

SCRIPT = "for n in $(seq 200); do echo out $n; echo err $n >&2; done"
WANTED = b"".join(b"out %d\nerr %d\n" % (n, n) for n in range(1, 201))


@pytest.mark.parametrize("where", ["file", "pipe"])
def test_one_file_for_both_keeps_their_order(belljar: Belljar, tmp_path: Path, where: str) -> None:
    if where == "file":
        with open(tmp_path / "both", "wb") as both:
            belljar.run("--", "sh", "-c", SCRIPT, stdout=both, stderr=both)
        assert (tmp_path / "both").read_bytes() == WANTED
    else:
        assert belljar.run("--", "sh", "-c", SCRIPT, stderr=subprocess.STDOUT).stdout == WANTED


def test_two_files_get_what_is_theirs(belljar: Belljar) -> None:
    done = belljar.run("--", "sh", "-c", "echo out; echo err >&2")
    assert (done.stdout, done.stderr) == (b"out\n", b"err\n")
