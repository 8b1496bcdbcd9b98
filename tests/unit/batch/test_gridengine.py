"""Grid Engine's dialect against what a real Grid Engine gave its jobs."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
from tests.unit.batch.pbs_recordings import made, recorded

from belljar.batch import Settings
from belljar.batch.gridengine.dialect import DIALECT, memory, notice, seconds
from belljar.batch.gridengine.dialect import native_command as native
from belljar.batch.job.terms import Ending, Job, Verdict
from belljar.errors import NotInAJob
from belljar.model import GIB, MIB, Cause, Outcome, OutcomeClass

CARRIED = (b"BELLJAR_MEMORY", b"BELLJAR_WALL", b"BELLJAR_DISK", b"VM_IMAGE", b"TMPDIR")
SETTINGS = Settings(retries=3, retry_delay=30)


def job_of(name: str) -> Job:
    found = DIALECT.read(recorded("gridengine", name))
    assert isinstance(found, Job)
    return found


def failure(klass: OutcomeClass = OutcomeClass.TRANSIENT, **more: object) -> Outcome:
    return Outcome(id="1", cause=Cause.BOOT_FAILED, klass=klass, reason="no answer, x=1", ended=1_000_000.0, **more)  # type: ignore[arg-type]


# -- what a job is -------------------------------------------------------------------------------------------------------


def test_a_script_with_its_requests() -> None:
    job = job_of("script")
    assert (job.id, job.image, job.queue, job.name) == ("44", "debian12", "all.q", "script")
    assert (job.cpus, job.memory, job.wall, job.disk) == (1, 2 * GIB, 3600.0, None)
    assert job.reruns and job.started_before == 0
    spooled = b"/var/spool/gridengine/execd/bjge/job_scripts/44"
    assert job.script == spooled
    assert job.native.path == spooled and job.native.argv == (spooled, b"a b", b'"q"', b"")
    assert job.staged.into == (b"/var/spool/gridengine/execd/bjge/active_jobs/44.1/pe_hostfile",)
    assert job.staged.folders == (b"/tmp/44.1.all.q",)
    assert set(job.redirect) == {
        b"SGE_STARTER_SHELL_PATH",
        b"SGE_STARTER_SHELL_START_MODE",
        b"SGE_STARTER_USE_LOGIN_SHELL",
    }


def test_a_task_of_an_array_is_addressed_by_both_numbers() -> None:
    job = job_of("task")
    assert job.id == "45.2"


def test_slots_and_the_limit_of_each_slot() -> None:
    job = job_of("parallel")
    assert (job.cpus, job.memory, job.disk) == (2, 4 * GIB, 10 * GIB)
    assert b"a\nb" in dict(recorded("gridengine", "parallel").env).values()


@pytest.mark.parametrize(
    ("name", "path", "argv"),
    [
        ("binary", b"/bin/sh", (b"-sh", b"-c", b"echo a b $HOME ")),
        ("noshell", b"echo", (b"echo", b"a b", b"$HOME")),
        ("posix", b"/bin/bash", (b"-bash", b"/var/spool/gridengine/execd/bjge/job_scripts/49", b"a b")),
        ("stdin", b"/bin/sh", (b"-sh", b"-s", b"a b")),
    ],
)
def test_each_way_to_start_a_job(name: str, path: bytes, argv: tuple[bytes, ...]) -> None:
    job = job_of(name)
    assert (job.native.path, job.native.argv) == (path, argv)
    assert job.native.stdin is None
    assert bool(job.script) is (name in ("posix", "stdin"))


def test_without_the_spool_folder_the_environment_has_to_do() -> None:
    here = recorded("gridengine", "script")

    def unreadable(path: bytes) -> bytes:
        raise PermissionError(13, "Permission denied")

    job = DIALECT.read(replace(here, read=unreadable))
    assert job.native.argv[0] == job.script and job.cpus == 1
    binary = DIALECT.read(replace(recorded("gridengine", "binary"), read=unreadable))
    assert binary.script == b"" and binary.native.argv[1] == b"-c"


def test_what_the_user_says_of_himself_does_no_harm() -> None:
    here = recorded("gridengine", "script")
    hostile = tuple(pair for pair in here.env if pair[0] not in CARRIED)
    hostile += (
        (b"BELLJAR_MEMORY", b"9" * 400),
        (b"BELLJAR_WALL", b"$(id)"),
        (b"BELLJAR_DISK", b"-1"),
        (b"TMPDIR", b"/etc"),
    )
    job = DIALECT.read(replace(here, env=hostile))
    assert (job.memory, job.wall, job.disk, job.image) == (None, None, None, "")
    assert b"/etc" not in job.staged.folders


@pytest.mark.parametrize("missing", [b"JOB_ID", b"SGE_STARTER_SHELL_PATH"])
def test_no_job(missing: bytes) -> None:
    here = recorded("gridengine", "script")
    with pytest.raises(NotInAJob):
        DIALECT.read(replace(here, env=tuple(pair for pair in here.env if pair[0] != missing)))
    with pytest.raises(NotInAJob):
        DIALECT.read(made((), [(b"JOB_ID", b"1; id"), (b"SGE_STARTER_SHELL_PATH", b"/bin/sh")]))


@pytest.mark.parametrize(
    ("text", "size"),
    [("2G", 2 * GIB), ("2g", 2 * 10**9), ("512M", 512 * MIB), ("1.5K", 1536), ("0x10", 16), ("7", 7), ("INFINITY", None),
     ("", None), ("-1", None), ("1GG", None), ("1e9", None), ("0xzz", None), ("9" * 30, None)],
)  # fmt: skip
def test_memory_specifiers(text: str, size: int | None) -> None:
    assert memory(text) == size


@pytest.mark.parametrize(
    ("text", "time"),
    [("60", 60.0), ("1:0:1", 3601.0), ("1::1", 3601.0), (":5:", 300.0), ("INFINITY", None), ("1:2", None)],
)
def test_time_specifiers(text: str, time: float | None) -> None:
    assert seconds(text) == time


def test_a_shell_of_no_login_has_its_plain_name() -> None:
    env = {"SGE_STARTER_SHELL_PATH": b"/bin/csh", "SGE_STARTER_SHELL_START_MODE": b"posix_compliant", "JOB_ID": b"1"}
    found = native((b"/x/job_scripts/1",), {**env, "JOB_SCRIPT": b"/x/job_scripts/1"}, {})
    assert (found.path, found.argv) == (b"/bin/csh", (b"csh", b"/x/job_scripts/1"))


# -- how it is answered --------------------------------------------------------------------------------------------------


def told(verdict: Verdict, outcome: Outcome, *, tries: int = 1, name: str = "script", **changes: object) -> Ending:
    return DIALECT.tell(replace(job_of(name), **changes), verdict, outcome, tries, SETTINGS)  # type: ignore[arg-type]


@pytest.mark.parametrize("code", [0, 1, 99, 100, 137, 255])
def test_the_payloads_own_codes_pass_unchanged(code: int) -> None:
    ending = told(Verdict.MIRROR, Outcome(id="1", cause=Cause.FINISHED, klass=OutcomeClass.PAYLOAD, exit_code=code))
    assert (ending.exit_code, ending.signal, ending.commands, ending.files) == (code, None, (), ())


def test_a_signal_and_an_end_without_words() -> None:
    assert (
        told(Verdict.MIRROR, Outcome(id="1", cause=Cause.FINISHED, klass=OutcomeClass.PAYLOAD, signal=11)).signal == 11
    )
    assert told(Verdict.MIRROR, Outcome(id="1", cause=Cause.CANCELLED, klass=OutcomeClass.CANCELLED)).signal == 9


@pytest.mark.parametrize(("error", "code"), [("not-found", 127), ("not-executable", 126)])
def test_what_cannot_be_started_is_held_as_grid_engine_holds_it(error: str, code: int) -> None:
    """The shepherd's execvlp fails natively: Eqw with the reason, so that no job waiting for this one begins."""
    reason = "the payload could not be started: /no/such: not found in the guest"
    outcome = Outcome(
        id="1", cause=Cause.FINISHED, klass=OutcomeClass.PAYLOAD, exit_code=code, error=error, reason=reason
    )
    ending = told(Verdict.MIRROR, outcome)
    assert ending.exit_code == 100
    assert ending.files[0][1] == b"belljar: " + reason.encode() + b"; "
    shell = replace(outcome, error="")  # a shell that did not find its command has started
    assert told(Verdict.MIRROR, shell) == Ending(exit_code=code)


