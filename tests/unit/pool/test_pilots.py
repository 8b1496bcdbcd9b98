"""Jobs of our own: what each batch system is asked, and how they are found again by their names."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from belljar.errors import BadOption
from belljar.model import GIB, MIB
from belljar.pool import JobState, PilotJob, Pilots, account, pilots_of
from belljar.records import replace

NAME = "belljar-r-0123456789abcdef0-1"
JOB = PilotJob(NAME, ("/opt/bell jar", "pilot", "/jobs/x"), 2, 2, GIB + 1, 3601.0, "alice", "/log/x", "short", "phys")
SLURM, GRID, OPENPBS, TORQUE = (pilots_of(one) for one in ("slurm", "gridengine", "openpbs", "torque"))
# In the form of src/cmds/qstat.c of either.
OF_OPENPBS = """{"timestamp":1763884800,"pbs_version":"23.06.06","pbs_server":"head","Jobs":{
"7.head":{"Job_Name":"NAME","Job_Owner":"svc@head","job_state":"R","queue":"workq","comment":"Job run at Mon Nov 23"},
"8.head":{"Job_Name":"NAME","Job_Owner":"svc@head","job_state":"Q","comment":"Not Running: Insufficient amount of resource: ncpus"},
"6.head":{"Job_Name":"NAME","Job_Owner":"mallory@head","job_state":"R"},
"9.head":{"Job_Name":4711,"Job_Owner":"svc@head","job_state":"R"}}}"""
OF_TORQUE = """<?xml version="1.0"?>
<Data><Job><Job_Id>7.head</Job_Id><Job_Name>NAME</Job_Name><Job_Owner>svc@head</Job_Owner><job_state>R</job_state>\
<comment>a &lt; b</comment></Job><Job><Job_Id>8.head</Job_Id><Job_Name>NAME</Job_Name><Job_Owner>svc@head</Job_Owner><job_state>C</job_state></Job>\
<Job><Job_Id>6.head</Job_Id><Job_Name>NAME</Job_Name><Job_Owner>mallory@head</Job_Owner><job_state>R</job_state></Job>\
<Job><Job_Id>9.head</Job_Id><Job_Name>mine</Job_Name><job_state>R</job_state></Job></Data>
"""
QUEUES = """Queue: workq
    queue_type = Execution
    resources_max.walltime = 24:00:00
    enabled = True

Queue: long
    queue_type = Execution
    resources_default.walltime = 01:00:00
"""


def test_slurm_is_asked_for_nodes_time_and_no_second_run() -> None:
    options = SLURM.submit(replace(JOB, shunned=("n1", "n2")), "x.sh")
    for wanted in (
        f"--job-name={NAME}", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--mem=1025M", "--time=61", "--no-requeue",
        "--partition=short", "--account=phys", "--exclude=n1,n2", "--comment=belljar: for alice",
    ):  # fmt: skip
        assert wanted in options
    plain = SLURM.submit(replace(JOB, queue="", account=""), "x.sh")
    assert not any(one.startswith(("--partition", "--account", "--exclude")) for one in plain)


@pytest.mark.parametrize("client", [SLURM, GRID, OPENPBS, TORQUE])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_pilots_script_is_one_that_a_shell_reads(client: Pilots, nodes: int) -> None:
    script = client.script(replace(JOB, nodes=nodes))
    assert script.startswith(b"#!/bin/sh\n") == (client in (SLURM, GRID)) and shlex.join(JOB.command).encode() in script
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
        f'<job_list state="running"><JB_job_number>7</JB_job_number><JB_name>belljar-r-</JB_name><JB_owner>{account()}</JB_owner>'
        f"<state>r</state><slots>2</slots><full_job_name>{NAME}</full_job_name></job_list>"
    )
    other = entry.replace(NAME, "mine").replace("7", "8")
    theirs = entry.replace(f">{account()}<", ">mallory<").replace("7", "6")
    printed = f"<?xml version='1.0'?><job_info><queue_info>{theirs}{entry}{other}</queue_info></job_info>"
    assert [(one.id, one.name, one.state) for one in GRID.jobs(printed.encode())] == [("7", NAME, JobState.RUNNING)]
    with pytest.raises(ValueError):
        GRID.jobs(printed[:-10].encode())


def test_openpbs_and_torque_are_asked_for_one_chunk_on_each_node() -> None:
    words = " ".join(OPENPBS.submit(JOB, "x.sh"))
    assert "-l select=2:ncpus=2:mem=1025mb -l place=scatter -l walltime=3601 -r n -j oe -o /log/x" in words
    assert f"-N {NAME}" in words and "-v BELLJAR_OWNER=alice -q short -A phys x.sh" in words
    words = " ".join(TORQUE.submit(replace(JOB, owner="al ice,B=c"), "x.sh"))
    assert "-l nodes=2:ppn=2 -l mem=2050mb -l walltime=3601" in words and "-v BELLJAR_OWNER=al_ice_B_c " in words
    assert b'pbsdsh" -- /usr/bin/env "PATH=$PATH" \'/opt/bell jar\' pilot' in OPENPBS.script(JOB)
    assert b'pbsdsh" -u /usr/bin/env "PATH=$PATH" \'/opt/bell jar\' pilot' in TORQUE.script(JOB)
    assert OPENPBS.submitted(b"7.head\n") == "7.head" and OPENPBS.cancel("7.head") == ("qdel", "7.head")
    assert TORQUE.extend("7.head", 3600.2) == ("qalter", "-l", "walltime=3601", "7.head")


def test_pbs_jobs_are_found_by_name() -> None:
    printed = json.dumps(json.loads(OF_OPENPBS), indent=4).replace("NAME", NAME).replace("svc", account())
    found = OPENPBS.jobs(printed.replace(": ", ":").encode())
    assert [(one.id, one.state) for one in found] == [("7.head", JobState.RUNNING), ("8.head", JobState.WAITING)]
    assert "Insufficient" in found[1].reason
    found = TORQUE.jobs(OF_TORQUE.replace("NAME", NAME).replace("svc", account()).encode())
    assert [(one.id, one.state) for one in found] == [("7.head", JobState.RUNNING), ("8.head", JobState.ENDED)]
    assert found[0].reason == "a < b" and TORQUE.jobs(b"") == ()
    for client, printed in ((OPENPBS, b""), (OPENPBS, b"{}"), (TORQUE, b"pbs_iff: cannot\n"), (TORQUE, b"<Data><Job>")):
        with pytest.raises(ValueError):
            client.jobs(printed)


def test_what_a_queue_allows_is_read_in_seconds() -> None:
    partitions = b"PartitionName=a Default=YES DefaultTime=NONE MaxTime=1-01:00:00\nPartitionName=b Default=NO MaxTime=UNLIMITED\n"
    assert [SLURM.longest(partitions, name) for name in ("", "a", "b", "a,b", "c")] == [
        90000.0,
        90000.0,
        None,
        None,
        None,
    ]
    queues = (
        b"qname                 all.q\nslots 4\nh_rt                  1:0:0\n\nqname  slow.q\nh_rt   INFINITY,[n1=60]\n"
    )
    assert [GRID.longest(queues, name) for name in ("", "all.q", "slow.q", "x")] == [None, 3600.0, None, None]
    for client in (OPENPBS, TORQUE):
        assert [client.longest(QUEUES.encode(), name) for name in ("workq", "long", "", "x")] == [
            86400.0,
            None,
            None,
            None,
        ]
        assert client.longest(QUEUES.partition("Queue: long")[0].encode(), "") == 86400.0
    assert all(client.longest(b"", "a") is None for client in (SLURM, GRID, OPENPBS, TORQUE))


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
