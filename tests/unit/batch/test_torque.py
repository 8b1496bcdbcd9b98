"""Torque: what a job's surroundings mean, and how a job is answered. The surroundings follow pbs_mom's source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.batch.pbs_recordings import FOLDER, made, recorded

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Ending, Job, Verdict
from belljar.batch.job.verdict import judge
from belljar.batch.pbs.torque.dialect import AGAIN_STATUS, Torque
from belljar.errors import NotInAJob
from belljar.model import GIB, Cause, Outcome, OutcomeClass

NOTHING = Outcome(
    id="0123456789ab", cause=Cause.BOOT_FAILED, klass=OutcomeClass.TRANSIENT, reason="no answer in 60 s", ended=1000.0
)
SCRIPT = b"/var/spool/torque/mom_priv/jobs/7.srv.SC"
QSTAT = (FOLDER / "torque/qstat.txt").read_bytes()  # `qstat -f`, as 6.1.3 prints it
NODES = b"/var/spool/torque/aux/7.srv"
ENV = [
    (b"PBS_JOBID", b"7.srv"), (b"PBS_ENVIRONMENT", b"PBS_BATCH"), (b"PBS_NODENUM", b"0"), (b"PBS_TASKNUM", b"1"),
    (b"PBS_QUEUE", b"batch"), (b"PBS_NODEFILE", NODES), (b"PATH", b"/usr/local/bin:/bin"),
]  # fmt: skip


def read(
    *argv: bytes, stdin: bytes | None = None, env: list[tuple[bytes, bytes]] | None = None,
    dialect: Torque | None = None, **files: bytes,
) -> Job:  # fmt: skip
    paths = {"record": NODES + b".belljar", "config": b"/var/spool/torque/mom_priv/config"}
    replaced = dict(env or [])
    variables = [(name, replaced.pop(name, value)) for name, value in ENV] + list(replaced.items())
    here = made(argv, variables, stdin=stdin, files={paths[name]: text for name, text in files.items()})
    return (dialect or Torque()).read(here)


# -- what pbs_mom would have started -----------------------------------------------------------------------------------


def test_a_recorded_job() -> None:
    job = Torque().read(recorded("torque", "script"))
    assert job.native == Command(b"/bin/bash", (b"-bash",), b"/var/spool/torque/mom_priv/jobs/4.torque.SC\n")
    assert (job.id, job.aliases, job.name, job.queue) == ("4.torque", ("4",), "STDIN", "batch")
    assert (job.image, job.cpus, job.memory, job.wall, job.disk) == ("debian12", 2, GIB, 600.0, 20 * GIB)


def test_a_recorded_task_of_an_array() -> None:
    job = Torque().read(recorded("torque", "array"))
    assert job.native.stdin == b'/var/spool/torque/mom_priv/jobs/5-1.torque.SC "a b" c\n'
    assert (job.id, job.aliases, job.script) == (
        "5[1].torque", ("5[1]",), b"/var/spool/torque/mom_priv/jobs/5-1.torque.SC",
    )  # fmt: skip
    assert (job.image, job.memory, job.wall) == ("debian12", 512 << 20, None)


def test_the_default_build_names_the_script_on_standard_input() -> None:
    job = read(b"/bin/bash", stdin=SCRIPT + b"\n")
    assert job.native == job.inside == Command(b"/bin/bash", (b"-bash",), SCRIPT + b"\n")
    assert job.script == SCRIPT


@pytest.mark.parametrize("line", [b"exec %s\n", b"%s a 'b c' $(id)\n", b"exec %s -x --\n", b"%s"])
def test_the_line_is_handed_on_as_it_came(line: bytes) -> None:
    job = read(b"/bin/tcsh", stdin=line % SCRIPT)
    assert job.native == Command(b"/bin/tcsh", (b"-tcsh",), line % SCRIPT)
    assert job.script == SCRIPT


def test_a_build_with_the_path_in_argv_has_its_own_standard_input() -> None:
    job = read(b"/usr/bin/python3", SCRIPT)
    assert job.native == Command(b"/usr/bin/python3", (b"-python3", SCRIPT))
    assert job.script == SCRIPT


def test_preexec_stays_where_it_was() -> None:
    assert read(b"/bin/sh", b"/site/pre", SCRIPT).native.argv == (b"-sh", b"/site/pre", SCRIPT)


def test_a_build_without_the_pipe_gets_its_script_back() -> None:
    job = read(b"/bin/bash", stdin=b"echo hi\n")
    assert job.native.stdin == b"echo hi\n" and job.script == b""


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (b"$source_login_batch false\n", b"bash"),
        (b"$source_login_batch 0\n", b"bash"),
        (b"$source_login_batch true\n", b"-bash"),
        (b"$source_login_interactive false\n", b"-bash"),
        (b"#$source_login_batch false\n", b"-bash"),
        (b"$source_login_batch\n\xff\n", b"-bash"),
        (b"$source_login_batch false\n$source_login_batch yes\n", b"-bash"),
    ],
)
def test_the_node_says_whether_the_shell_is_a_login_shell(config: bytes, name: bytes) -> None:
    assert read(b"/bin/bash", stdin=SCRIPT + b"\n", config=config).native.argv == (name,)


def test_an_interactive_job_keeps_its_terminal() -> None:
    env = [(b"PBS_ENVIRONMENT", b"PBS_INTERACTIVE")]
    assert read(b"/bin/bash", env=env).native == Command(b"/bin/bash", (b"-bash",))
    job = read(b"/bin/bash", b"-c", b"make it", env=env, config=b"$source_login_interactive no\n")
    assert job.native == Command(b"/bin/bash", (b"bash", b"-c", b"make it"))


@pytest.mark.parametrize("env", [[(b"PBS_TASKNUM", b"2")], [(b"PBS_NODENUM", b"1")]])
def test_a_task_keeps_its_arguments(env: list[tuple[bytes, bytes]]) -> None:
    assert read(b"/bin/hostname", b"-f", b"a b", env=env).native == Command(
        b"/bin/hostname", (b"/bin/hostname", b"-f", b"a b")
    )
    assert read(b"hostname", b"-f", env=env).native == Command(b"/usr/bin/env", (b"env", b"hostname", b"-f"))
    assert read(b"A=b", env=env).native == Command(b"A=b", (b"A=b",)), "env would take it for a variable"


def test_without_a_command_it_is_no_job() -> None:
    with pytest.raises(NotInAJob):
        read()
    with pytest.raises(NotInAJob):
        read(b"/bin/bash", env=[(b"PBS_JOBID", b"x")])


# -- what it asks for --------------------------------------------------------------------------------------------------


def test_the_prologue_tells_what_was_asked_for() -> None:
    record = b"mem=2gb,neednodes=1:ppn=2,nodes=1:ppn=2,walltime=01:00:00\nnight\n"
    job = read(
        b"/bin/bash", SCRIPT, env=[(b"PBS_NUM_PPN", b"2"), (b"VM_IMAGE", b"el9"), (b"VM_DISK", b"20gb")], record=record
    )
    assert (job.image, job.queue, job.cpus, job.memory, job.disk, job.wall) == (
        "el9",
        "night",
        2,
        2 * GIB,
        20 * GIB,
        3600.0,
    )


def test_without_a_prologue_the_variable_tells_the_image() -> None:
    job = read(b"/bin/bash", SCRIPT, env=[(b"VM_IMAGE", b"el9"), (b"PBS_WALLTIME", b"600")])
    assert (job.image, job.queue, job.memory, job.wall) == ("el9", "batch", None, 600.0)
    assert read(b"/bin/bash", SCRIPT).image == ""


def test_memory_is_for_all_nodes_and_each_process() -> None:
    env = [(b"PBS_NUM_PPN", b"4"), (b"PBS_NUM_NODES", b"2")]
    assert read(b"/bin/bash", SCRIPT, env=env, record=b"mem=8gb\nq\n").memory == 4 * GIB
    assert read(b"/bin/bash", SCRIPT, env=env, record=b"pmem=512mb,mem=8gb\nq\n").memory == 2 * GIB
    assert read(b"/bin/bash", SCRIPT, env=env, record=b"mem=x\n").memory is None


@pytest.mark.parametrize("record", [b"", b"\n", b"\xff\xfe", b"=,=,,vm_image", b"vm_image=\n\n\n"])
def test_a_record_that_says_nothing(record: bytes) -> None:
    assert read(b"/bin/bash", SCRIPT, record=record).image == ""


def test_torque_leaves_two_seconds() -> None:
    assert read(b"/bin/bash", SCRIPT).grace == 1.0


# -- how it is answered ------------------------------------------------------------------------------------------------


def told(verdict: Verdict, outcome: Outcome = NOTHING, tries: int = 1) -> Ending:
    return Torque().tell(read(b"/bin/bash", SCRIPT), verdict, outcome, tries, Settings(retry_delay=30.0))


def test_the_payloads_end_is_the_jobs() -> None:
    for code in (0, 1, 99, 125, 255):
        assert told(Verdict.MIRROR, replace(NOTHING, exit_code=code)) == Ending(exit_code=code)
    assert told(Verdict.MIRROR, replace(NOTHING, signal=9)) == Ending(exit_code=None, signal=9)
    assert told(Verdict.FAIL) == Ending(exit_code=125)


def test_again_is_a_death_no_payload_dies_and_a_later_start(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    ending = told(Verdict.REQUEUE, tries=2)
    assert ending.commands == (("qalter", "-a", "197001010017.40", "7.srv"),)
    assert ending.signal == 63 and ending.exit_code is None and AGAIN_STATUS == 256 + 63
    assert ending.otherwise == Ending(exit_code=125), "without the server nobody counts: no storm"


def test_hold_is_the_owners_hold_and_the_same_death() -> None:
    ending = told(Verdict.HOLD, tries=3)
    assert ending.commands == (("qhold", "-h", "u", "7.srv"),) and ending.signal == 63


def test_the_server_counts_starts() -> None:
    job = read(b"/bin/bash", SCRIPT)
    assert Torque().count(job) == ("qstat", "-f", "7.srv")
    assert Torque().counted(job, QSTAT).failed_starts == 0
    assert Torque().counted(job, QSTAT.replace(b"start_count = 1", b"start_count = 3")).failed_starts == 2
    assert Torque().counted(job, b"Job Id: 7.srv\n    Job_Name = start_count = 9x\n").failed_starts == 0
    forged = b"    Variable_List = A=x\n    start_count = 1\n    Rerunable = True\n"
    told = Torque().counted(job, b"Job Id: 7.srv\n" + forged + b"    Rerunable = False\n    start_count = 3\n")
    assert (told.failed_starts, told.reruns) == (2, False)


@pytest.mark.parametrize(
    ("answer", "again"), [(b"Rerunable = True", True), (b"Rerunable = False", False), (b"", False)]
)
def test_a_job_that_had_begun_is_given_back_where_the_server_says_it_may_begin_again(
    answer: bytes, again: bool
) -> None:
    begun = replace(NOTHING, phases={"run": 3.0})
    dialect, job = Torque(), read(b"/bin/bash", SCRIPT)
    job = dialect.counted(job, b"Job Id: 7.srv\n    " + answer + b"\n    start_count = 1\n")
    assert (judge(begun, job, 1, Settings()) is Verdict.REQUEUE) is again
    assert dialect.tell(job, Verdict.REQUEUE, NOTHING, 1, Settings()).signal == 63


def test_a_node_is_closed_and_opened_with_notes() -> None:
    assert Torque().close_node("n1", "belljar: x") == (("pbsnodes", "-o", "-N", "belljar: x", "n1"),)
    assert Torque().open_node("n1") == (("pbsnodes", "-c", "-N", "", "n1"),)
    assert Torque().closed_by_us(b"n1\n     state = offline\n     np = 2\n     note = belljar: x\n")
    assert not Torque().closed_by_us(b"n1\n     state = offline\n     np = 2\n     note = disk\n")


def test_living_jobs() -> None:
    assert Torque().living(b"7.srv\n8[3].srv\n") == {"7.srv", "7", "8[3].srv", "8[3]"}
    with pytest.raises(ValueError):
        Torque().living(b"qselect: cannot connect to server srv\n")
