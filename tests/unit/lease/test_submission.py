"""What the batch system is told of a lease: enough to find its job, and nothing by which somebody could speak as its pilot."""

from pathlib import Path

import pytest

from belljar.lease import Lease, Settings, Size, Wanted
from belljar.lease.jobfile import read
from belljar.lease.protocol import lease_key
from belljar.lease.service.jobs import Jobs
from belljar.model import GIB
from belljar.pool import pilots_of

SITE_KEY = b"k" * 32
PRINTED = {"slurm": b"77\n", "gridengine": b"77\n", "openpbs": b"77.head\n", "torque": b"77.head\n"}


@pytest.mark.parametrize("system", PRINTED)
async def test_no_key_is_in_the_submission_and_the_owner_is(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    async def command(argv: tuple[str, ...]) -> bytes:
        asked.append(argv)
        return PRINTED[system]

    settings = Settings(address="head", jobs=tmp_path / "jobs", images=("*",), system=system, environment="belljar")
    lease = Lease("r-0123456789abcdef0", "ada", Wanted("alma", size=Size(2, GIB, GIB), count=2, seconds=600))
    await Jobs(settings, pilots_of(system), SITE_KEY, "ab" * 32, command).submit(lease)
    folder, (job,) = tmp_path / "jobs", [one for one in (tmp_path / "jobs").iterdir() if not one.suffix]
    key = lease_key(SITE_KEY, lease.id).hex()
    assert read(job).key == key and job.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    told = [word for argv in asked for word in argv]
    told += [one.read_text() for one in folder.iterdir() if one != job]
    assert all(secret not in word for word in told for secret in (key, SITE_KEY.hex(), SITE_KEY.decode()))
    assert any("ada" in word for word in told) and any(str(job) in word for word in told)


def test_the_key_of_a_lease_is_gone_with_it_though_its_file_was_cut_off_half_way(tmp_path: Path) -> None:
    settings, old, new = Settings(jobs=tmp_path), f"belljar-r-{'0' * 17}-1", f"belljar-r-{'1' * 17}-1"
    for name in (f".{old}.4711", f".{old}.sh.4711", old, f"{old}.sh", f"{old}.log", new, f"{new}.sh", "somebodys"):
        (tmp_path / name).touch()
    Jobs(settings, pilots_of("slurm"), SITE_KEY, "ab" * 32).sweep({f"r-{'1' * 17}"})
    assert {one.name for one in tmp_path.iterdir()} == {f"{old}.log", new, f"{new}.sh", "somebodys"}
