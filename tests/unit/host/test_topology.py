"""Which processors a machine is pinned to, on hosts written as sysfs shows them; and large pages, before they are asked for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from belljar.errors import HostError, NoMemory
from belljar.host.devices.topology import check_pages, numbers_of, pin, place, read_cpus
from belljar.host.room import Cpu
from belljar.model import GIB, MIB, Pages, Pin

CPUS, NODES = "devices/system/cpu/cpu{}/topology", "devices/system/node"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, object], None]:
    def write(path: str, text: object) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")

    return write


@pytest.fixture
def two_sockets(tmp_path: Path, write: Callable[[str, object], None]) -> Path:
    """Two sockets of four cores with two threads each; even cpus are on the first, siblings eight apart, as some firmware has it."""
    for number in range(16):
        write(f"{CPUS.format(number)}/physical_package_id", number % 2)
        write(f"{CPUS.format(number)}/thread_siblings_list", f"{number % 8},{number % 8 + 8}")
    for node in (0, 1):
        write(f"{NODES}/node{node}/cpulist", ",".join(map(str, range(node, 16, 2))))
    return tmp_path


def test_neighbours_stand_side_by_side(two_sockets: Path) -> None:
    cpus = read_cpus(range(16), two_sockets)
    assert [cpu.number for cpu in cpus] == [0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15]
    assert cpus[1] == Cpu(8, core=0, socket=0, node=0) and cpus[-1] == Cpu(15, core=7, socket=1, node=1)


def test_a_kernel_without_numa_has_one_node(write: Callable[[str, object], None], tmp_path: Path) -> None:
    write(f"{CPUS.format(3)}/physical_package_id", 0)
    write(f"{CPUS.format(3)}/thread_siblings_list", 3)
    assert read_cpus([3], tmp_path) == [Cpu(3, 3, 0, 0)]


@pytest.mark.parametrize(
    ("kind", "count", "allowed", "taken", "pinned"),
    [
        (Pin.AUTO, 4, {0, 8, 2, 10}, set(), [0, 8, 2, 10]),  # as many as were given: siblings side by side
        (Pin.AUTO, 2, {0, 8, 2, 10}, set(), [0, 2]),  # whole cores were given: a core each
        (Pin.AUTO, 4, {6, 1, 14, 9}, set(), [6, 14, 1, 9]),  # two nodes
        (Pin.CPUS, 1, set(range(16)), set(), [0]),
        (Pin.CPUS, 2, set(range(16)), {0, 8}, [2, 4]),  # beside another machine
        (Pin.CPUS, 4, set(range(16)), {0, 8, 2, 10, 4, 12}, [1, 3, 5, 7]),  # all on one node, where one has enough
        (Pin.CPUS, 10, set(range(16)), set(), [0, 8, 2, 10, 4, 12, 6, 14, 1, 9]),
    ],
)
def test_virtual_cpus_have_one_of_the_hosts_each(
    kind: Pin, count: int, allowed: set[int], taken: set[int], pinned: list[int], two_sockets: Path
) -> None:
    placement = place(kind, count, read_cpus(allowed, two_sockets), taken)
    assert (list(placement.numbers), placement.reason) == (pinned, "")


@pytest.mark.parametrize(
    ("kind", "count", "taken", "reason"),
    [
        (Pin.CPUS, 5, set(), "5 virtual cpus are more than the 4"),
        (Pin.AUTO, 3, set(), "4 cpus for 3 virtual ones: others may, too"),
        (Pin.AUTO, 1, set(), "4 cpus for 1 virtual ones: others may, too"),
        (Pin.AUTO, 4, {8}, "other machines of this user are pinned to 1 of 4 cpus"),
        (Pin.CPUS, 2, {0, 8, 2}, "other machines of this user are pinned to 3 of 4 cpus"),
    ],
)
def test_a_machine_without_cpus_of_its_own_is_not_pinned(
    kind: Pin, count: int, taken: set[int], reason: str, two_sockets: Path
) -> None:
    placement = place(kind, count, read_cpus({0, 8, 2, 10}, two_sockets), taken)
    assert placement.cpus == () and reason in placement.reason


def test_the_kernels_lists_are_read() -> None:
    assert numbers_of("\n") == set() and numbers_of("0-2,7\n") == {0, 1, 2, 7}


def test_large_pages_are_counted_before_they_are_asked_for(
    two_sockets: Path, write: Callable[[str, object], None]
) -> None:
    folder = "kernel/mm/hugepages/hugepages-2048kB"
    write(f"{folder}/free_hugepages", 300)
    write(f"{folder}/resv_hugepages", 44)  # others have them mapped
    check_pages(Pages.TWO_MIB, [(None, 512 * MIB)], two_sockets)
    with pytest.raises(NoMemory, match=r"--pages 2M: 257 are needed, 256 are free \(.*/kernel/mm/.*2048kB\)") as caught:
        check_pages(Pages.TWO_MIB, [(None, 514 * MIB)], two_sockets)
    assert "hugepages-2048kB/nr_hugepages" in str(caught.value.hint)


def test_pages_of_a_node_are_counted_there(two_sockets: Path, write: Callable[[str, object], None]) -> None:
    for node, free in ((0, 4), (1, 1)):
        write(f"{NODES}/node{node}/hugepages/hugepages-1048576kB/free_hugepages", free)
    check_pages(Pages.ONE_GIB, [(0, 4 * GIB), (1, GIB)], two_sockets)
    with pytest.raises(NoMemory, match=r"2 are needed, 1 are free \(.*/devices/system/node/node1/"):
        check_pages(Pages.ONE_GIB, [(0, GIB), (1, 2 * GIB)], two_sockets)


def test_a_host_without_such_pages_says_so(two_sockets: Path, write: Callable[[str, object], None]) -> None:
    with pytest.raises(
        HostError, match=r"--pages 1G: this host has none \(.*/kernel/mm/hugepages/hugepages-1048576kB\)"
    ):
        check_pages(Pages.ONE_GIB, [(None, GIB)], two_sockets)
    thp = "kernel/mm/transparent_hugepage/enabled"
    write(thp, "always madvise [never]")
    with pytest.raises(HostError, match="says never"):
        check_pages(Pages.THP, [(None, GIB)], two_sockets)
    write(thp, "always [madvise] never")
    check_pages(Pages.THP, [(None, GIB)], two_sockets)


def test_threads_are_pinned_one_by_one() -> None:
    with stood_still() as threads:
        cpu = min(os.sched_getaffinity(0))
        assert pin(threads, [cpu]) == {str(threads[0]): cpu}
        assert os.sched_getaffinity(threads[0]) == {cpu}
        with pytest.raises(HostError, match=r"cannot be pinned to the cpus \[0, 1\]"):
            pin(threads, [0, 1])  # one thread for two
        with pytest.raises(HostError, match="Invalid argument"):
            pin(threads, [1023])


@contextmanager
def stood_still() -> Iterator[list[int]]:
    """The id of a thread that waits."""
    end, ids = threading.Event(), queue.SimpleQueue[int]()
    thread = threading.Thread(target=lambda: (ids.put(threading.get_native_id()), end.wait(60)))
    thread.start()
    try:
        yield [ids.get(timeout=60)]
    finally:
        end.set()
        thread.join()
