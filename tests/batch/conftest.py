"""Real batch systems, brought up for the tests by the modules in lab/. Fixtures of one system each are in
SYSTEM_fixtures.py beside this file; here is what they have in common."""

from __future__ import annotations

import pytest
from tests.batch.pbs_fixtures import openpbs, torque
from tests.batch.slurm_fixtures import cluster

__all__ = ["cluster", "openpbs", "torque"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "batch: brings up a real batch system; needs root")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "batch" in item.path.parts and "unit" not in item.path.parts:
            item.add_marker(pytest.mark.batch)
            item.add_marker(pytest.mark.live)