def test_a_requeue_is_counted_delayed_and_bounded_in_every_case() -> None:
    ending = told(Verdict.REQUEUE, failure())
    assert ending.exit_code == 99 and ending.delay == 0
    count, later = ending.commands
    assert count == ("qalter", "-ac", "belljar_tries=1,belljar_reason=belljar: try 1 of 3: no answer; x;1", "44")
    assert later[:2] == ("qalter", "-a") and later[3] == "44"
    undelayed = ending.otherwise
    assert undelayed is not None and undelayed.commands == (count,) and undelayed.delay == 30
    uncounted = undelayed.otherwise
    assert uncounted is not None and uncounted.exit_code == 99 and uncounted.commands == () and uncounted.delay == 30
    second = told(Verdict.REQUEUE, failure(), tries=2, started_before=1).otherwise
    assert second is not None and second.otherwise is not None and second.otherwise.exit_code == 100


def test_an_arrays_task_does_not_delay_the_others() -> None:
    ending = told(Verdict.REQUEUE, failure(), tries=2, name="task")
    assert [command[:2] for command in ending.commands] == [("qalter", "-ac")]
    assert "belljar_tries_2=2" in ending.commands[0][2] and ending.commands[0][3] == "45"
    assert ending.delay == 60


def test_a_hold_shows_its_reason_in_the_error_state() -> None:
    ending: Ending | None = told(Verdict.HOLD, failure(), tries=3)
    assert ending is not None and ending.exit_code == 100
    assert "belljar_tries=0" in ending.commands[0][2]
    path = b"/var/spool/gridengine/execd/bjge/active_jobs/44.1/error"
    assert ending.files == ((path, b"belljar: try 3 of 3: no answer, x=1; "),)
    plain = ending.otherwise
    assert plain is not None and plain.commands == () and plain.files == ending.files and plain.exit_code == 100
    assert plain.otherwise == Ending(exit_code=100)


