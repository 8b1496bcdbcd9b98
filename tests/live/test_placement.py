"""Real QEMUs on processors of their own, seen in /proc; NUMA nodes and large pages, seen in real guests."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.live import tiny
from tests.live.conftest import Belljar
from tests.live.tiny import Talk

from belljar.hypervisor import Layout, Node, Settings
from belljar.model import MIB

CPUS = sorted(os.sched_getaffinity(0))[:2]
PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
needs_two = pytest.mark.skipif(len(CPUS) < 2, reason="one processor alone")


def allowed(pid: int) -> dict[str, str]:
    """The cpus of each thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: (task / "status").read_text().partition("Cpus_allowed_list:\t")[2].split()[0] for task in tasks}


def placed(belljar: Belljar, id: str) -> tuple[list[int], dict[str, int], str]:
    """The cpus, the threads on them, or why not, as `show` tells."""
    events = {event["event"]: event for event in belljar.json("show", id)["placement"]}
    return events["placement"]["cpus"], events.get("pinned", {}).get("threads", {}), events["placement"]["reason"]


@contextmanager
def running(belljar: Belljar, name: str, *words: str) -> Iterator[int]:
    """A machine whose payload runs; it was started by a process that may use these two cpus. QEMU's pid."""
    keeper = belljar.popen(
        "run", "--name", name, *words, "--", "sh", "-c", "echo up; cat", stdin=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, CPUS),
    )  # fmt: skip
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == b"up\n", keeper.communicate()[1]
    try:
        yield belljar.json("show", name)["pid"]
    finally:
        assert keeper.communicate(timeout=60)[1] == b"" and keeper.returncode == 0


@needs_two
def test_each_virtual_cpu_of_a_clone_has_its_own(belljar: Belljar) -> None:
    """The second one is plugged in when the clone has loaded. QEMU's other threads may run on both."""
    with running(belljar, "both", "--pin", "cpus", "--cpus", "2") as pid:
        cpus, threads, reason = placed(belljar, "both")
        assert (cpus, sorted(threads.values()), reason) == (CPUS, CPUS, "")
        seen = allowed(pid)
        assert {thread: seen[thread] for thread in threads} == {thread: str(cpu) for thread, cpu in threads.items()}
        assert len(seen) > 2 and seen[str(pid)] not in map(str, CPUS)
        shown = belljar("show", "both").stdout.decode()
        assert (
            f"cpu {CPUS[0]}, {CPUS[1]} of this host, NUMA node" in shown
            and belljar.json("show", "both")["start"] == "clone"
        )


@needs_two
def test_machines_beside_each_other_never_share_one(belljar: Belljar) -> None:
    with running(belljar, "first", "--pin", "cpus") as first, running(belljar, "second", "--pin", "cpus") as second:
        assert [placed(belljar, name)[0] for name in ("first", "second")] == [CPUS[:1], CPUS[1:]]
        assert str(CPUS[0]) in allowed(first).values() and str(CPUS[1]) in allowed(second).values()
        done = belljar.run("--pin", "cpus", "--", "true", preexec_fn=lambda: os.sched_setaffinity(0, CPUS))
        assert done.returncode == 125 and b"other machines of this user are pinned to 2 of 2 cpus" in done.stderr
    assert belljar.leftovers() == []


@pytest.mark.slow
async def test_a_guest_sees_sockets_siblings_and_nodes(tmp_path: Path) -> None:
    """Both of its nodes are on the first of this host's."""
    guests = tiny.make(tmp_path, Settings(cpu="max,vendor=GenuineIntel"))  # emulated AMD has no siblings
    halves = Node(2, 192 * MIB, 0), Node(2, 64 * MIB, 0)
    guest = Talk(guests.hypervisor.start(guests.fresh("0123456789ab", cpus=4, layout=Layout(2, 1, 2, halves))))
    try:
        assert await guest.line() == "ready"
        cpu = "/sys/devices/system/cpu"
        lines, _ = await guest.do(
            "busybox cat /sys/devices/system/node/node0/cpulist /sys/devices/system/node/node1/cpulist "
            f"{cpu}/cpu1/topology/physical_package_id {cpu}/cpu3/topology/physical_package_id "
            f"{cpu}/cpu3/topology/thread_siblings_list; busybox grep MemTotal /sys/devices/system/node/node*/meminfo"
        )
        assert lines[:5] == ["0-1", "2-3", "0", "1", "2-3"]
        sizes = [int(line.split()[-2]) >> 10 for line in lines[5:]]
        assert len(sizes) == 2 and 128 < sizes[0] < 192 and 32 < sizes[1] <= 64
    finally:
        await guest.end()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not PAGES.is_dir(), reason="only root reserves pages")
def test_a_machine_of_reserved_pages_has_all_of_them(belljar: Belljar) -> None:
    before, total = (int((PAGES / name).read_text()) for name in ("free_hugepages", "nr_hugepages"))
    words = ("--memory", "256M", "--pages", "2M", "--name", "large")
    done = belljar.run(*words, "--", "true") if before < 128 else None
    assert done is None or (done.returncode == 125 and b"--pages 2M: 128 are needed" in done.stderr)
    try:
        (PAGES / "nr_hugepages").write_text(str(total + 128))
        if int((PAGES / "nr_hugepages").read_text()) < total + 128:
            pytest.skip("this host's memory is in too many pieces")
        with running(belljar, *("kept", *words[:4])):
            free, promised = (int((PAGES / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
            assert before + 128 - (free - promised) == 128
            machine = belljar.json("show", "kept")
            assert machine["start"] == "cold"
            assert "memory pages   2M" in belljar("show", "kept").stdout.decode()
    finally:
        (PAGES / "nr_hugepages").write_text(str(total))
    assert belljar.leftovers() == []
