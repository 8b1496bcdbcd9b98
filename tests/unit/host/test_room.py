"""What is left of a host: by its own count, by its control groups of either version, and by what others have reserved."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.errors import HostError, NoMemory, NoSpace
from belljar.host.room import Need, Settings, Taken, memory_bounds, own_groups, room, touched, usable_cpus
from belljar.model import GIB, MIB

NOTHING_KEPT = Settings(kept_memory=0, kept_scratch=0, cpus_per_cpu=0)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {8 << 20} kB\nMemFree: 1 kB\nMemAvailable: {4 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/site/job\n")
    return tmp_path / "proc"


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "groups/site/job").mkdir(parents=True)
    return tmp_path / "groups"


def limit(folder: Path, most: int | str, used: int, inactive: int = 0, *, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{most}\n")
    (folder / names[1]).write_text(f"{used}\n")
    word = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{word} {inactive}\n")


def test_without_control_groups_the_host_counts(proc: Path, groups: Path) -> None:
    left = room([], NOTHING_KEPT, 5 * GIB, proc=proc, groups=groups)
    assert (left.memory, str(left.bound), left.scratch, left.machines) == (4 * GIB, "this host", 5 * GIB, 0)


def test_the_tightest_group_above_us_counts_and_what_can_be_dropped_is_free(proc: Path, groups: Path) -> None:
    limit(groups / "site/job", "max", 7)
    limit(groups / "site", 3 * GIB, 2 * GIB, GIB // 2)
    left = room([], NOTHING_KEPT, 0, proc=proc, groups=groups)
    assert left.memory == GIB + GIB // 2 and str(left.bound) == "the control group /site"


def test_version_1_is_understood(proc: Path, groups: Path) -> None:
    (proc / "self/cgroup").write_text("9:memory:/slurm/job_1\n3:cpu,cpuacct:/x\n1:name=systemd:/y\n0::/\n")
    limit(groups / "memory/slurm/job_1", 2 * GIB, GIB, 256 * MIB, version=1)
    limit(groups / "memory", 9223372036854771712, GIB, version=1)
    assert own_groups(proc) == (("memory", "/slurm/job_1"), ("", "/"))
    bounds = list(memory_bounds(proc, groups))
    assert [(bound.free, bound.path) for bound in bounds] == [(4 * GIB, ""), (GIB + 256 * MIB, "/slurm/job_1")]


def test_a_reservation_counts_in_full_until_its_memory_is_touched(proc: Path, groups: Path) -> None:
    fresh = Taken(Need(3 * GIB, 1))
    half = Taken(Need(2 * GIB, 2), memory=GIB)
    full = Taken(Need(GIB, 1), memory=2 * GIB)
    assert room([fresh], NOTHING_KEPT, 0, proc=proc, groups=groups).memory == GIB
    assert room([half, full], NOTHING_KEPT, 0, proc=proc, groups=groups).memory == 3 * GIB
    assert room([fresh, half], NOTHING_KEPT, 0, proc=proc, groups=groups).memory == 0


def test_a_group_counts_only_those_who_are_in_it(proc: Path, groups: Path) -> None:
    limit(groups / "site", 3 * GIB, 0)
    inside = Taken(Need(GIB, 1, groups=(("", "/site/other"),)))
    outside = Taken(Need(GIB, 1, groups=(("", "/sites"),)))
    assert room([inside], NOTHING_KEPT, 0, proc=proc, groups=groups).memory == 2 * GIB
    assert room([outside, outside], NOTHING_KEPT, 0, proc=proc, groups=groups).memory == 2 * GIB  # of the host


def test_a_refusal_has_the_numbers(proc: Path, groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    settings = Settings(kept_memory=GIB, kept_scratch=GIB, cpus_per_cpu=2)
    left = room([Taken(Need(GIB, 3, scratch=GIB), scratch=GIB // 2)], settings, 3 * GIB, proc=proc, groups=groups)
    left.refuse(Need(2 * GIB, 1, GIB))
    with pytest.raises(
        NoMemory,
        match=r"2049 MiB of memory: 2048 MiB are left on this host \(1 other machines of this user have reserved 1024 MiB",
    ):
        left.refuse(Need(2 * GIB + MIB, 1))
    with pytest.raises(HostError, match="2 cpus: 1 of 4 are left"):
        left.refuse(Need(GIB, 2))
    with pytest.raises(NoSpace, match="a scratch disk of 2048 MiB: 1536 MiB are left"):
        left.refuse(Need(GIB, 1, 2 * GIB))


def test_quotas_of_either_version_bound_the_processors(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    (groups / "site/cpu.max").write_text("150000 100000\n")
    (groups / "site/job/cpu.max").write_text("max 100000\n")
    assert usable_cpus(groups, (("", "/site/job"),)) == 1.5
    (groups / "cpu/x").mkdir(parents=True)
    (groups / "cpu/x/cpu.cfs_quota_us").write_text("200000\n")
    (groups / "cpu/x/cpu.cfs_period_us").write_text("100000\n")
    assert usable_cpus(groups, (("memory", "/x"),)) == 2.0


def test_only_memory_of_its_own_is_touched(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/status").write_text("VmRSS: 999 kB\nRssAnon: 10 kB\nRssFile: 900 kB\nRssShmem: 2 kB\n")
    assert touched(7, tmp_path) == 12 << 10 and touched(8, tmp_path) == 0
