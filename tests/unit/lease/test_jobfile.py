"""A pilot's job file: it has the lease's key, so nobody else may have seen it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from belljar.errors import BadSetting
from belljar.host.files import write_whole
from belljar.lease.jobfile import JobFile, read
from belljar.model import dumps, to_json

JOB = JobFile("r-0123456789abcdef0", 1, 2, ("h:8470",), "a" * 64, "b" * 64, 600.0, 60.0, 60.0, 10.0, 30.0)


def write(path: Path, job: JobFile) -> None:
    """As the service does (tests/stories/lease/test_service.py)."""
    write_whole(path, dumps(job) + b"\n", durable=True)


def test_it_is_read_as_it_was_written_and_by_its_owner_alone(tmp_path: Path) -> None:
    os.umask(os.umask(0o022))
    write(tmp_path / "job", JOB)
    assert read(tmp_path / "job") == JOB
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_one_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    write(tmp_path / "job", JOB)
    (tmp_path / "job").chmod(mode)
    with pytest.raises(BadSetting, match="others may read it"):
        read(tmp_path / "job")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_one_of_another_owner_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "job", JOB)
    os.chown(tmp_path / "job", 65534, -1)
    with pytest.raises(BadSetting, match="belongs to uid 65534"):
        read(tmp_path / "job")


def test_a_link_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "job", JOB)
    (tmp_path / "link").symlink_to("job")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "missing", "pipe", "."):
        with pytest.raises(BadSetting):
            read(tmp_path / name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "b" * 10}, {"key": "x" * 64}, {"pin": ""}, {"service": []}, {"deadline": 0}, {"nodes": "two"}, {"lease": None},
        {"lease": "../../etc/passwd"}, {"ports": "some"},
    ],
)  # fmt: skip
def test_one_that_is_not_whole_is_refused_by_what_is_wrong(tmp_path: Path, wrong: dict[str, object]) -> None:
    """Its lease's name becomes a folder's. A key is told to nobody."""
    write(tmp_path / "job", JOB)
    (tmp_path / "job").write_text(json.dumps(to_json(JOB) | wrong))
    with pytest.raises(BadSetting, match=f"{next(iter(wrong))}: ") as error:
        read(tmp_path / "job")
    assert "key" not in wrong or str(wrong["key"]) not in error.value.message


@pytest.mark.parametrize("text", ["", "[]", "{", "x" * 100_000, '{"lease": 1, "lease": 2}'])
def test_what_is_no_job_file_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path / "job", JOB)
    (tmp_path / "job").write_text(text)
    with pytest.raises(BadSetting):
        read(tmp_path / "job")
