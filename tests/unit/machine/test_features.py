"""What a payload is told of its machine: the keys and units of HSF-TN-2016-02."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belljar.machine.extras.features import (
    VARIABLES,
    before_2016,
    features,
    job_id,
    time_left,
    values,
    with_features,
)
from belljar.model import GIB, MIB, Account, MachineSpec, Payload, PlainFile, Request, RunPayload

DAY = 86400.0
NOW = 1_800_000_000.7
PAYLOAD = Payload((b"true",), Account("alice", 1000, 1000, "alice"), env=((b"A", b"1"), (b"JOBFEATURES", b"/mine")))
REQUEST = Request("0123456789ab", MachineSpec("debian12", 4, 8000 * MIB), RunPayload(PAYLOAD), timeout=DAY, created=NOW)


def told(request: Request = REQUEST, hs06: float = 0.0) -> dict[str, str]:
    files = features(*values(request, NOW, hs06))
    return {file.path.decode().removeprefix("/etc/"): (file.data or b"").decode() for file in files}


def test_four_processors_of_2000_mib_for_a_day() -> None:
    assert told(hs06=10.5) == {
        "machinefeatures/total_cpu": "4", "machinefeatures/hs06": "42.0", "machinefeatures/shutdowntime": "1800086400",
        "jobfeatures/allocated_cpu": "4", "jobfeatures/hs06_job": "42.0", "jobfeatures/shutdowntime_job": "1800086400",
        "jobfeatures/grace_secs_job": "10", "jobfeatures/jobstart_secs": "1800000000", "jobfeatures/job_id": "0123456789ab",
        "jobfeatures/wall_limit_secs": "86400", "jobfeatures/cpu_limit_secs": "345600",
        "jobfeatures/max_rss_bytes": "8388608000",
    }  # fmt: skip


def test_what_vac_tells_a_machine_of_four_processors_is_told_byte_for_byte() -> None:
    """Without the newline that Vac puts behind allocated_cpu; with grace_secs_job, which Vac leaves out."""
    machine, job = before_2016(*values(REQUEST, NOW, 10.5))
    assert machine == {
        "total_cpu": "4", "hs06": "42.0", "shutdowntime": "1800086400", "phys_cores": "4", "log_cores": "4", "jobslots": "1",
    }  # fmt: skip
    assert job == {
        "allocated_cpu": "4", "hs06_job": "42.0", "shutdowntime_job": "1800086400", "jobstart_secs": "1800000000",
        "job_id": "0123456789ab", "wall_limit_secs": "86400", "cpu_limit_secs": "345600", "max_rss_bytes": "8388608000",
        "wall_limit_secs_lrms": "86400", "cpu_limit_secs_lrms": "345600", "mem_limit_MB": "8388", "allocated_CPU": "4",
        "cpufactor_lrms": "1.0", "grace_secs_job": "10",
    }  # fmt: skip
    assert not before_2016(*values(replace(REQUEST, timeout=None), NOW))[1].keys() & {
        "wall_limit_secs_lrms",
        "cpu_limit_secs_lrms",
    }


def test_a_machine_has_the_processors_its_guest_has_whatever_its_host_has() -> None:
    values = told(replace(REQUEST, machine=replace(REQUEST.machine, cpus=1)), hs06=10)
    assert (values["machinefeatures/total_cpu"], values["jobfeatures/allocated_cpu"]) == ("1", "1")
    assert (values["machinefeatures/hs06"], values["jobfeatures/hs06_job"]) == ("10.0", "10.0")


def test_what_is_not_known_has_no_file() -> None:
    names = set(told(replace(REQUEST, timeout=None)))
    assert not names & {
        "machinefeatures/shutdowntime", "machinefeatures/hs06", "jobfeatures/wall_limit_secs", "jobfeatures/cpu_limit_secs",
        "jobfeatures/shutdowntime_job", "jobfeatures/hs06_job", "jobfeatures/scratch_limit_bytes",
    }  # fmt: skip
    disk = told(replace(REQUEST, machine=replace(REQUEST.machine, disk=20 * GIB)))
    assert disk["jobfeatures/scratch_limit_bytes"] == str(20 * GIB)


@pytest.mark.parametrize(
    ("timeout", "wall", "age", "left"),
    [
        (None, None, 0, None), (90.9, None, 0, 90), (None, 100.0, 30, 70), (50.0, 100.0, 30, 50), (90.0, 100.0, 30, 70),
        (None, 100.0, 500, 0),
    ],
)  # fmt: skip
def test_the_first_limit_counts(timeout: float | None, wall: float | None, age: float, left: int | None) -> None:
    request = replace(REQUEST, timeout=timeout, wall_limit=wall, created=NOW - age)
    assert time_left(request, NOW) == left


@pytest.mark.parametrize(
    ("requester", "expected"),
    [
        ("cli", "0123456789ab"), ("slurm:4711_3", "4711_3"), ("openpbs:12[3].server", "12[3].server"),
        ("template build", "0123456789ab"), ("lsf:", "0123456789ab"), ("htcondor:1.0\n$(id) ü", "1.0?$(id)??"),
        ("slurm:" + "7" * 900, "7" * 200),
    ],
)  # fmt: skip
def test_the_id_is_the_batch_systems_own_and_plain(requester: str, expected: str) -> None:
    assert job_id(replace(REQUEST, requester=requester)) == expected


def test_the_files_are_roots_and_no_variable_of_the_caller_hides_them() -> None:
    own = PlainFile(b"/etc/mine", b"x")
    payload = with_features(replace(PAYLOAD, files=(own,)), features(*values(REQUEST, NOW)))
    assert payload.files[0] is own
    assert {(file.mode, file.is_users) for file in payload.files[1:]} == {(0o644, False)}
    assert payload.env == ((b"A", b"1"), *VARIABLES)
    assert not any((file.data or b"").endswith(b"\n") for file in payload.files)
