"""Belljar is killed at every step of what prepares a warm image, forks a machine, freezes one and goes on from it: what was whole stays
whole, and one reap leaves nothing of the rest. The steps are read in the sources, so none can be forgotten here."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, STORE, Belljar

import belljar as package
from belljar.host.watch import growth
from belljar.journal import read
from belljar.machine.checkpoints import newest

SOURCE = Path(package.__file__).parent
RAMDISK = ("--user", "0:0", "--cwd", "/root")


def steps(*files: str) -> tuple[str, ...]:
    """The points of a machine's life at which these files stop for a test."""
    texts = [(SOURCE / file).read_text() for file in files]
    return tuple(dict.fromkeys(name for text in texts for name in re.findall(r'point\("([^"]+)"\)', text)))


CLAIMING, LEAVING = steps("machine/life/claim.py"), steps("machine/cleaning/put_away.py")
LIVING = (
    *CLAIMING, *steps("machine/extras/network.py", "machine/life/runner.py", "machine/life/work.py"), *LEAVING
)  # fmt: skip
RESTORING = (*LIVING, *steps("machine/checkpoints/content.py"))
FORKING = steps("machine/life/forking.py", "hypervisor/qemu/driver.py", "hypervisor/qemu/template/forking.py")
FREEZING = (*steps("machine/checkpoints/__init__.py", "machine/checkpoints/freezing.py"), *LEAVING)
WRITTEN = ("freeze-published", *LEAVING)  # the new checkpoint is there by then
COMMAND = "while its command runs"
UNPREPARED = (*CLAIMING, *steps("machine/extras/network.py"), COMMAND, *steps("machine/planning/template.py"))
PREPARING = (*UNPREPARED, *LEAVING)


def test_every_step_is_one_of_these() -> None:
    everywhere = set(steps(*(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))))
    assert everywhere == {*PREPARING, *FORKING, *FREEZING, *RESTORING} - {COMMAND}


# -- what all have in common -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No other test makes templates there."""
    return tmp_path_factory.mktemp("steps") / "store"


@pytest.fixture
def belljar(tmp_path: Path, store: Path) -> Iterator[Belljar]:
    command = with_images(tmp_path, store)
    yield command
    command.close()


def with_images(folder: Path, store: Path) -> Belljar:
    return Belljar(folder, store, {"BELLJAR_PATHS_SITE_STORE": str(STORE)})


def dies(step: str) -> dict[str, str]:
    return {"BELLJAR_TESTING_ABORT_AT": step}


def until(path: Path, size: int) -> None:
    """Returns when the file has so many bytes."""
    for data in growth(path):
        size -= len(data)
        if size <= 0:
            return


def keeper_died(belljar: Belljar, id: str) -> None:
    """Returns when the process that keeps a machine was killed; until it is, its journal is where it was."""
    pid = next(event["pid"] for event in read(belljar.run_folder / "machines" / id) if event["event"] == "claim")
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            assert select.select([pidfd], [], [], LONGEST)[0], f"the keeper of {id} lives"
        finally:
            os.close(pidfd)


def templates(belljar: Belljar) -> list[str]:
    """Forks, drafts and all, without the locks of templates that may be made again."""
    folder = Path(belljar.env["BELLJAR_PATHS_STORE"]) / "templates"
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")


def holders(*folders: Path) -> list[str]:
    """Other processes that have a file below these open."""
    found = []
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()):
        with suppress(OSError):
            files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            found += [f"{pid} {file}" for file in files if any(file.startswith(f"{folder}/") for folder in folders)]
    return found


def reaped(belljar: Belljar, before: list[str]) -> None:
    """One reap has left nothing but the templates that were there *before*."""
    done = belljar("reap")
    assert done.returncode == 0, done.stderr
    assert belljar.leftovers() == [] and templates(belljar) == before
    end = time.monotonic() + 10
    while left := holders(belljar.folder, Path(belljar.env["BELLJAR_PATHS_STORE"])):  # what QEMU fed is just ending
        assert time.monotonic() < end, left
        time.sleep(0.01)


# -- warm images -------------------------------------------------------------------------------------------------------

WARM = ("--from", "debian12", "-m", "256M", "--network", "user", *RAMDISK)


