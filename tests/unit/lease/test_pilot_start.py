"""A pilot's start: what it forgets of others, and what it finds that it was granted."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from belljar.lease.pilot import start
from belljar.lease.pilot.start import KEPT, _forget, granted


def test_journals_of_long_ago_are_forgotten_and_no_others(tmp_path: Path) -> None:
    for name, age in (("old", KEPT + 60), ("new", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch()
        os.utime(tmp_path / name, (0, time.time() - age))
    _forget(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["new"]
    _forget(tmp_path / "missing")


def test_what_is_granted_is_the_least_of_what_each_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"SLURM_CPUS_ON_NODE": "1", "SLURM_MEM_PER_NODE": "3", "SLURMD_NODENAME": "n7", "NSLOTS": "0"}
    facts = granted(said, tmp_path)
    assert (facts.host, facts.cpus, facts.memory) == ("n7", 1, 3 << 20)
    assert granted(said, tmp_path / "not/made/yet").disk > 1  # that of the first machine on this node
    assert 1 < facts.disk <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    monkeypatch.setattr(start, "free_bytes", lambda folder: 0)
    assert granted({}, tmp_path).disk == 1  # 0 would say that it did not look
