"""A pilot's start: what it forgets of others."""

from __future__ import annotations

import os
import time
from pathlib import Path

from belljar.lease.pilot.start import KEPT, _forget


def test_journals_of_long_ago_are_forgotten_and_no_others(tmp_path: Path) -> None:
    for name, age in (("old", KEPT + 60), ("new", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch()
        os.utime(tmp_path / name, (0, time.time() - age))
    _forget(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["new"]
    _forget(tmp_path / "missing")
