"""HTCondor's words: what the starter gives to a job, and what the job answers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.batch.test_htcondor_ads import recorded

from belljar import batch
from belljar.batch import Settings
from belljar.batch.htcondor.ads import parse
from belljar.batch.htcondor.dialect import CLOSED, DIALECT
from belljar.batch.htcondor.rules import prepare
from belljar.batch.job.terms import Command, Ending, Job, Surroundings, Verdict
from belljar.errors import NotInAJob
from belljar.model import GIB, MIB, Cause, Outcome, OutcomeClass

SCRATCH = "/var/lib/condor/execute/dir_4242"
ENV = {
    "_CONDOR_SCRATCH_DIR": SCRATCH, "_CONDOR_JOB_AD": f"{SCRATCH}/.job.ad", "_CONDOR_MACHINE_AD": f"{SCRATCH}/.machine.ad",
    "_CONDOR_WRAPPER_ERROR_FILE": f"{SCRATCH}/.job_wrapper_failure", "_CONDOR_SLOT": "slot1_3", "TMPDIR": SCRATCH,
    "_CONDOR_CHIRP_CONFIG": f"{SCRATCH}/.chirp.config", "OMP_NUM_THREADS": "2", "HOME": "/home/bjalice",
}  # fmt: skip
SETTINGS = Settings()


def surroundings(ad: bytes, machine: bytes | None = None, **changes: Any) -> Surroundings:
    files = {ENV["_CONDOR_JOB_AD"].encode(): ad}
    if machine is not None:
        files[ENV["_CONDOR_MACHINE_AD"].encode()] = machine

    def read(path: bytes) -> bytes:
        if path not in files:
            raise FileNotFoundError(2, "No such file or directory")
        return files[path]

    env: Mapping[str, str] = changes.pop("env", ENV)
    here = Surroundings(
        argv=(f"{SCRATCH}/condor_exec.exe".encode(), b"--seed", b"two words"),
        env=tuple((name.encode(), value.encode()) for name, value in env.items()),
        cwd=SCRATCH.encode(), uid=1001, gid=1001, groups=(), options={}, stdin=bytes, read=read,
    )  # fmt: skip
    return replace(here, **changes)


def job(ad: str = "job.ad", **changes: Any) -> Job:
    return DIALECT.read(surroundings(recorded(ad), recorded("machine.ad"), **changes))


def outcome(**changes: Any) -> Outcome:
    made = Outcome("0123456789ab", Cause.NODE_FAULT, OutcomeClass.NODE, reason='no "space"\nleft\\ on ü')
    return replace(made, **changes)


def tell(asked: Job, verdict: Verdict, tries: int = 1, **changes: Any) -> Ending:
    return DIALECT.tell(asked, verdict, outcome(**changes), tries, SETTINGS)


def test_it_is_found_by_its_name() -> None:
    assert batch.load("htcondor").dialect is DIALECT and DIALECT.name == "htcondor"


# -- what a job finds ----------------------------------------------------------------------------------------------------


def test_a_job_with_file_transfer() -> None:
    read = job()
    assert (read.id, read.image, read.name, read.queue) == ("4711.3", "debian12", "night run", "group_theory")
    assert read.aliases == ("submit.example.org#4711.3#1767225590",)
    assert (read.cpus, read.memory, read.disk) == (2, 2176 * MIB, 20 * GIB), "what the slot has, not what was asked for"
    assert (read.wall, read.grace, read.started_before) == (7200.0, 118.0, 1)
    program = f"{SCRATCH}/condor_exec.exe".encode()
    assert read.native == Command(program, (program, b"--seed", b"two words"))
    assert read.inside.argv == () and read.script == b"", "the same inside; the program comes with the directory"
    assert read.staged.into == () and read.staged.folders == (), "the ads lie in the directory that goes in as a whole"
    assert not read.signals_reach_all, "the starter signals the process alone"


@pytest.mark.parametrize("version", ["23.9", "25.14"])
def test_what_real_servers_write(version: str) -> None:
    read = DIALECT.read(surroundings(recorded(f"job-{version}.ad")))
    assert (read.id, read.image, read.name, read.queue) == ("1.0", "debian12", "night run", "group_theory")
    assert (read.cpus, read.memory, read.disk, read.wall, read.grace) == (2, 2 * GIB, None, 7200.0, 118.0)
    assert read.started_before == 0


SSHD = ("/usr/sbin/sshd", "-i", "-e", "-f", f"{SCRATCH}/.condor_ssh_to_job_1/sshd_config")


def test_the_sshd_of_condor_ssh_to_job_is_no_job_and_its_session_is_in_the_machine() -> None:
    argv = tuple(word.encode() for word in SSHD)
    visitor = job(argv=argv).visitor
    assert visitor is not None
    session = f"ForceCommand='/the site/belljar-shell' {SCRATCH}/.condor_ssh_to_job_1/env.sh htcondor:4711.3"
    assert visitor(Path("/the site")) == Command(argv[0], (*argv, b"-o", session.encode()))
    for other in (argv[:-1], (b"/usr/sbin/sshd", b"-f", b"/home/bjalice/sshd_config"), (b"/bin/sh", *argv[1:])):
        assert job(argv=other).visitor is None


def test_a_job_that_waits_for_its_owner_waits_in_the_machine() -> None:
    ad = recorded("job.ad") + b"InteractiveJob = true\n"
    assert DIALECT.read(surroundings(ad)).inside.argv[:2] == (b"sh", b"-c")


def test_a_job_on_a_shared_file_system() -> None:
    read = DIALECT.read(surroundings(recorded("job-shared.ad"), cwd=b"/home/bjalice/work"))
    assert (read.id, read.cpus, read.memory, read.disk, read.wall) == ("12.0", 1, None, None, None)
    assert read.grace == 598.0 and read.started_before == 0
    assert set(read.staged.into) == {f"{SCRATCH}/.job.ad".encode(), f"{SCRATCH}/.machine.ad".encode()}
    assert read.staged.folders == (SCRATCH.encode(),)
    assert read.image == 'strcat("debian", "12")', "no literal: the rules will refuse it, nobody evaluates it"
    assert read.started_before == 0


def test_the_slot_may_say_nothing() -> None:
    read = DIALECT.read(surroundings(recorded("job.ad")))
    assert (read.cpus, read.memory) == (2, 2048 * MIB)


def test_a_small_request_for_disk_is_the_sandboxs_and_an_own_word_is_the_machines() -> None:
    ad = b"ClusterId = 1\nProcId = 0\nRequestDisk = 1024\n"
    assert DIALECT.read(surroundings(ad)).disk is None
    assert DIALECT.read(surroundings(ad + b"VmDisk = 4096\n")).disk == 4 * GIB


def test_a_job_without_an_image_asks_for_none() -> None:
    ad = recorded("job.ad").replace(b'VmImage = "debian12"\n', b"")
    assert DIALECT.read(surroundings(ad)).image == ""


def test_hostile_words_are_only_words() -> None:
    read = DIALECT.read(surroundings(recorded("hostile.ad")))
    assert (read.id, read.cpus, read.memory, read.name) == ("9.0", None, None, "")
    assert read.image == '../../etc/passwd`id`"; $(id)', "refused by the rules, see the hook below"


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {}}, {"env": {"_CONDOR_JOB_AD": "/nowhere"}}, {"argv": ()},
    ],
)  # fmt: skip
def test_other_surroundings_are_no_job(changes: dict[str, Any]) -> None:
    with pytest.raises(NotInAJob):
        job(**changes)


@pytest.mark.parametrize("ad", [b"", b"ClusterId = 1\n", b'ClusterId = "1"\nProcId = 0\n', b"\0\xff"])
def test_an_ad_without_an_id_is_no_job(ad: bytes) -> None:
    with pytest.raises(NotInAJob, match="ClusterId"):
        DIALECT.read(surroundings(ad))


# -- what it answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "number"), [(0, None), (99, None), (255, None), (None, 9), (None, 11)])
def test_the_jobs_own_end_is_mirrored(code: int | None, number: int | None) -> None:
    assert tell(job(), Verdict.MIRROR, exit_code=code, signal=number) == Ending(code, number)


def test_a_job_that_cannot_be_started_here_goes_back_to_idle() -> None:
    ending = tell(job(), Verdict.REQUEUE, tries=2)
    ((path, text),) = ending.files
    assert path == f"{SCRATCH}/.job_wrapper_failure".encode() and ending.exit_code == 1 and not ending.commands
    assert text == b'belljar: try 2 of 3: no "space"?left\\ on ?\n', "one line: the starter puts it into the job's log"
    assert (ending.delay, ending.opens) == (60.0, SCRATCH.encode())


def test_without_a_file_for_errors_there_is_no_way_back_to_idle() -> None:
    env = {name: value for name, value in ENV.items() if name != "_CONDOR_WRAPPER_ERROR_FILE"}
    assert tell(job(env=env), Verdict.REQUEUE) == Ending(exit_code=125)


def test_a_hold_is_asked_for_in_the_jobs_own_ad_and_else_the_job_fails() -> None:
    ending = tell(job(), Verdict.HOLD, tries=3)
    ((env, where, how, program, act, name, value),) = ending.commands
    assert (env, where, how) == (
        "env",
        f"_CONDOR_SCRATCH_DIR={SCRATCH}",
        f"_CONDOR_CHIRP_CONFIG={SCRATCH}/.chirp.config",
    )
    assert (program, act, name) == ("condor_chirp", "set_job_attr_delayed", "ChirpBelljarHold")
    said = "\"belljar: try 3 of 3: no 'space'?left/ on ?\""
    assert value == f"ifThenElse(NumShadowStarts <= 2, {said}, undefined)", "for this start alone, the ad's second"
    assert ending.exit_code == 125 and ending.otherwise == Ending(exit_code=125)


def test_a_program_that_cannot_be_executed_is_held_as_the_starter_would() -> None:
    unstarted = job("job-shared.ad").native.unstarted
    assert unstarted is not None
    ending = unstarted(OSError(8, "Exec format error"))
    assert ending.exit_code == 126 and "(errno=8: 'Exec format error')" in ending.commands[0][-1]
    assert unstarted(OSError(2, "No such file or directory")).exit_code == 127


def test_what_the_wrapper_alone_is_told_is_not_for_the_job() -> None:
    assert job().redirect == (b"_CONDOR_WRAPPER_ERROR_FILE",)


def test_a_failure_of_the_askers_is_our_exit_code() -> None:
    assert tell(job(), Verdict.FAIL) == Ending(exit_code=125)


# -- which jobs live, and the node ---------------------------------------------------------------------------------------


def test_the_slots_tell_which_jobs_live() -> None:
    assert DIALECT.living(recorded("condor_status.txt")) == {"4711.3", "12.0"}
    assert DIALECT.living(b"slot1@node01 undefined\n") == frozenset()
    assert DIALECT.alive()[0] == "condor_status"


@pytest.mark.parametrize(
    "printed",
    [b"", b"\n", b"Error: communication error\n", b"slot1@node01 4711\n", b"slot1@node01\n", b"slot1@node01 ;id\n"],
)
def test_what_is_no_list_of_slots_is_no_answer(printed: bytes) -> None:
    with pytest.raises(ValueError, match="condor_status"):
        DIALECT.living(printed)


def test_no_counter_is_kept() -> None:
    assert DIALECT.count(job()) == () and DIALECT.counted(job(), b"7") == job()


def test_a_node_is_closed_by_a_word_that_its_slots_publish() -> None:
    make, link = DIALECT.close_node("node01", 'belljar: no "space"\n$(id)')
    assert make[:2] == ("mkdir", "-p") and link == ("ln", "-sfn", "--", "belljar: no 'space'?$(id)", CLOSED)
    assert DIALECT.open_node("node01") == (("rm", "-f", CLOSED),)
    assert DIALECT.closed_by_us(b"belljar: no space\n") and not DIALECT.closed_by_us(b"")


def test_closing_asking_and_opening_agree_with_each_other(tmp_path: Path) -> None:
    """Run for real, in a folder of the test's own: on a node this is the word that its slots publish."""

    def run(argv: tuple[str, ...]) -> bytes:
        words = [word.replace(os.path.dirname(CLOSED), str(tmp_path / "state")) for word in argv]
        return subprocess.run(words, capture_output=True, check=True, timeout=20).stdout

    for _ in range(2):  # closing twice is closing once
        for argv in DIALECT.close_node("node01", 'belljar: no "space" /x\n$(id)'):
            run(argv)
        assert run(DIALECT.why_closed("node01")) == b"belljar: no 'space' /x?$(id)\n"
        assert DIALECT.closed_by_us(run(DIALECT.why_closed("node01")))
    for argv in DIALECT.open_node("node01") * 2:
        run(argv)
    assert not DIALECT.closed_by_us(run(DIALECT.why_closed("node01")))


