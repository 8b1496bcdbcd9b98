"""Slurm's dialect, from recordings of 22.05.8."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Ending, Job, Surroundings, Verdict
from belljar.batch.slurm.dialect import Slurm
from belljar.errors import NotInAJob
from belljar.model import MIB, Cause, Outcome, OutcomeClass

SCRIPT = b"/var/spool/slurmd/job00027/slurm_script"
LINE = b"#!/opt/belljar/libexec/wrap-slurm --array=no --image=debian12 --time=5\n"
BODY = b"#!/bin/bash\necho hello\n"
OPTIONS = {"array": "no", "image": "debian12", "time": "5"}
LIMITS = (
    b"Limit                     Soft Limit           Hard Limit           Units     \n"
    b"Max core file size        0                    unlimited            bytes     \n"
    b"Max resident set          %s           %s            bytes     \n"
    b"Max processes             96307                96307                processes \n"
)

# `sbatch --comment=vm=debian12 -t 5 job.sh` with DefMemPerCPU=600: what the job got, in order.
RECORDED = {
    "SLURM_SUBMIT_DIR": "/home/alice", "SLURM_SUBMIT_HOST": "login1", "SLURM_JOB_NAME": "job.sh", "SLURM_PRIO_PROCESS": "0",
    "SLURM_CLUSTER_NAME": "lab", "SLURM_JOB_PARTITION": "batch", "SLURM_MEM_PER_CPU": "600", "SLURM_JOB_ID": "27",
    "SLURM_NODELIST": "n1", "SLURM_JOB_CPUS_PER_NODE": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "1",
    "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_JOB_USER": "alice", "SLURM_JOB_UID": "1001", "SLURM_CPUS_ON_NODE": "1",
    "SLURMD_NODENAME": "n1", "SLURM_PROCID": "0", "TMPDIR": "/tmp",
}  # fmt: skip
# A task of `--array=3-4 --mem=100`: the last one has the array's own id.
ARRAY = {
    **RECORDED, "SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_COUNT": "2",
    "SLURM_ARRAY_TASK_MAX": "4", "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_STEP": "1",
}  # fmt: skip
# `sbatch --mem-per-cpu=333` from inside task 5 of an array that had --mem=777: the job inherits what is not its own.
NESTED = {
    **RECORDED, "SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "18", "SLURM_ARRAY_TASK_ID": "5", "SLURM_MEM_PER_NODE": "777",
    "SLURM_MEM_PER_CPU": "333", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip


REFERENCE = f"docker://registry.example.org/team/tool@sha256:{'5' * 64}"


def surroundings(
    env: Mapping[str, str] = RECORDED,
    options: Mapping[str, str] = OPTIONS,
    script: bytes = LINE + BODY,
    args: tuple[bytes, ...] = (),
    rss: bytes = b"629145600",
) -> Surroundings:
    files = {SCRIPT: script, b"/proc/self/limits": LIMITS % (rss, rss)}

    def read(path: bytes) -> bytes:
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    pairs = tuple((name.encode(), value.encode()) for name, value in env.items())
    return Surroundings((SCRIPT, *args), pairs, b"/home/alice", 1001, 1001, (), options, lambda: b"", read)


def outcome(klass: OutcomeClass, reason: str = "the guest's agent did not answer", **more: object) -> Outcome:
    return Outcome("0123456789ab", Cause.BOOT_FAILED, klass, reason=reason, **more)  # type: ignore[arg-type]


def commands(ending: Ending) -> list[tuple[str, ...]]:
    return list(ending.commands)


# -- reading -------------------------------------------------------------------------------------------------------------


def test_a_recorded_job() -> None:
    job = Slurm().read(surroundings(args=(b"a b", b"c'd")))
    assert job == Job(
        system="slurm", id="27", name="job.sh", queue="batch", image="debian12", checkpoint="",
        native=Command(b"/bin/bash", (b"/bin/bash", SCRIPT, b"a b", b"c'd")),
        inside=Command(SCRIPT, (SCRIPT, b"a b", b"c'd")), script=SCRIPT, script_skips_line=True, cpus=1, memory=600 * MIB,
        wall=300.0, grace=28.0, signals_reach_all=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (b"#!/usr/bin/env python3 -u\n", (b"/usr/bin/env", b"python3 -u")),
        (b"#! /bin/sh\n", (b"/bin/sh",)),
        (b"#!/bin/sh -e  \n", (b"/bin/sh", b"-e")),
        (b"#!\t/bin/sh", (b"/bin/sh",)),
    ],
)
def test_without_a_machine_the_users_own_interpreter_runs_it(second: bytes, words: tuple[bytes, ...]) -> None:
    job = Slurm().read(surroundings(script=LINE + second))
    assert job.native == Command(words[0], (*words, SCRIPT))


@pytest.mark.parametrize("second", [b"", b"echo no interpreter\n", b"#!\n", b"#!   \n"])
def test_a_script_without_an_interpreter_is_executed_as_it_is(second: bytes) -> None:
    assert Slurm().read(surroundings(script=LINE + second)).native == Command(SCRIPT, (SCRIPT,))


def test_a_script_that_was_not_redirected_keeps_its_first_line() -> None:
    job = Slurm().read(surroundings(options={}, script=BODY))
    assert (job.script_skips_line, job.native, job.image) == (False, Command(SCRIPT, (SCRIPT,)), "")


def test_options_given_by_hand_take_no_line_from_a_script_that_has_none_of_ours() -> None:
    assert not Slurm().read(surroundings(script=BODY)).script_skips_line


def test_a_task_of_an_array_is_addressed_as_such() -> None:
    job = Slurm().read(surroundings(ARRAY, {**OPTIONS, "array": "yes"}))
    assert (job.id, job.aliases) == ("7_4", ("7",))


def test_a_job_submitted_from_inside_another_one_is_not_taken_for_it() -> None:
    job = Slurm().read(surroundings(NESTED, rss=b"349175808"))
    assert (job.id, job.aliases, job.memory) == ("19", (), 333 * MIB)


@pytest.mark.parametrize(
    ("env", "memory"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, 1000),
        ({"SLURM_MEM_PER_CPU": "300", "SLURM_CPUS_ON_NODE": "2"}, 600),
        ({"SLURM_MEM_PER_NODE": "777", "SLURM_MEM_PER_CPU": "333"}, 333),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "many"}, None),
    ],
)
def test_memory_from_the_variables_where_no_limit_was_set(env: dict[str, str], memory: int | None) -> None:
    bare = {name: value for name, value in RECORDED.items() if name != "SLURM_MEM_PER_CPU"}
    job = Slurm().read(surroundings({**bare, **env}, rss=b"unlimited"))
    assert job.memory == (memory * MIB if memory else None)


def test_the_limit_slurmstepd_set_counts_more_than_a_variable_the_user_set() -> None:
    job = Slurm().read(surroundings({**RECORDED, "SLURM_MEM_PER_NODE": "99999"}))
    assert job.memory == 600 * MIB


def test_the_end_slurm_tells_counts_more_than_the_limit_at_submission() -> None:
    env = {**RECORDED, "SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1600"}
    assert Slurm().read(surroundings(env)).wall == 600.0


@pytest.mark.parametrize(("options", "wall"), [({}, None), ({"time": "525600"}, 31536000.0)])
def test_an_end_in_a_year_is_no_limit(options: dict[str, str], wall: float | None) -> None:
    """24.11 tells a job without one that it ends 365 days from its start."""
    env = {**RECORDED, "SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": str(1000 + 365 * 86400)}
    assert Slurm().read(surroundings(env, {"image": "x", **options})).wall == wall


def test_no_limit_of_time_and_a_disk() -> None:
    job = Slurm().read(surroundings(options={"array": "no", "image": "x", "disk": "5120"}))
    assert (job.wall, job.disk) == (None, 5120 * MIB)


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "27; id"}, {"SLURM_JOB_ID": "²"}])
def test_no_job(env: dict[str, str]) -> None:
    with pytest.raises(NotInAJob):
        Slurm().read(surroundings(env))


def test_an_unreadable_script_is_not_taken_apart() -> None:
    here = surroundings()
    gone = Surroundings(
        (b"/gone",), here.env, here.cwd, here.uid, here.gid, (), here.options, here.stdin, here.read
    )  # fmt: skip
    assert Slurm().read(gone).native == Command(b"/gone", (b"/gone",))


# -- answering -----------------------------------------------------------------------------------------------------------


def test_a_payloads_end_is_the_jobs() -> None:
    slurm, settings = Slurm(), Settings()
    job = slurm.read(surroundings())
    payload = OutcomeClass.PAYLOAD
    assert slurm.tell(job, Verdict.MIRROR, outcome(payload, exit_code=42), 1, settings) == Ending(42)
    assert slurm.tell(job, Verdict.MIRROR, outcome(payload, signal=11), 1, settings) == Ending(None, 11)
    assert slurm.tell(job, Verdict.MIRROR, outcome(OutcomeClass.CANCELLED), 1, settings) == Ending(None, 15)


def test_a_requeue_keeps_the_users_comment_and_counts_in_it() -> None:
    slurm, settings = Slurm(), Settings(retry_delay=30)
    job = slurm.read(surroundings())
    job = slurm.counted(job, b"vm=debian12 project=x\n")
    assert job.failed_starts == 0
    ending = slurm.tell(job, Verdict.REQUEUE, outcome(OutcomeClass.TRANSIENT), 1, settings)
    note = "Comment=vm=debian12 project=x belljar=1 try 1 of 3: the guest's agent did not answer"
    assert commands(ending) == [
        ("scontrol", "update", "JobId=27", note),
        ("scontrol", "requeue", "27"),
        ("scontrol", "update", "JobId=27", "StartTime=now+30"),
    ]
    assert slurm.counted(job, note.removeprefix("Comment=").encode() + b"\n").failed_starts == 1


def test_the_second_note_replaces_the_first_one_and_waits_longer() -> None:
    slurm, settings = Slurm(), Settings(retry_delay=30)
    job = slurm.read(surroundings())
    job = slurm.counted(job, b"vm=debian12 belljar=1 try 1 of 3: a=b\n")
    ending = slurm.tell(job, Verdict.REQUEUE, outcome(OutcomeClass.TRANSIENT, "other"), 2, settings)
    assert commands(ending)[0][-1] == "Comment=vm=debian12 belljar=2 try 2 of 3: other"
    assert commands(ending)[2][-1] == "StartTime=now+60"


def test_a_job_that_was_tried_often_enough_is_held() -> None:
    slurm, settings = Slurm(), Settings()
    job = slurm.read(surroundings(ARRAY, {**OPTIONS, "array": "yes"}))
    job = slurm.counted(job, b"vm=debian12 belljar=2 try 2 of 3: other")
    ending = slurm.tell(job, Verdict.HOLD, outcome(OutcomeClass.NODE), 3, settings)
    assert commands(ending)[1] == ("scontrol", "requeuehold", "7_4")
    assert commands(ending)[0][2:] == (
        "JobId=7_4",
        "Comment=vm=debian12 belljar=3 try 3 of 3: the guest's agent did not answer",
    )
    assert commands(ending)[2] == ("scontrol", "update", "JobId=7_4", "StartTime=now+5")
    assert ending.otherwise is not None and commands(ending.otherwise) == [("scontrol", "requeuehold", "7_4")]
    assert ending.otherwise.otherwise == Ending(125)


def test_a_job_that_may_not_be_requeued_fails() -> None:
    slurm = Slurm()
    job = slurm.read(surroundings())
    ending = slurm.tell(job, Verdict.REQUEUE, outcome(OutcomeClass.NODE), 1, Settings())
    assert ending.otherwise is not None and commands(ending.otherwise) == [("scontrol", "requeue", "27")]
    assert ending.otherwise.otherwise == Ending(125)


def test_without_a_comment_slurms_own_counter_bounds_the_tries() -> None:
    slurm = Slurm()
    job = slurm.read(surroundings({**RECORDED, "SLURM_RESTART_COUNT": "2"}))
    ending = slurm.tell(job, Verdict.REQUEUE, outcome(OutcomeClass.NODE), 1, Settings(retries=3))
    assert ending.otherwise == Ending(125)


def test_a_refused_job_fails() -> None:
    slurm = Slurm()
    job = slurm.read(surroundings())
    assert slurm.tell(job, Verdict.FAIL, outcome(OutcomeClass.USER), 1, Settings()) == Ending(125)


def test_what_a_guest_said_reaches_scontrol_as_one_line_of_one_argument() -> None:
    slurm = Slurm()
    job = slurm.read(surroundings())
    job = slurm.counted(job, "vm=debian12 a\nb é\n".encode())
    ending = slurm.tell(
        job, Verdict.HOLD, outcome(OutcomeClass.NODE, "x\n Priority=99 \x1b[1m" + "y" * 900), 3, Settings()
    )
    note = commands(ending)[0][-1]
    assert len(note) <= 8 + 400 and note.isascii() and note.isprintable()
    assert note.startswith("Comment=vm=debian12 a?b ? belljar=3 try 3 of 3: x? Priority=99 ?[1m")


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        (b"", 0),
        (b"(null)\n", 0),
        (b"vm=x\n", 0),
        (b"belljar=2", 2),
        (b"notbelljar=2", 0),
        (b"belljar=x", 0),
        (b"belljar=99999", 0),
    ],
)
def test_counting(comment: bytes, count: int) -> None:
    slurm = Slurm()
    assert slurm.counted(slurm.read(surroundings()), comment).failed_starts == count


def test_the_count_is_asked_of_this_job_alone() -> None:
    slurm = Slurm()
    asked = slurm.count(slurm.read(surroundings(ARRAY, {**OPTIONS, "array": "yes"})))
    assert asked == ("squeue", "--noheader", "--states=all", "--jobs=7_4", "--format=%k")


# -- the node ------------------------------------------------------------------------------------------------------------

HEADER = b"JOBID|ARRAY_JOB_ID|ARRAY_TASK_ID|STATE\n"


def test_living_jobs() -> None:
    printed = HEADER + b"12|12|N/A|RUNNING\n15|14|1|COMPLETING\n14|14|3|SUSPENDED\n"
    assert Slurm().living(printed) == {"12", "15", "14_1", "14", "14_3"}
    assert Slurm().living(HEADER) == frozenset()


@pytest.mark.parametrize(
    "printed", [b"", b"12|12|N/A|RUNNING\n", HEADER + b"12|12|N/A", HEADER + b"slurm_load_jobs error", b"\xff\xfe"]
)
def test_what_is_no_list_of_jobs_is_never_read_as_no_jobs(printed: bytes) -> None:
    with pytest.raises(ValueError, match="squeue printed"):
        Slurm().living(printed)


# `scontrol show node`, 22.05.8
NODE = b"""NodeName=n1 Arch=x86_64 CoresPerSocket=1
   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=0.13
   State=%s ThreadsPerCore=1 TmpDisk=100000 Weight=1 Owner=N/A MCS_label=N/A
   CapWatts=n/a
   Reason=%s [root@2026-11-20T12:01:13]