def test_a_fault_of_the_users_fails() -> None:
    assert told(Verdict.FAIL, failure(OutcomeClass.USER)) == Ending(exit_code=125)


def test_a_hostile_reason_stays_one_value() -> None:
    outcome = replace(failure(), reason="a,b=c\n$(id)\x1b[31mü" + "x" * 500)
    context = told(Verdict.REQUEUE, outcome).commands[0][2]
    assert (
        context.count(",") == 1
        and context.count("=") == 2
        and len(context) < 260
        and context.isascii()
        and context.isprintable()
    )


# -- counting and asking -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "count"),
    [
        (b"context:                    belljar_tries=2,belljar_reason=x\n", 2),
        (b"context:                    a=1,belljar_tries=1\n", 1),
        (b"context:                    not_belljar_tries=7\n", 0),
        (b"job_name: x\nerror reason 1: belljar_tries=9\n", 0),
        (b"context:                    belljar_tries=99999999999\n", 0),
        (b"Following jobs do not exist: \n44\n", 0),
        (b"", 0),
    ],
)
def test_the_count_is_in_the_jobs_context(printed: bytes, count: int) -> None:
    assert DIALECT.count(job_of("script")) == ("qstat", "-j", "44")
    assert DIALECT.counted(job_of("script"), printed).failed_starts == count


