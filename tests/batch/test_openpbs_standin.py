"""OpenPBS's launch convention with its real hook files and real machines, under a stand-in for pbs_mom."""

from __future__ import annotations

import os
import signal

import pytest
from tests.batch.lab.mom import Asked, is_stopped, until
from tests.batch.pbs_fixtures import LOOK, VM, Pbs

pytestmark = pytest.mark.slow  # our own imitation: `make test-all`


def test_a_job_without_an_image_cannot_tell_that_the_hooks_are_there(openpbs: Pbs) -> None:
    with_hooks = openpbs.run(Asked(script=LOOK, env={"A": "one\ntwo", "B": "c,d"}))
    hook, openpbs.mom.hook = openpbs.mom.hook, None
    try:
        without = openpbs.run(Asked(script=LOOK, env={"A": "one\ntwo", "B": "c,d"}))
    finally:
        openpbs.mom.hook = hook
    assert with_hooks[1].splitlines() == without[1].splitlines() and "-bash|" in without[1]
    assert (with_hooks[0], with_hooks[2]) == (without[0], without[2]) == (0, "")


def test_arguments_pass_unharmed_with_and_without_a_machine(openpbs: Pbs) -> None:
    words = ["a", "b c", 'q"', "$(id)", "-x", "--facts={}", "ü"]
    expected = (0, "".join(f"<{word}>" for word in words), "")
    argv = ("/usr/bin/printf", "<%s>", *words)
    assert openpbs.run(Asked(argv=argv)) == expected
    assert openpbs.run(Asked(argv=argv, resources=VM)) == expected


def test_a_script_runs_in_a_machine_as_it_would_have_outside(openpbs: Pbs) -> None:
    script = 'echo "$PBS_JOBID|$PWD|$0|$(cat "$PBS_NODEFILE")|$(ls -A "$TMPDIR" | wc -l)|$A"; hostname; echo err >&2; exit 42'
    status, out, err = openpbs.run(Asked(script=script, resources=VM, env={"A": "one\ntwo"}))
    first, second, host = out.splitlines()
    ident = f"{openpbs.mom.number}.pbshost"
    assert f"{first}\n{second}" == (
        f"{ident}|{openpbs.site.home('bjalice')}|{openpbs.mom.home}/mom_priv/jobs/{ident}.SC|pbshost|0|one\ntwo"
    )
    assert (status, err) == (42, "err\n") and host != os.uname().nodename
    assert openpbs.leftovers() == [] and not (openpbs.site.top / "notes" / ident).exists()


@pytest.mark.parametrize("resources", [{}, VM], ids=["outside", "machine"])
def test_a_subjob_finds_its_script(openpbs: Pbs, resources: dict[str, str]) -> None:
    ident = f"{90 + len(resources)}[3].pbshost"
    status, out, err = openpbs.run(Asked(script='echo "$0"; exit 3', resources=resources), ident=ident)
    assert (status, out, err) == (3, f"{openpbs.mom.home}/mom_priv/jobs/{ident}.SC\n", "")


@pytest.mark.parametrize("resources", [{}, VM], ids=["outside", "machine"])
def test_a_job_with_a_folder_of_its_own_runs_there(openpbs: Pbs, resources: dict[str, str]) -> None:
    home = openpbs.site.home("bjalice")
    assert openpbs.run(Asked(script="pwd", resources=resources, sandbox=home / "..")) == (0, f"{home.parent}\n", "")


@pytest.mark.parametrize("resources", [{}, VM], ids=["outside", "machine"])
def test_what_a_shell_that_heard_term_leaves_behind_may_end_by_itself(openpbs: Pbs, resources: dict[str, str]) -> None:
    script = "trap 'echo told; sleep 1.5; echo saved; exit 5' TERM; echo ready; for i in $(seq 300); do sleep 0.1; done"
    job = openpbs.start(Asked(script=script, resources=resources))
    until(lambda: "ready" in job.out, 60, "the job runs")
    assert job.delete() == 256 + signal.SIGTERM
    assert job.out == "ready\ntold\nsaved\n" and openpbs.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGUSR1])
def test_death_by_a_signal_is_256_and_the_signal(openpbs: Pbs, number: int) -> None:
    status, _, _ = openpbs.run(Asked(argv=("/bin/sh", "-c", f"kill -{number} $$"), resources=VM))
    assert status == 256 + number


def test_a_deleted_job_hears_term(openpbs: Pbs) -> None:
    job = openpbs.start(
        Asked(argv=("/bin/sh", "-c", "trap 'echo told; exit 5' TERM; sleep 60 & echo ready; wait"), resources=VM)
    )
    until(lambda: "ready" in job.out, 60, "the job runs")
    assert job.delete() == 5 and job.out == "ready\ntold\n"
    assert openpbs.leftovers() == []


def test_a_suspended_job_stands_still(openpbs: Pbs) -> None:
    count = "i=0; while [ $i -lt 600 ]; do echo $i; i=$((i+1)); sleep 0.1; done"
    job = openpbs.start(Asked(argv=("/bin/sh", "-c", count), resources=VM))
    until(lambda: "5\n" in job.out, 60, "the job counts")
    job.suspend()
    until(lambda: is_stopped(job.process.pid), 5, "the wrapper stopped itself")
    before = job.out
    with pytest.raises(AssertionError):
        until(lambda: job.out != before, 1, "the stopped job counts")
    job.resume()
    until(lambda: job.out != before, 5, "the job counts again")
    job.delete()


def test_a_machine_that_cannot_be_had_gives_the_job_back(openpbs: Pbs) -> None:
    openpbs.site.configure("retry_delay = 5", qemu='binary = "/nonexistent/qemu"')
    try:
        first = openpbs.start(Asked(argv=("/bin/echo", "ran"), resources=VM))
        assert first.wait() == 125 and (first.out, first.err) == ("", ""), (
            "what it says now would stay in the job's file"
        )
        assert first.given_back["rerun"] and "Hold_Types" not in first.given_back
        last = openpbs.start(Asked(argv=("/bin/echo", "ran"), resources=VM, runs=3))
        assert last.wait() == 125 and last.given_back["Hold_Types"] == "u"
        assert any("try 3 of 3" in line for line in openpbs.mom.log)
    finally:
        openpbs.site.configure("retry_delay = 5")


def test_an_image_nobody_has_fails_with_a_sentence(openpbs: Pbs) -> None:
    job = openpbs.start(Asked(argv=("/bin/echo", "ran"), resources={**VM, "vm_image": "nosuch"}))
    assert job.wait() == 125 and "nosuch" in job.err and job.given_back == {}