"""


@pytest.mark.parametrize(
    ("state", "reason", "ours"),
    [
        (b"IDLE+DRAIN", b"belljar: 3 node faults in a row", True),
        (b"MIXED+DRAIN", b"belljar: x", True),
        (b"IDLE+DRAIN", b"disk broken, see belljar: x", False),
        (b"IDLE", b"belljar: x", False),
        (b"DOWN*", b"belljar: x", False),
    ],
)
def test_only_a_node_we_closed_is_ours_to_open(state: bytes, reason: bytes, ours: bool) -> None:
    assert Slurm().closed_by_us(NODE % (state, reason)) is ours


def test_closing_a_node() -> None:
    assert Slurm().close_node("n1", "belljar: 3 faults\nin a row") == (
        ("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=belljar: 3 faults?in a row"),
    )
    assert Slurm().open_node("n1") == (("scontrol", "update", "NodeName=n1", "State=RESUME"),)


def test_epilog() -> None:
    assert Slurm().epilog({"SLURM_JOB_ID": "15", "SLURM_JOB_UID": "1001", "SLURM_JOB_USER": "alice"}, ()) == (
        "15",
        "1001",
    )
    with pytest.raises(NotInAJob):
        Slurm().epilog({"SLURM_JOB_ID": "15/../1", "SLURM_JOB_UID": "0"}, ())


def test_an_image_that_the_kernel_has_cut_is_read_from_the_script() -> None:
    line = f"#!/opt/belljar/libexec/wrap-slurm --array=no --time=5 --image={REFERENCE}\n".encode()
    options = {"array": "no", "time": "5", "image": REFERENCE[:60]}
    assert Slurm().read(surroundings(options=options, script=line + BODY)).image == REFERENCE