def test_each_task_has_a_count_of_its_own() -> None:
    task: Job = job_of("task")
    assert DIALECT.count(task) == ("qstat", "-j", "45")
    assert DIALECT.counted(task, b"context:   belljar_tries_1=3,belljar_tries_2=1,belljar_tries=7\n").failed_starts == 1


XML = b"""<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/qstat.xsd">
  <queue_info>
    <job_list state="running">
      <JB_job_number>44</JB_job_number>
      <JB_name>&lt;tasks&gt;9&lt;/tasks&gt;</JB_name>
      <slots>1</slots>
    </job_list>
    <job_list state="suspended">
      <JB_job_number>45</JB_job_number>
      <tasks>2</tasks>
    </job_list>
  </queue_info>
  <job_info>
  </job_info>
</job_info>
"""


def test_the_living_are_read_from_a_whole_list_only() -> None:
    assert DIALECT.living(XML) == {"44", "45.2"}
    assert DIALECT.living(b"<?xml version='1.0'?>\n<job_info>\n</job_info>\n") == frozenset()
    for broken in (b"", XML[:-20], b"error: commlib error: can't connect to service\n", XML.replace(b">44<", b"><")):
        with pytest.raises(ValueError):
            DIALECT.living(broken)


def test_a_node_is_closed_with_a_reason_and_opened_only_by_whom_closed_it() -> None:
    first, second = DIALECT.close_node("bjge", "belljar: 3 node faults in a row: no space, $(id) ü")
    assert first == (
        "qconf",
        "-mattr",
        "exechost",
        "complex_values",
        "vm_closed=belljar:3_node_faults_in_a_row:_no_space_id",
        "bjge",
    )
    assert second == ("qmod", "-d", "*@bjge")
    ours = b"hostname              bjge\ncomplex_values        slots=4,vm_closed=belljar:x\nload_values  a=1\n"
    wrapped = b"complex_values        slots=4, \\\n                      vm_closed=belljar:x\nload_values  a=1\n"
    assert DIALECT.closed_by_us(ours) and DIALECT.closed_by_us(wrapped)
    assert not DIALECT.closed_by_us(b"complex_values        NONE\nload_values  vm_closed=belljar:x\n")
    assert not DIALECT.closed_by_us(b"complex_values        vm_closed=admin\n")


@pytest.mark.parametrize(
    ("argv", "job"), [(("44", "0", "bjalice"), ("44", "bjalice")), (("45", "2", "bjalice"), ("45.2", "bjalice"))]
)
def test_the_hooks_job_is_told_by_its_line_not_by_its_environment(argv: tuple[str, ...], job: tuple[str, str]) -> None:
    assert DIALECT.epilog({"JOB_ID": "1", "USER": "root"}, argv) == job


@pytest.mark.parametrize("argv", [(), ("$job_id",), ("4;5", "0", "x")])
def test_a_hook_without_a_job(argv: tuple[str, ...]) -> None:
    with pytest.raises(NotInAJob):
        DIALECT.epilog({"JOB_ID": "1"}, argv)


# -- an announced end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"notify": b"3", "notify_kill_type": b"1", "notify_kill": b"default"}, (signal.SIGUSR2, 3.0)),
        ({"notify": b"60", "notify_kill_type": b"0", "notify_kill": b"XCPU"}, (signal.SIGXCPU, 60.0)),
        ({"notify": b"60", "notify_kill_type": b"0", "notify_kill": b"SIGHUP"}, (signal.SIGHUP, 60.0)),
        ({"notify": b"60", "notify_kill_type": b"0", "notify_kill": b"_DFL"}, None),
        ({"notify": b"60", "notify_kill_type": b"2", "notify_kill": b"none"}, None),
        ({"notify": b"0", "notify_kill_type": b"1", "notify_kill": b"default"}, None),
        ({"notify": b"x"}, None),
        ({}, None),
    ],
)
def test_the_notice_of_a_job_submitted_with_notify(config: dict[str, bytes], wanted: tuple[int, float] | None) -> None:
    assert notice(config) == wanted


def test_a_job_without_notify_has_no_notice() -> None:
    assert job_of("script").notice is None
