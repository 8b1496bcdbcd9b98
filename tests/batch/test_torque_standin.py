"""Torque's launch convention with `$job_starter`, prologue and epilogue, and real machines, under a stand-in for pbs_mom."""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.batch.lab.load import stretched
from tests.batch.lab.mom import Asked, until
from tests.batch.pbs_fixtures import LOOK, VM, Pbs

pytestmark = pytest.mark.slow  # our own imitation: `make test-all`
BUILDS = ("line", "exec", "argv")


@pytest.fixture(params=BUILDS)
def built(torque: Pbs, request: pytest.FixtureRequest) -> Iterator[Pbs]:
    """pbs_mom as it is built and configured in three ways."""
    torque.mom.use_argv, torque.mom.with_exec = request.param == "argv", request.param == "exec"
    yield torque
    torque.mom.use_argv = torque.mom.with_exec = False


def natively(pbs: Pbs, asked: Asked) -> tuple[int, str, str]:
    starter, pbs.mom.starter = pbs.mom.starter, None
    try:
        return pbs.run(asked)
    finally:
        pbs.mom.starter = starter


@pytest.mark.parametrize(
    "asked",
    [
        Asked(script=LOOK, env={"A": "one\ntwo", "BASH_FUNC_f%%": "() { echo hi\n}"}),
        Asked(
            script="#!/usr/bin/python3\n" + "import sys; print(sys.argv, repr(sys.stdin.read()))\n", arguments="a 'b c'"
        ),
        Asked(script=LOOK, shell="/bin/dash"),
        Asked(script="print(1)\n", shell="/usr/bin/python3"),
        Asked(script="exit 7"),
        Asked(script="kill -USR1 $$"),
    ],
    ids=["bash", "interpreter", "dash", "python", "exit", "signal"],
)
def test_a_job_without_an_image_cannot_tell_that_the_starter_is_there(built: Pbs, asked: Asked) -> None:
    def clean(result: tuple[int, str, str]) -> tuple[int, str, str]:
        words = (f"{number}.torque" for number in range(built.mom.number + 1))
        status, out, err = result
        for word in sorted(words, key=len, reverse=True):
            out, err = out.replace(word, "ID"), err.replace(word, "ID")
        return status, out, re.sub(r"line 1: +[0-9]+", "line 1: PID", err)

    outside = natively(built, asked)
    inside, native = clean(built.run(asked)), clean(outside)
    assert list(difflib.unified_diff(native[1].splitlines(), inside[1].splitlines(), n=0)) == []
    assert (inside[0], inside[2]) == (native[0], native[2])
    if asked.script == LOOK:
        assert "|" in outside[1] and "SigBlk" in outside[1]


def test_a_task_without_an_image_is_what_it_would_have_been(torque: Pbs) -> None:
    words = ("a b", "n\nl", "", "$(id)", "ü")
    for program in ("printf", "/usr/bin/printf"):
        assert torque.run(Asked(task=(program, "<%s>", *words))) == (0, "".join(f"<{word}>" for word in words), "")


def test_a_script_runs_in_a_machine_as_it_would_have_outside(built: Pbs) -> None:
    asked = Asked(
        script='echo "$PBS_JOBID|$PWD|$0|$(cat "$PBS_NODEFILE")"; hostname; echo err >&2; exit 42', resources=VM
    )
    status, out, err = built.run(asked)
    ident = f"{built.mom.number}.torque"
    first, host = out.splitlines()
    assert first == f"{ident}|{built.site.home('bjalice')}|{built.mom.home}/mom_priv/jobs/{ident}.SC|torque"
    assert (status, err) == (42, "err\n") and host != os.uname().nodename
    assert built.leftovers() == [] and not (built.mom.home / f"aux/{ident}.belljar").exists()


def test_arguments_of_the_script_reach_it(torque: Pbs) -> None:
    asked = Asked(script='printf "<%s>" "$@"', arguments="a 'b c' \"$HOME\"", resources=VM)
    assert torque.run(asked)[:2] == (0, f"<a><b c><{torque.site.home('bjalice')}>")


def test_the_image_can_be_a_variable(torque: Pbs) -> None:
    asked = Asked(script="hostname", resources={"mem": "700mb"}, env={"VM_IMAGE": "debian12"})
    status, out, _ = torque.run(asked)
    assert status == 0 and out.strip() != os.uname().nodename


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_a_signal_is_256_and_the_signal(torque: Pbs, number: int) -> None:
    assert (
        torque.run(Asked(script=f"exec sh -c 'kill -{number} $$'", resources=VM))[0]
        == torque.run(Asked(script=f"exec sh -c 'kill -{number} $$'"))[0]
    )


def test_a_deleted_job_hears_term_and_is_gone_in_time(torque: Pbs) -> None:
    import time

    job = torque.start(Asked(script="trap '' TERM; echo ready; sleep 60", shell="/bin/sh", resources=VM))
    until(lambda: "ready" in job.out, 60, "the job runs")
    began = time.monotonic()
    status = job.delete()
    assert status in (256 + signal.SIGTERM, 256 + signal.SIGKILL) and time.monotonic() - began < stretched(8)
    assert torque.leftovers() == []


@pytest.mark.parametrize("resources", [{}, VM], ids=["outside", "machine"])
def test_what_a_shell_that_heard_term_leaves_behind_may_end_by_itself(torque: Pbs, resources: dict[str, str]) -> None:
    script = "trap 'echo told; sleep 0.4; echo saved; exit 5' TERM; echo ready; for i in $(seq 300); do sleep 0.1; done"
    job = torque.start(Asked(script=script, resources=resources))
    until(lambda: "ready" in job.out, 60, "the job runs")
    assert job.delete() == 256 + signal.SIGTERM and job.out == "ready\ntold\nsaved\n"
    assert torque.leftovers() == []


def test_a_machine_that_cannot_be_had_fails_the_job_where_no_server_counts(torque: Pbs) -> None:
    torque.site.configure("retry_delay = 5", qemu='binary = "/nonexistent/qemu"')
    try:
        status, out, err = torque.run(Asked(script="echo ran", resources=VM))
        assert (status, out) == (125, "") and "no such program" in err
    finally:
        torque.site.configure("retry_delay = 5")


def test_an_image_nobody_has_fails_with_a_sentence(torque: Pbs) -> None:
    status, out, err = torque.run(Asked(script="echo ran", resources={**VM, "vm_image": "nosuch"}))
    assert (status, out) == (125, "") and "nosuch" in err


def test_the_record_of_one_job_is_not_anothers(torque: Pbs) -> None:
    torque.run(Asked(script="true", resources=VM))
    status, out, _ = torque.run(replace(Asked(script="hostname"), resources={"mem": "700mb"}))
    assert (status, out.strip()) == (0, os.uname().nodename)
