"""The control group of all payloads."""

from __future__ import annotations

from pathlib import Path

import pytest

from belljar.agent.guest import guest
from belljar.agent.guest.guest import Guest


def test_payloads_come_before_the_services_of_the_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest, "CGROUPS", str(tmp_path))
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    (tmp_path / "belljar").mkdir()
    for leaf in ("cgroup.subtree_control", "belljar/cpu.weight", "belljar/memory.max"):
        (tmp_path / leaf).write_text("")
    assert Guest()._make_cgroup() == f"{tmp_path}/belljar"
    assert (tmp_path / "belljar/cpu.weight").read_text() == "1000"
    assert int((tmp_path / "belljar/memory.max").read_text()) > 0
