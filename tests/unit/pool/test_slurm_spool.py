"""Does slurmd know that a job was taken back? By the file in which it keeps the credentials that it has revoked."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from belljar.pool import Revoked
from belljar.pool.slurm import nodes
from belljar.pool.slurm.nodes import FILE, POOL

NOW = 1_795_411_045.7


def written(folder: Path, *jobs: tuple[int, int], made: int = int(NOW) - 5) -> dict[str, str]:
    """Jobs with the time at which each was revoked, between the head of the file and the steps that follow. *made*: when slurmd was
    first told of them."""
    (folder / "wn01").mkdir()
    (folder / "slurm.conf").write_text(f"ClusterName=x\nslurmdspooldir = {folder}/%n\n")
    rows = b"".join(struct.pack(">IQQQ", job, revoked, made, int(NOW) + 120) for job, revoked in jobs)
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
    assert POOL.revoked("7", NOW, env) is (Revoked.YES if is_off else Revoked.NO)
    assert (POOL.revoked("6", NOW, env), POOL.revoked("9", NOW, env)) == (Revoked.YES, Revoked.NO)


@pytest.mark.parametrize(
    ("made", "revoked", "is_off"),
    [
        (-3, -1, False),  # it was here before, and slurmctld has forgotten that
        (0, -20, True),  # slurmctld's clock is behind
        (-1, 20, True),
        (0, 0, True),
        (-3, -7200, False),
    ],
)
def test_a_credential_of_an_earlier_start_of_the_job_is_another(
    tmp_path: Path, made: int, revoked: int, is_off: bool
) -> None:
    env = written(tmp_path, (7, int(NOW) + revoked), made=int(NOW) + made)
    assert POOL.revoked("7", NOW, env) is (Revoked.YES if is_off else Revoked.NO)


def test_where_that_cannot_be_told_nothing_is_said(tmp_path: Path) -> None:
    env = written(tmp_path, (7, int(NOW)))
    for broken in ({}, {**env, "SLURMD_NODENAME": "wn02"}, {**env, "SLURM_CONF": "/nowhere"}):
        assert POOL.revoked("7", NOW, broken) is Revoked.CANNOT_TELL
    assert POOL.revoked("7.1", NOW, env) is Revoked.CANNOT_TELL and POOL.revoked(str(1 << 40), NOW, env) is Revoked.NO
    file = tmp_path / "wn01" / FILE
    for content in (file.read_bytes()[:20], b"\x2e\x00" + file.read_bytes(), b"\xff"):
        file.write_bytes(content)
        assert POOL.revoked("7", NOW, env) is Revoked.CANNOT_TELL


@pytest.mark.parametrize("version", [42, 43, 44, 45])
def test_later_releases_write_more_of_a_job(tmp_path: Path, version: int) -> None:
    env = written(tmp_path)
    batch, none = 0xFFFFFFFB, 0xFFFFFFFE
    times = (int(NOW), int(NOW) + 120, int(NOW) + 120)

    def packed(job: int, revoked: int) -> bytes:
        if version < 44:
            return struct.pack(">IQQQ", job, revoked, *times[:2])
        return struct.pack(f">QIIIQ{'Q' * (version - 42)}", 1 << 60, job, batch, none, revoked, *times[: version - 42])

    steps = b"".join(struct.pack(">QIIIQQ", 1 << 60, job, batch, none, *times[:2]) for job in (7, 8))
    rows = packed(7, int(NOW) + 1) + packed(8, 0)
    file = struct.pack(">HI", version << 8, 2) + rows + struct.pack(">I", 2) + steps
    (tmp_path / "wn01" / FILE).write_bytes(file)
    assert [POOL.revoked(job, NOW, env) for job in ("7", "8", "9")] == [Revoked.YES, Revoked.NO, Revoked.NO]


def test_before_slurmd_has_revoked_its_first_credential_there_is_no_file(tmp_path: Path) -> None:
    env = written(tmp_path)
    (tmp_path / "wn01" / FILE).unlink()
    assert POOL.revoked("7", NOW, env) is Revoked.NO


def test_where_another_file_may_name_the_folder_that_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = written(tmp_path, (7, int(NOW)))
    monkeypatch.setattr(nodes, "USUAL", bytes(tmp_path / "wn01"))  # of a slurmd that was here before
    (tmp_path / "slurm.conf").write_text("ClusterName=x\n")
    assert POOL.revoked("8", NOW, env) is Revoked.NO
    (tmp_path / "slurm.conf").write_text("ClusterName=x\ninclude nodes.conf\n")
    assert POOL.revoked("8", NOW, env) is Revoked.CANNOT_TELL