@pytest.mark.slow
@pytest.mark.parametrize("step", PREPARING)
def test_a_preparation_that_is_killed_leaves_nothing_and_the_next_one_works(
    belljar: Belljar, tmp_path: Path, step: str
) -> None:
    """Memory that was whole by then is the next one's."""
    store = tmp_path / "store"
    belljar.env["BELLJAR_PATHS_STORE"] = str(store)

    def kept() -> list[Path]:
        return [path for part in ("images/sha256-*", "images/drafts/*", "templates/*[!k]") for path in store.glob(part)]

    prepare = ("image", "warm", "prepared", *WARM, "--", "sh", "-c", "echo prepared | tee /tmp/mark; sleep 2")
    died = belljar.popen(*prepare, env=dies(step))
    if step == COMMAND:
        assert died.stderr is not None and died.stderr.readline() == b"prepared\n"
        died.kill()
    assert died.wait(LONGEST) == -signal.SIGKILL and list((store / "images/names").glob("*")) == []
    is_whole = step not in UNPREPARED
    reaped(belljar, [path.name for path in store.glob("templates/*[!k]") if is_whole])
    assert belljar("image", "gc").returncode == 0
    assert len(kept()) == (2 if is_whole else 0), kept()
    done = belljar(*prepare)
    assert (done.returncode, done.stderr) == (0, b"" if is_whole else b"prepared\n")
    assert belljar.run("--image", "prepared", "--", "cat", "/tmp/mark").stdout == b"prepared\n"
    assert belljar("image", "remove", "prepared").returncode == 0
    assert kept() == [] == belljar.leftovers()


