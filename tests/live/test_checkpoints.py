"""Machines that are written to a folder and go on from there: real guests that count, and lose and double no number."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar

from belljar.host.watch import growth

COUNTS = """
i=0
while [ $i -lt 20000 ]; do
  i=$((i + 1)); echo $i
  [ $((i % 100)) = 0 ] && echo $i >> /root/numbers && sleep 0.01
done
wc -l < /root/numbers >&2
exit 7
"""
COUNTED = b"".join(b"%d\n" % number for number in range(1, 20001))


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Belljar]:
    """Another host: nothing but the store of images is the same."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    there = Belljar(other)
    yield there
    there.close()


def until(path: Path, size: int) -> None:
    """Returns when the file has so many bytes."""
    for data in growth(path):
        size -= len(data)
        if size <= 0:
            return


def machine_of(belljar: Belljar) -> str:
    (id,) = belljar.machines()
    return id


def test_a_job_is_written_twice_and_goes_on_elsewhere_at_the_exact_byte(
    belljar: Belljar, elsewhere: Belljar, tmp_path: Path
) -> None:
    folder, output = str(tmp_path / "kept"), tmp_path / "output"
    with open(output, "wb") as stdout:
        job = belljar.popen("run", "--cwd", "/root", "--", "sh", "-c", COUNTS, stdout=stdout)
    until(output, 1000)
    done = belljar("checkpoint", machine_of(belljar), folder)
    assert done.returncode == 0, done.stderr
    done = belljar("checkpoint", "--stop", machine_of(belljar), folder)
    assert (done.returncode, done.stdout.split()[-1]) == (0, f"{folder}/2".encode()), done.stderr
    _, stderr = job.communicate(timeout=LONGEST)
    assert job.returncode == os.EX_TEMPFAIL and f"checkpoint 2 of it was written to {folder}".encode() in stderr, stderr
    assert belljar.leftovers() == []
    gone = elsewhere.run("--restore", folder)
    assert gone.returncode == 7, gone.stderr
    assert output.read_bytes() + gone.stdout == COUNTED
    assert gone.stderr.strip() == b"200"
    assert elsewhere.leftovers() == []
    (row,) = elsewhere.json("ps", "-a")
    outcome = json.loads((elsewhere.logs / row["id"] / "outcome.json").read_text())
    assert (outcome["restarts"], outcome["start"], outcome["cause"]) == (1, "restored", "finished")