def test_there_is_no_hook_of_roots() -> None:
    with pytest.raises(NotInAJob):
        DIALECT.epilog({}, ())


# -- before the start ----------------------------------------------------------------------------------------------------

STRICT = replace(SETTINGS, allow=("group:physics debian*", "user:bob *"), max_cpus=4)


def held(ad: bytes, user: str = "alice", settings: Settings = STRICT, groups: tuple[str, ...] = ("physics",)) -> str:
    """The reason, "" where the job may start."""
    printed = prepare(ad, user, groups, settings)
    said = parse(printed)
    assert len(said) == (2 if printed else 0) and (not printed or 1 <= (said.number("HookStatusCode") or 0) <= 299)
    return said.text("HookStatusMessage")


def test_a_job_that_may_start_gets_no_word() -> None:
    assert held(recorded("job.ad")) == "" and held(recorded("job.ad"), "bob", groups=()) == ""
    assert held(b"ClusterId = 1\n") == "" and held(b"") == ""


def test_a_job_that_may_not_is_held_with_a_sentence() -> None:
    assert held(recorded("job.ad"), groups=()).startswith("belljar: image debian12: not allowed for alice")
    assert "at most 4" in held(recorded("job.ad").replace(b"RequestCpus = 2", b"RequestCpus = 5"))
    assert "not a name of an image" in held(recorded("hostile.ad"))
    assert "not a name of an image" in held(recorded("job-shared.ad"))


def test_an_accounting_group_is_a_queue() -> None:
    settings = replace(SETTINGS, allow=("queue:group_theory debian*",), queue_images=("group_other=sl7",))
    assert held(recorded("job.ad"), settings=settings) == ""
    other = b'ClusterId = 1\nAcctGroup = "group_other"\n'
    assert "sl7: not allowed" in held(other, settings=settings)
