"""Jobs of our own: what each batch system is asked, and how they are found again by their names."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from belljar.batch import JobState, PilotJob, Pilots, pilots_of
from belljar.errors import BadOption
from belljar.model import GIB, MIB
from belljar.records import replace

NAME = "belljar-r-0123456789abcdef0-1"
JOB = PilotJob(NAME, ("/opt/bell jar", "pilot", "/jobs/x"), 2, 2, GIB + 1, 3601.0, "alice", "/log/x", "short", "phys")
SLURM, GRID = pilots_of("slurm"), pilots_of("gridengine")


def test_slurm_is_asked_for_nodes_time_and_no_second_run() -> None:
    options = SLURM.submit(replace(JOB, shunned=("n1", "n2")), "x.sh")
    for wanted in (
        f"--job-name={NAME}", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=1025M", "--time=61", "--no-requeue",
        "--partition=short", "--account=phys", "--exclude=n1,n2", "--comment=belljar: for alice",
    ):  # fmt: skip
        assert wanted in options
    plain = SLURM.submit(replace(JOB, queue="", account=""), "x.sh")
    assert not any(one.startswith(("--partition", "--account", "--exclude")) for one in plain)


@pytest.mark.parametrize("client", [SLURM, GRID])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pilots_script_is_one_that_a_shell_reads(client: Pilots, nodes: int) -> None:
    script = client.script(replace(JOB, nodes=nodes))
    assert script.startswith(b"#!/bin/sh\n") and shlex.join(JOB.command).encode() in script
    assert subprocess.run(["sh", "-n"], input=script, check=False).returncode == 0


def test_grid_engine_is_asked_and_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"lease\.environment"):
        GRID.submit(JOB, "x.sh")
    options = GRID.submit(replace(JOB, environment="each", owner="alice b"), "x.sh")
    words = " ".join(options)
    assert (
        f"-N {NAME}" in words
        and "-l h_rt=3601,mem_free=513M -pe each 4 -notify -r n" in words
        and "-ac owner=alice_b" in words
    )


def test_slurms_jobs_are_found_by_name_two_of_one_name_too() -> None:
    printed = (
        f"7|PENDING|2026-11-23T10:00:00|Resources|{NAME}\n8|RUNNING|2026-11-23T09:00:00|None|{NAME}\n"
        "9|RUNNING|N/A|None|somebody|else's\n10|NEW_STATE|N/A|None|belljar-r-0123456789abcdef1-2\n"
    )
    found = SLURM.jobs(printed.encode())
    assert [(one.id, one.state) for one in found] == [
        ("7", JobState.WAITING), ("8", JobState.RUNNING), ("10", JobState.UNKNOWN)
    ]  # fmt: skip
    assert found[0].reason == "Resources" and found[0].expected > 0 and found[1].reason == "" == found[2].reason


@pytest.mark.parametrize("printed", [b"slurm_load_jobs error\n", b"x|y\n", b"7|RUNNING|N/A|None\n"])
def test_what_is_no_list_of_slurms_is_no_empty_list(printed: bytes) -> None:
    with pytest.raises(ValueError):
        SLURM.jobs(printed)


def test_grid_engines_jobs_are_found_by_their_full_names() -> None:
    entry = (
        '<job_list state="running"><JB_job_number>7</JB_job_number><JB_name>belljar-r-</JB_name><JB_owner>svc</JB_owner>'
        f"<state>r</state><slots>2</slots><full_job_name>{NAME}</full_job_name></job_list>"
    )
    other = entry.replace(NAME, "mine").replace("7", "8")
    printed = f"<?xml version='1.0'?><job_info><queue_info>{entry}{other}</queue_info></job_info>"
    assert [(one.id, one.name, one.state) for one in GRID.jobs(printed.encode())] == [("7", NAME, JobState.RUNNING)]
    with pytest.raises(ValueError):
        GRID.jobs(printed[:-10].encode())


def test_memory_is_rounded_up() -> None:
    assert all("--mem=1M" in SLURM.submit(replace(JOB, memory=one), "x.sh") for one in (1, MIB))


def test_a_system_without_pilots_is_named_with_those_that_have_them() -> None:
    with pytest.raises(BadOption, match="lsf") as error:
        pilots_of("lsf")
    assert "slurm" in error.value.hint
    with pytest.raises(BadOption, match="no such batch system"):
        pilots_of("nqs")


def test_a_jobs_limit_is_moved_where_its_system_can() -> None:
    assert SLURM.extend("7", 3601.0) == ("scontrol", "update", "JobId=7", "TimeLimit=61")
    with pytest.raises(ValueError, match="Grid Engine"):
        GRID.extend("7", 3601.0)
