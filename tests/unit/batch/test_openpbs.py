"""OpenPBS: what a job's surroundings mean, and how a job is answered. The surroundings were recorded from a real one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.unit.batch.pbs_recordings import made, recorded

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Ending, Verdict
from belljar.batch.pbs.common import plain, spooled
from belljar.batch.pbs.openpbs.dialect import OpenPbs
from belljar.batch.pbs.sizes import seconds, size
from belljar.errors import NotInAJob
from belljar.model import GIB, MIB, Cause, Outcome, OutcomeClass

NOTHING = Outcome(
    id="0123456789ab", cause=Cause.BOOT_FAILED, klass=OutcomeClass.TRANSIENT, reason="no answer in 60 s", ended=1000.0
)


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_script_is_run_by_its_login_shell_from_the_line_pbs_mom_wrote() -> None:
    job = OpenPbs().read(recorded("openpbs", "script"))
    line = job.script + b"\n"
    assert job.script.startswith(b"/var/spool/pbs/mom_priv/jobs/") and job.script.endswith(b".SC")
    assert job.native == job.inside == Command(b"/bin/bash", (b"-bash",), line)
    assert (job.image, job.cpus, job.memory, job.disk, job.wall) == ("debian12", 2, GIB, 5 * GIB, 600.0)
    assert (job.name, job.queue, job.started_before, job.grace) == ("script", "workq", 0, 8.0)
    assert job.id == "84.pbshost" and job.aliases == ("84",)
    assert job.staged.into == (b"/var/spool/pbs/aux/84.pbshost",)
    assert job.staged.folders == (b"/var/tmp/pbs.84.pbshost",)


def test_a_program_is_started_with_its_arguments_and_no_line() -> None:
    job = OpenPbs().read(replace(recorded("openpbs", "program"), stdin=lambda: pytest.fail("standard input was read")))
    assert job.native == Command(b"/bin/echo", (b"/bin/echo", b"a b", b"c"))
    assert job.script == b""


def test_a_job_of_an_array_is_known_by_its_own_id() -> None:
    job = OpenPbs().read(recorded("openpbs", "array"))
    assert job.id == "86[1].pbshost" and job.aliases == ("86[1]",)
    assert job.script == b"/var/spool/pbs/mom_priv/jobs/86[1].pbshost.SC", "its line says \\[1\\], for the shell"
    assert job.native.stdin == b"/var/spool/pbs/mom_priv/jobs/86\\[1\\].pbshost.SC\n"


def test_a_job_with_a_folder_of_its_own_is_told_to_go_there_first() -> None:
    line = b"cd /home/b/pbs.7.srv.x8z;/var/spool/pbs/mom_priv/jobs/7.srv.SC\n"
    job = OpenPbs().read(made((b"/bin/bash", b"-bash"), ENV, options={"facts": '{"script":true}'}, stdin=line))
    assert job.script == b"/var/spool/pbs/mom_priv/jobs/7.srv.SC"
    assert job.inside.stdin == line


def test_another_shell_is_a_login_shell_too() -> None:
    assert OpenPbs().read(recorded("openpbs", "dash")).native.argv == (b"-dash",)


def test_resources_of_the_whole_job_count() -> None:
    job = OpenPbs().read(recorded("openpbs", "job_wide"))
    assert (job.image, job.cpus, job.memory, job.wall) == ("debian12", 2, 900 * MIB, None)


ENV = [(b"PBS_JOBID", b"7.srv"), (b"PBS_ENVIRONMENT", b"PBS_BATCH")]


@pytest.mark.parametrize("facts", ["", "x", "[]", "{", "1", '{"a":' * 3000])
def test_what_no_hook_of_ours_started_is_no_job(facts: str) -> None:
    with pytest.raises(NotInAJob):
        OpenPbs().read(made((b"/bin/true", b"true"), ENV, options={"facts": facts} if facts else {}))


@pytest.mark.parametrize("ident", [b"", b"x", b"1;reboot", b"../7", b"7.srv\n", b"--version"])
def test_a_job_without_a_number_is_none(ident: bytes) -> None:
    with pytest.raises(NotInAJob):
        OpenPbs().read(made((b"/bin/true",), [(b"PBS_JOBID", ident)], options={"facts": "{}"}))


def test_facts_of_a_wrong_kind_count_as_not_told() -> None:
    facts = json.dumps({"image": 7, "cpus": "2", "memory": -1, "wall": True, "runs": 1e99, "grace": None})
    job = OpenPbs().read(made((b"/bin/true", b"true"), ENV, options={"facts": facts}))
    assert (job.image, job.cpus, job.memory, job.wall, job.started_before, job.grace) == ("", None, None, None, 0, 8.0)
    assert job.native == Command(b"/bin/true", (b"true",))


def test_a_build_without_the_pipe_gives_the_script_itself_and_gets_it_back() -> None:
    here = made((b"/bin/bash", b"-bash"), ENV, options={"facts": '{"script":true}'}, stdin=b"echo hi\n")
    job = OpenPbs().read(here)
    assert job.native.stdin == b"echo hi\n" and job.script == b""


def test_an_interactive_job_keeps_its_terminal() -> None:
    env = [(b"PBS_JOBID", b"7.srv"), (b"PBS_ENVIRONMENT", b"PBS_INTERACTIVE")]
    job = OpenPbs().read(made((b"/bin/bash", b"-bash"), env, options={"facts": '{"script":true}'}))
    assert job.native == Command(b"/bin/bash", (b"-bash",))


def test_a_kill_delay_of_no_time_leaves_some() -> None:
    job = OpenPbs().read(made((b"/bin/true", b"true"), ENV, options={"facts": '{"grace":2}'}))
    assert job.grace == 1.0


# -- answering ---------------------------------------------------------------------------------------------------------


BEGUN = replace(NOTHING, cause=Cause.HOST_OOM, klass=OutcomeClass.NODE, phases={"boot": 0.1, "run": 3.0})


def told(verdict: Verdict, outcome: Outcome = NOTHING, tries: int = 2, **more: object) -> Ending:
    dialect = OpenPbs()
    facts = {"note": "/run/notes/7.srv/note", "runs": tries, **more}
    job = dialect.read(made((b"/bin/true", b"true"), ENV, options={"facts": json.dumps(facts)}))
    return dialect.tell(job, verdict, outcome, tries, Settings(retry_delay=30.0))


@pytest.mark.parametrize("code", [0, 1, 42, 99, 100, 125, 126, 137, 213, 255])
def test_every_exit_code_is_passed_on(code: int) -> None:
    ending = told(Verdict.MIRROR, replace(NOTHING, klass=OutcomeClass.PAYLOAD, exit_code=code))
    assert ending == Ending(exit_code=code)


def test_a_signal_is_passed_on() -> None:
    assert told(Verdict.MIRROR, replace(NOTHING, exit_code=None, signal=11)) == Ending(exit_code=None, signal=11)


def test_a_job_cancelled_before_it_began_ends_by_term() -> None:
    assert told(Verdict.MIRROR, replace(NOTHING, cause=Cause.CANCELLED, klass=OutcomeClass.CANCELLED)).signal == 15


def test_again_is_said_by_a_note_with_the_time_and_the_reason() -> None:
    ending = told(Verdict.REQUEUE)
    ((path, note),) = ending.files
    assert path == b"/run/notes/7.srv/note"
    assert json.loads(note) == {
        "verdict": "requeue", "delay": 60, "why": "belljar: try 2 of 3: no answer in 60 s", "begun": False,
    }  # fmt: skip
    assert ending.exit_code == 125 and ending.otherwise == Ending(exit_code=125) and not ending.commands


def test_a_subjob_is_kept_for_as_long_as_another_job_would_wait() -> None:
    """With a time to wait for, OpenPBS 23.06 lost the subjob and ended its array without it."""
    dialect = OpenPbs()
    env = [(name, b"7[3].srv" if name == b"PBS_JOBID" else value) for name, value in ENV]
    job = dialect.read(made((b"/bin/true", b"true"), env, options={"facts": json.dumps({"note": "/n/note"})}))
    ending = dialect.tell(job, Verdict.REQUEUE, NOTHING, 2, Settings(retry_delay=30.0))
    assert ending.delay == 60.0 and json.loads(ending.files[0][1])["delay"] == 0
    assert dialect.tell(job, Verdict.HOLD, NOTHING, 3, Settings()).delay == 0.0


def test_hold_is_said_by_a_note_too() -> None:
    ((_, note),) = told(Verdict.HOLD, tries=3).files
    assert json.loads(note)["verdict"] == "hold"


def test_the_note_tells_whether_the_payload_had_begun() -> None:
    ((_, note),) = told(Verdict.REQUEUE, BEGUN).files
    assert json.loads(note)["begun"] is True


def test_a_refused_job_fails_without_a_note() -> None:
    assert told(Verdict.FAIL) == Ending(exit_code=125)


def test_without_a_place_for_a_note_the_job_fails() -> None:
    dialect = OpenPbs()
    job = dialect.read(made((b"/bin/true", b"true"), ENV, options={"facts": "{}"}))
    assert dialect.tell(job, Verdict.REQUEUE, NOTHING, 1, Settings()) == Ending(exit_code=125)


# -- the node ----------------------------------------------------------------------------------------------------------


def test_a_node_is_closed_with_a_reason_and_opened_again() -> None:
    dialect = OpenPbs()
    assert dialect.close_node("n1", "belljar: no \"kvm\" 'here'") == (
        ("pbsnodes", "-o", "-C", "belljar: no ?kvm? ?here?", "n1"),
    )
    assert dialect.open_node("n1") == (("pbsnodes", "-r", "-C", "", "n1"),)


NODE = b"n1\n     Mom = n1\n     state = %s\n     pcpus = 1\n     comment = %s\n     sharing = default_shared\n"


@pytest.mark.parametrize(
    ("state", "comment", "ours"),
    [
        (b"offline", b"belljar: 3 node faults in a row", True),
        (b"job-busy,offline", b"belljar: x", True),
        (b"free", b"belljar: x", False),
        (b"offline", b"new disk", False),
        (b"down", b"belljar: x", False),
    ],
)
def test_only_what_we_closed_is_ours_to_open(state: bytes, comment: bytes, ours: bool) -> None:
    assert OpenPbs().closed_by_us(NODE % (state, comment)) is ours


def test_living_jobs_are_known_by_both_forms_of_their_id() -> None:
    assert OpenPbs().living(b"84.pbshost\n86[1].pbshost\n") == {"84.pbshost", "84", "86[1].pbshost", "86[1]"}
    assert OpenPbs().living(b"") == frozenset()


def test_an_error_is_never_read_as_a_list_of_jobs() -> None:
    with pytest.raises(ValueError):
        OpenPbs().living(b"qselect: cannot connect to server pbshost (errno=15010)\n")


def test_hooks_tell_the_job_and_its_user() -> None:
    assert OpenPbs().epilog({}, ("84.pbshost", "bjalice")) == ("84.pbshost", "bjalice")
    for words in ((), ("84.pbshost",), ("84.pbshost", "-x"), ("../etc", "bjalice"), ("84.pbshost", "a b")):
        with pytest.raises(NotInAJob):
            OpenPbs().epilog({}, words)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1gb", GIB), ("1048576kb", GIB), ("900MB", 900 * MIB), ("100", 100), ("64b", 64), ("2mw", 16 * MIB), ("8w", 64)],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert size(text) == bytes_


@pytest.mark.parametrize("text", ["", "gb", "1xb", "-1gb", "1 gb", "1.5gb", "1" * 20])
def test_what_is_no_size(text: str) -> None:
    assert size(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("90", 90.0), ("1:30", 90.0), ("02:00:00", 7200.0), ("1:00:00:00", 86400.0), ("x", None), ("", None)],
)
def test_times(text: str, number: float | None) -> None:
    assert seconds(text) == number


@pytest.mark.parametrize(
    "line",
    [b"", b"echo hi\n", b"/etc/passwd\n", b"/x/mom_priv/jobs/a.SC\n/y\n", b"/x/mom_priv/jobs/a/b.SC\n", b"cd /a\n"],
)
def test_what_is_no_line_of_pbs_mom(line: bytes) -> None:
    assert spooled(line) is None


def test_a_reason_is_one_short_plain_line() -> None:
    assert plain("a\n\"b\" 'ü'" + "x" * 300).startswith("a??b? ???x") and len(plain("x" * 300)) == 200
