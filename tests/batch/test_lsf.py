"""Jobs as LSF starts them, in real machines: what comes back is what came back without them.

LSF is a stand-in (lab/sbatchd.py): belljar was not yet run under a real LSF.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.batch.lab.sbatchd import Refused, Sbatchd
from tests.batch.lab.site import Site

pytestmark = pytest.mark.slow  # our own imitation: `make test-all`
IMAGE = "image=debian12"
BROKEN = {"qemu": 'binary = "/nowhere/qemu-system-x86_64"'}
COMMANDS = [
    "echo out; echo err >&2; exit 42",
    'for i in 1 \'two words\' "three $LSB_JOBNAME"; do echo "$i"; done | sort -r; (exit 3)',
    "mkdir -p deep && cd deep; pwd; umask; id -un; echo `echo sub`$(echo stituted) > file; cat file",
    "sleep 0.2 && echo late & echo soon",
    "sh -c 'kill -SEGV $$'",
    "kill -TERM $$",
]
SCRIPT = """#!/bin/bash
#BSUB -a "vm(image=debian12)"
set -u
declare -a words=(one 'two $x' `echo three`)
printf '<%s>' "${words[@]}" "$#"; echo
echo "$0" | sed 's/.*lsbatch//; s/[0-9][0-9]*.shell//'
exit 7
"""


@pytest.fixture(scope="module")
def lsf() -> Iterator[Sbatchd]:
    site = Site("lsf")
    try:
        made = Sbatchd(site)
        made.install()
        yield made
    finally:
        site.close()


@pytest.fixture(autouse=True)
def settings(lsf: Sbatchd) -> Iterator[None]:
    lsf.site.configure()
    yield
    assert lsf.site.leftovers() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_in_a_machine_ends_as_it_does_without(lsf: Sbatchd, command: str) -> None:
    native, ended = lsf.bsub(command, native=True).wait(), lsf.bsub(command, vm=IMAGE).wait()
    assert ended == native


def test_a_script_in_a_machine_ends_as_it_does_without(lsf: Sbatchd) -> None:
    native, ended = lsf.bsub(script=SCRIPT, native=True).wait(), lsf.bsub(script=SCRIPT, vm=IMAGE).wait()
    assert ended == native and ended.code == 7


def test_nothing_of_a_command_is_run_or_expanded_on_the_host(lsf: Sbatchd) -> None:
    command = (
        "cat /proc/sys/kernel/hostname; echo $(cat /proc/sys/kernel/hostname); : ; cat /proc/sys/kernel/hostname | cat"
    )
    ended = lsf.bsub(command, vm=IMAGE).wait()
    names = ended.out.split()
    assert len(names) == 3 and len(set(names)) == 1 and names[0].startswith(b"belljar-"), ended.err


def test_a_job_of_another_profile_never_meets_us(lsf: Sbatchd) -> None:
    look = "tr '\\0' '\\n' </proc/self/environ | sort | grep -v 470; exit 5"
    assert lsf.bsub(look).wait() == lsf.bsub(look, native=True).wait()


def test_bkill_ends_a_job_with_grace(lsf: Sbatchd) -> None:
    command = "trap '' INT; trap 'echo ended; exit 5' TERM; echo begun; while :; do sleep 0.1; done"
    running = lsf.bsub(command, vm=IMAGE)
    running.has_said(b"begun")
    running.bkill(interval=1.0)
    ended = running.wait()
    assert (ended.code, ended.out) == (5, b"begun\nended\n")


def test_a_job_that_ignores_all_is_killed_and_nothing_is_left(lsf: Sbatchd) -> None:
    running = lsf.bsub("trap '' INT TERM; echo begun; while :; do sleep 0.1; done", vm=IMAGE, index=3)
    running.has_said(b"begun")
    running.bkill(interval=0.5)
    assert running.wait().code == 137, "the hook after it cleans up as root"


def test_the_run_limits_signal_reaches_the_job(lsf: Sbatchd) -> None:
    running = lsf.bsub("trap 'echo limit; exit 9' USR2; echo begun; while :; do sleep 0.1; done", vm=IMAGE)
    running.has_said(b"begun")
    running.bkill(signal.SIGUSR2)
    assert running.wait().out == b"begun\nlimit\n"


def test_a_stopped_job_stands_still_and_goes_on(lsf: Sbatchd) -> None:
    assert lsf.profile("vm")["JOB_CONTROLS"] == "SUSPEND[SIGTSTP] RESUME[SIGCONT]"
    running = lsf.bsub("echo begun; n=0; while [ $n -lt 30 ]; do sleep 0.1; n=$((n+1)); done; echo ended", vm=IMAGE)
    running.has_said(b"begun")
    running.bkill(signal.SIGTSTP)
    _, status = os.waitpid(running.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    running.bkill(signal.SIGCONT)
    assert running.wait().out == b"begun\nended\n"


@pytest.mark.parametrize(
    ("vm", "says"),
    [
        ("", "which image"), ("image=sl7", "image sl7: not allowed for bjalice in queue normal"),
        ("image=$(touch /tmp/owned)", "means nothing"), ("image=../../etc/passwd", "not a name of an image"), ("size=1", "means nothing"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_at_submit(lsf: Sbatchd, vm: str, says: str) -> None:
    lsf.site.configure('allow = ["* debian*"]')
    with pytest.raises(Refused, match="belljar: ") as caught:
        lsf.bsub("echo ran", vm=vm)
    assert says in str(caught.value) and "Traceback" not in str(caught.value)


def test_an_image_that_is_not_there_is_the_askers_affair(lsf: Sbatchd) -> None:
    ended = lsf.bsub("echo ran", vm="image=no-such-image").wait()
    assert (ended.code, ended.out) == (125, b"") and ended.err.startswith(b"belljar: ")


def test_a_job_whose_count_cannot_be_kept_is_not_started_for_ever(lsf: Sbatchd) -> None:
    lsf.site.configure("retry_delay = 0.2", **BROKEN)
    ended = lsf.bsub("echo ran", vm=IMAGE).wait()
    assert (ended.code, ended.out) == (125, b""), "neither bpost nor brequeue is here"


def test_uninstalling_leaves_the_sites_own_profile(lsf: Sbatchd) -> None:
    before = (lsf.configdir / "lsb.applications").read_text()
    words = ("--folder", lsf.configdir, "--prefix", lsf.site.top / "site", "--set", f"serverdir={lsf.serverdir}")
    env = {"PATH": f"{lsf.site.top}/bin:/usr/bin:/bin"}
    lsf.site.command("batch", "uninstall", "lsf", *map(str, words), env=env)
    assert "NAME = other" in (lsf.configdir / "lsb.applications").read_text() and lsf.profile("vm") == {}
    assert not (lsf.serverdir / "esub.vm").exists()
    lsf.install()
    assert (lsf.configdir / "lsb.applications").read_text() == before
