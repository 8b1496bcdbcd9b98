"""A soak whose machines are a shell script's: what is written down, when jobs fail, and when the soak is killed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar.errors import CommandFailed, LockTimeout, PositionLost
from belljar.host.locks import try_lock
from belljar.journal import Ledger
from belljar.soak import Plan, report, run
from belljar.soak.run import Soak

BELLJAR = """#!/bin/sh
for word; do case $word in soak=*) label=${{word#soak=}} ;; esac; done
[ ! -e {top}/blocks ] || read -r _ <{top}/blocks
[ ! -e {top}/fails ] || {{ echo "belljar: no room" >&2; exit 125; }}
printf '{{"id":"ab","start":"clone","class":"payload","cause":"finished","labels":[["soak","%s"]],' $label >>{top}/logs/ledger-2026-11.jsonl
printf '"phases":{{"prepare":0.25,"boot":0.5,"run":9}},"reason":""}}\\n' >>{top}/logs/ledger-2026-11.jsonl
echo $label
"""
PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.stories.test_soak_runs import soak
asyncio.run(soak(Path(sys.argv[1]), 4, lambda row, jobs: print(row["kind"], flush=True)).run())
"""


def soak(top: Path, jobs: int, tell: Callable[..., None] = lambda row, jobs: None) -> Soak:
    plan = Plan(jobs, 1, 5, ("ramdisk", "inject"), "none", "debian12", (str(top / "belljar"),), (top / "logs",), (top,))
    return Soak(plan, top / "state", tell)


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "belljar").write_text(BELLJAR.format(top=tmp_path))
    (tmp_path / "belljar").chmod(0o755)
    return tmp_path


async def test_a_resumed_soak_adds_up_and_each_context_has_its_share(top: Path) -> None:
    await soak(top, 3).run()
    await soak(top, 6).run()
    await soak(top, 6).run()
    made = report.of(top / "state")
    assert (made["jobs"], made["failed"], made["runs"]) == (6, 0, 2)
    assert [(row["context"], row["jobs"], row["mean"]) for row in made["starts"][:2]] == [
        ("inject", 3, 0.75),
        ("ramdisk", 3, 0.75),
    ]


async def test_a_soak_whose_first_job_fails_ends_with_its_reason(top: Path) -> None:
    (top / "fails").touch()
    with pytest.raises(CommandFailed, match="ramdisk: exit 125: belljar: no room"):
        await soak(top, 50).run()
    assert report.of(top / "state")["jobs"] == 0


async def test_jobs_that_fail_are_rows_with_their_cause_and_too_many_in_a_row_end_the_soak(top: Path) -> None:
    with pytest.raises(CommandFailed, match="exit 125: belljar: no room"):
        await soak(top, 50, lambda row, jobs: (top / "fails").touch() if jobs == 2 else None).run()
    made = report.of(top / "state")
    assert made["jobs"] == 22
    assert made["failures"] == [{"cause": "job", "jobs": run.MOST_IN_A_ROW, "example": "exit 125: belljar: no room"}]


async def test_a_ledger_that_is_cut_meanwhile_ends_the_soak_with_one_error(top: Path) -> None:
    def cut(row: dict[str, object], jobs: int) -> None:
        (top / "logs/ledger-2026-11.jsonl").write_text("") if jobs == 2 else None

    with pytest.raises(PositionLost, match="had been read up to byte"):
        await soak(top, 9, cut).run()
    assert report.of(top / "state")["jobs"] == 2


async def test_two_soaks_in_one_folder_are_refused(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PATIENCE", 0.0)
    (top / "state").mkdir()
    with (
        try_lock(top / "state/lock") or pytest.fail("locked"),
        pytest.raises(LockTimeout, match="held by another process"),
    ):
        await soak(top, 2).run()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_soak_that_is_ended_keeps_every_row_of_a_job_that_was_over(top: Path, number: int) -> None:
    """KILL loses the job that runs; TERM lets it end and starts no other."""
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", PROGRAM, str(top)]
    with subprocess.Popen(
        words, cwd=root, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    ) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)] == [b"first\n", b"first\n", b"job\n"]
        os.mkfifo(top / "blocks")
        child.send_signal(number)
        (top / "blocks").unlink() if number == signal.SIGTERM else None
        child.wait(30)
    (top / "blocks").unlink(missing_ok=True)
    kept = sum(row["kind"] == "job" for row, _ in Ledger(top / "state").since())
    assert 1 <= kept <= 3
    asyncio.run(soak(top, 4).run())
    assert report.of(top / "state")["jobs"] == 4 and not list((top / "state").glob("*.out"))


FILLS = """
import asyncio, contextlib, sys
from pathlib import Path
from belljar.errors import NoSpace
from belljar.soak import report
from tests.stories.test_soak_runs import soak

top, filler = Path(sys.argv[1]), Path(sys.argv[1], "state/filler")

def fill(row, jobs):
    with contextlib.suppress(OSError), open(filler, "ab", buffering=0) as file:
        while jobs >= 2 and file.write(bytes(512)):
            pass

try:
    asyncio.run(soak(top, 200, fill).run())
except NoSpace as error:
    print(error.message)
kept = report.of(top / "state")["jobs"]
filler.unlink()
asyncio.run(soak(top, kept + 2).run())
print(kept, report.of(top / "state")["jobs"])
"""


def test_a_full_disk_ends_the_soak_with_one_error_and_with_room_it_goes_on(top: Path) -> None:
    (top / "state").mkdir()
    mount = 'mount -t tmpfs -o size=64k none "$3/state" && exec "$1" -c "$2" "$3"'
    words = ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, FILLS, str(top)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    message, counts = done.stdout.splitlines()
    kept, at_last = map(int, counts.split())
    assert "state" in message
    assert 2 <= kept < 200
    assert at_last == kept + 2