@pytest.fixture(scope="module")
def held(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A warm image whose program waits for its job. It can be removed when all of its jobs were killed."""
    belljar = with_images(tmp_path_factory.mktemp("held"), store)
    before, holds = set(templates(belljar)), "echo prepared > /tmp/mark; exec /usr/lib/belljar/belljar-hold cat"
    made = belljar("image", "warm", "held", *WARM, "--", "sh", "-c", holds)
    assert made.returncode == 0, made.stderr
    (memory,) = set(templates(belljar)) - before
    yield "held"
    assert belljar("image", "remove", "held").returncode == 0 and memory not in templates(belljar)
    belljar.close()


@pytest.mark.slow
@pytest.mark.parametrize("step", LIVING)
def test_a_job_of_a_warm_image_that_is_killed_leaves_the_image_to_the_next(
    belljar: Belljar, held: str, step: str
) -> None:
    before, job = templates(belljar), ("--image", held, "--network", "user", *RAMDISK, "--", "/tmp/mark")
    assert belljar.run(*job, env=dies(step)).returncode == -signal.SIGKILL
    reaped(belljar, before)
    done = belljar.run(*job)
    assert (done.returncode, done.stdout) == (0, b"prepared\n"), done.stderr
    assert templates(belljar) == before and belljar.leftovers() == []


# -- forks -------------------------------------------------------------------------------------------------------------

COUNTS = "i=0; while :; do i=$((i+1)); echo $i > /tmp/next; mv /tmp/next /tmp/count; sleep 0.05; done"
COUNTS_ON = "first=$(cat /tmp/count); until [ $(cat /tmp/count) -gt $first ]; do sleep 0.05; done"


def parent(belljar: Belljar, **options: dict[str, str]) -> str:
    done = belljar.run("-d", "-n", "--network", "user", *RAMDISK, "--", "sh", "-c", COUNTS, **options)
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    counts_on(belljar, id)
    return id


def counts_on(belljar: Belljar, *machines: str) -> None:
    for id in machines:
        done = belljar(
            "exec", "--wait", "60s", id, "--", "sh", "-c", f"until [ -e /tmp/count ]; do sleep 0.05; done; {COUNTS_ON}"
        )
        assert done.returncode == 0, done.stderr


def fork(belljar: Belljar, *words: str, **options: dict[str, str]) -> list[str]:
    done = belljar("fork", *words, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split()


def only(belljar: Belljar, machines: list[str], before: list[str]) -> None:
    """After one reap nothing is there but these machines, which count on, and the templates that were there *before*."""
    assert belljar("reap").returncode == 0
    assert (belljar.machines(), templates(belljar)) == (sorted(machines), before)
    files = [path for path in belljar.leftovers() if not path.startswith("qemu ")]
    identities = [path for path in files if "/identities/" in path]
    assert len(identities) == len(belljar.domains()) == len(machines), files
    assert all(any(id in path for id in machines) for path in files if path not in identities), files
    counts_on(belljar, *machines)


def all_stopped(belljar: Belljar, machines: list[str], before: list[str]) -> None:
    for id in machines:
        assert belljar("stop", id).returncode == 0
    assert belljar.leftovers() == [] and templates(belljar) == before


@pytest.mark.slow
@pytest.mark.parametrize("step", FORKING)
def test_a_parent_that_is_killed_leaves_nothing(belljar: Belljar, step: str) -> None:
    id, before = parent(belljar, env=dies(step)), templates(belljar)
    done = belljar("fork", id)
    assert done.returncode != 0 and done.stderr.count(b"\n") <= 2, done.stderr
    keeper_died(belljar, id)
    reaped(belljar, before)


@pytest.mark.slow
@pytest.mark.parametrize("step", FORKING)
def test_a_fork_that_is_killed_while_it_is_forked_harms_no_other(belljar: Belljar, step: str) -> None:
    id, none = parent(belljar), templates(belljar)
    dead, alive = fork(belljar, "-n", "2", id, env=dies(step))
    counts_on(belljar, dead, alive)
    before = templates(belljar)
    assert belljar("fork", dead).returncode != 0
    keeper_died(belljar, dead)
    only(belljar, [id, alive], before)
    all_stopped(belljar, [id, alive], none)


@pytest.mark.slow
@pytest.mark.parametrize("step", LIVING)
def test_a_machine_of_a_fork_that_is_killed_harms_neither_its_parent_nor_others(belljar: Belljar, step: str) -> None:
    id, none = parent(belljar), templates(belljar)
    (alive,) = fork(belljar, id)
    before = templates(belljar)
    done = belljar("fork", id, "--", "true", env=dies(step))
    assert (done.returncode != 0) == (step in CLAIMING), done.stderr
    (dead,) = set(belljar.machines()) - {id, alive}
    keeper_died(belljar, dead)
    only(belljar, [id, alive], before)
    all_stopped(belljar, [id, alive], none)


# -- checkpoints -------------------------------------------------------------------------------------------------------

WRITES = """
i=0
while [ $i -lt 3000 ]; do
  i=$((i + 1)); echo $i; echo $i >> /root/numbers
  [ $((i % 1000)) = 0 ] && read line
done
wc -l < /root/numbers >&2
exit 7
"""
WROTE = b"".join(b"%d\n" % number for number in range(1, 3001))


@pytest.fixture(scope="module")
def written(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job that was written to `kept` and ended; `output` is what it had said."""
    folder = tmp_path_factory.mktemp("written")
    belljar = with_images(folder, store)
    words = ("--network", "user", "--scratch", "64M", *RAMDISK)
    with open(folder / "output", "wb") as stdout:
        job = belljar.popen("run", *words, "--", "sh", "-c", WRITES, stdin=subprocess.PIPE, stdout=stdout)
    until(folder / "output", 1000)
    done = belljar("checkpoint", "--stop", *belljar.machines(), str(folder / "kept"))
    assert (done.returncode, job.wait(LONGEST)) == (0, os.EX_TEMPFAIL), done.stderr
    belljar.close()
    return folder


@pytest.fixture
def kept(written: Path, tmp_path: Path) -> Path:
    """The same for each test."""
    return Path(shutil.copytree(written / "kept", tmp_path / "kept"))


def goes_on(belljar: Belljar, kept: Path, said: bytes) -> None:
    """From there to its end: no number is lost and none is doubled."""
    gone = belljar.run("--restore", str(kept), input=b"1\n2\n3\n")
    assert (gone.returncode, gone.stderr.strip()) == (7, b"3000"), gone.stderr
    assert said + gone.stdout == WROTE and belljar.leftovers() == []


@pytest.mark.slow
@pytest.mark.parametrize("step", RESTORING)
def test_one_that_is_killed_when_it_goes_on_does_so_the_next_time(
    belljar: Belljar, written: Path, kept: Path, step: str
) -> None:
    before = templates(belljar)
    died = belljar.run("--restore", str(kept), env=dies(step), input=b"1\n2\n3\n")
    assert died.returncode == -signal.SIGKILL, died.stderr
    reaped(belljar, before)
    assert sorted(os.listdir(kept)) == ["1", "lock"]
    goes_on(belljar, kept, (written / "output").read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize("step", FREEZING)
def test_one_that_is_killed_when_it_is_written_goes_on_from_the_last_that_is_whole(
    belljar: Belljar, written: Path, kept: Path, tmp_path: Path, step: str
) -> None:
    before, second = templates(belljar), tmp_path / "second"
    with open(second, "wb") as stdout:
        job = belljar.popen("run", "--restore", str(kept), stdin=subprocess.PIPE, stdout=stdout, env=dies(step))
    assert job.stdin is not None
    job.stdin.write(b"1\n")
    job.stdin.flush()
    until(second, 500)
    done = belljar("checkpoint", "--stop", *belljar.machines(), str(kept))
    assert job.wait(LONGEST) == -signal.SIGKILL and (done.returncode != 0 or step in LEAVING)
    reaped(belljar, before)
    assert sorted(os.listdir(kept)) == (["1", "2", "lock"] if step in WRITTEN else ["1", "lock"])
    checkpoint, complaints = newest(kept)
    assert checkpoint is not None and complaints == []
    said = (written / "output").read_bytes() + second.read_bytes()
    goes_on(belljar, kept, said[: checkpoint.standstill.stdout])
