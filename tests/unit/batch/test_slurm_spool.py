"""Does slurmd know that a job was taken back? By the file in which it keeps the credentials that it has revoked."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from belljar.batch.slurm.client import CLIENT
from belljar.batch.slurm.spool import FILE

NOW = 1_795_411_045.7


def written(folder: Path, *jobs: tuple[int, int]) -> dict[str, str]:
    """Jobs with the time at which each was revoked, between the head of the file and the steps that follow."""
    (folder / "wn01").mkdir()
    (folder / "slurm.conf").write_text(f"ClusterName=x\nslurmdspooldir = {folder}/%n\n")
    rows = b"".join(struct.pack(">IQQQ", job, revoked, int(NOW) - 5, int(NOW) + 120) for job, revoked in jobs)
    steps = b"".join(struct.pack(">IIIQQ", job, 0xFFFFFFFB, 0xFFFFFFFE, int(NOW), int(NOW)) for job, _ in jobs)
    (folder / "wn01" / FILE).write_bytes(struct.pack(">I", len(jobs)) + rows + struct.pack(">I", len(jobs)) + steps)
    return {"SLURM_CONF": str(folder / "slurm.conf"), "SLURMD_NODENAME": "wn01"}


@pytest.mark.parametrize(
    ("revoked", "is_off"),
    [
        (0, False),
        (int(NOW), True),
        (int(NOW) + 3, True),
        (int(NOW) - 60, False),
    ],  # not yet; now; when it was here before
)
def test_a_job_is_off_its_node_when_slurmd_has_revoked_its_credential(
    tmp_path: Path, revoked: int, is_off: bool
) -> None:
    env = written(tmp_path, (6, int(NOW) + 1), (7, revoked), (8, int(NOW) + 1))
    assert CLIENT.is_off("7", NOW, env) is is_off
    assert CLIENT.is_off("6", NOW, env) and not CLIENT.is_off("9", NOW, env)


def test_where_that_cannot_be_told_it_is_not_off(tmp_path: Path) -> None:
    env = written(tmp_path, (7, int(NOW)))
    for broken in ({}, {**env, "SLURMD_NODENAME": "wn02"}, {**env, "SLURM_CONF": "/nowhere"}):
        assert not CLIENT.is_off("7", NOW, broken)
    assert not CLIENT.is_off("7_1", NOW, env) and not CLIENT.is_off(str(1 << 40), NOW, env)
