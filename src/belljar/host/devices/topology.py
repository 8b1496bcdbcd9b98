"""Where the processors of this host are and which of them a machine is pinned to; what there is of large pages.

https://docs.kernel.org/admin-guide/cputopology.html, https://docs.kernel.org/admin-guide/mm/hugetlbpage.html
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from pathlib import Path

from belljar.errors import HostError, NoMemory
from belljar.host.room import Cpu, Placement
from belljar.model import Pages, Pin

SYS = Path("/sys")


def read_cpus(numbers: Iterable[int], sys: Path = SYS) -> list[Cpu]:
    """These processors, neighbours side by side. A core goes by the least number of its threads."""
    lists = (sys / "devices/system/node").glob("node[0-9]*/cpulist")
    nodes = {number: int(path.parent.name[4:]) for path in lists for number in numbers_of(path.read_text())}

    def read(number: int) -> Cpu:
        folder = sys / f"devices/system/cpu/cpu{number}/topology"
        core = min(numbers_of((folder / "thread_siblings_list").read_text()))
        return Cpu(number, core, int((folder / "physical_package_id").read_text()), nodes.get(number, 0))

    return sorted(map(read, numbers), key=lambda cpu: (cpu.node, cpu.socket, cpu.core, cpu.number))


def place(pin: Pin, count: int, cpus: list[Cpu], taken: Set[int]) -> Placement:
    """Where *count* virtual processors run, of *cpus* that the caller may use and others have *taken* of. By itself only where as
    many cpus, or whole cores, were given: a larger set may be what a site leaves to all of its jobs, who would meet on its first cpus."""
    cores = len({cpu.core for cpu in cpus})
    if count > len(cpus):
        return Placement(reason=f"{count} virtual cpus are more than the {len(cpus)} that this process may use")
    if pin is Pin.AUTO and count not in (len(cpus), cores):
        return Placement(reason=f"this process may use {len(cpus)} cpus for {count} virtual ones: others may, too")
    free = [cpu for cpu in cpus if cpu.number not in taken]
    if count > len(free):
        return Placement(
            reason=f"other machines of this user are pinned to {len(cpus) - len(free)} of {len(cpus)} cpus"
        )
    of_nodes = [list(group) for _, group in groupby(free, lambda cpu: cpu.node)]
    near = next((group for group in of_nodes if len(group) >= count), free)
    whole = [next(group) for _, group in groupby(near, lambda cpu: cpu.core)]
    return Placement(tuple((whole if len(whole) >= count else near)[:count]))


def pin(threads: Sequence[int], cpus: Sequence[int]) -> dict[str, int]:
    """Have each thread run on one of these alone; returns which. Raises HostError."""
    try:
        pinned = dict(zip(threads, cpus, strict=True))
        for thread, cpu in pinned.items():
            os.sched_setaffinity(thread, {cpu})
    except (OSError, ValueError) as exc:
        hint = "Was a cpu taken away from the job? `--pin none` does without."
        raise HostError(f"virtual processors cannot be pinned to the cpus {cpus}: {exc}", hint=hint) from exc
    return {str(thread): cpu for thread, cpu in pinned.items()}


def numbers_of(text: str) -> set[int]:
    """What the kernel writes as `0-3,8`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def check_pages(pages: Pages, wants: Iterable[tuple[int | None, int]], sys: Path = SYS) -> None:
    """Is there so much memory, in bytes, of each node (None: of any)? Raises NoMemory, HostError."""
    thp = sys / "kernel/mm/transparent_hugepage/enabled"
    if pages is Pages.THP and "[never]" in thp.read_text():
        raise HostError(
            f"--pages thp: {thp} says never", hint=f"As root: `echo madvise > {thp}`; or leave --pages out."
        )
    for node, size in wants if pages.size else ():
        place = sys / ("kernel/mm" if node is None else f"devices/system/node/node{node}")
        folder = place / f"hugepages/hugepages-{pages.size // 1024}kB"
        if not folder.is_dir():
            raise HostError(f"--pages {pages.value}: this host has none ({folder})", hint="Ask for `--pages default`.")
        free, need = int((folder / "free_hugepages").read_text()), -(-size // pages.size)
        if node is None:  # what others have mapped and not touched yet counts as free
            free -= int((folder / "resv_hugepages").read_text())
        if free < need:
            hint = f"As root raise {folder}/nr_hugepages (1G: at boot, `hugepages=`), or ask for `--pages default`."
            raise NoMemory(f"--pages {pages.value}: {need} are needed, {free} are free ({folder})", hint=hint)
