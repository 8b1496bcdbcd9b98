"""Jobs as HTCondor's starter starts them, in real machines: what comes back is what came back without them.

The starter is a stand-in (lab/starter.py): belljar was not yet run under a real HTCondor.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from tests.batch.lab.site import Site
from tests.batch.lab.starter import Starter

IMAGE = {"VmImage": "debian12"}
BROKEN = {"qemu": 'binary = "/nowhere/qemu-system-x86_64"'}
LOOK = b"""#!/bin/sh
pwd; id -un; umask; echo "$@"; cat in; grep -c ClusterId "$_CONDOR_JOB_AD"
echo made >out; mkdir deep; echo 1 >deep/er; rm in
echo to stderr >&2
exit 42
"""


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    site = Site("htcondor")
    try:
        made = Starter(site)
        made.install()
        yield made
    finally:
        site.close()


@pytest.fixture(autouse=True)
def settings(starter: Starter) -> Iterator[None]:
    starter.site.configure()
    yield
    assert starter.site.leftovers() == []


def test_a_job_in_a_machine_ends_as_it_does_without(starter: Starter) -> None:
    words = (LOOK, "two words", "$HOME", "'")
    native = starter.run(*words, inputs={"in": b"input\n"}, native=True)
    ended = starter.run(*words, inputs={"in": b"input\n"}, ad=IMAGE)
    assert ended.err == b"to stderr\n" == native.err
    assert (
        (ended.status, ended.code, ended.signal)
        == ("Completed", 42, None)
        == (native.status, native.code, native.signal)
    )
    assert without_names(ended.out) == without_names(native.out)
    assert ended.files["out"] == b"made\n" and ended.files["deep/er"] == b"1\n"
    assert set(ended.files) - {"in"} == set(native.files), "nothing of belljar is left in the sandbox"


def without_names(out: bytes) -> list[bytes]:
    """Each run has a directory of its own."""
    first, *rest = out.splitlines()
    assert first.rpartition(b"/")[2].startswith(b"dir_")
    return rest


def test_a_job_without_an_image_is_untouched(starter: Starter) -> None:
    look = b"#!/bin/sh\ntr '\\0' '\\n' </proc/self/environ | sort; tr '\\0' ' ' </proc/$$/cmdline; set -- /proc/$$/fd/*; echo $#; kill -SEGV $$\n"
    native, ended = starter.run(look, "a b", native=True), starter.run(look, "a b")
    assert (
        (ended.status, ended.code, ended.signal)
        == ("Completed", None, 11)
        == (native.status, native.code, native.signal)
    )
    said = [line for line in names_alike(ended.out) if not line.startswith(b"_CONDOR_WRAPPER_ERROR_FILE")]
    assert said == names_alike(native.out) and ended.err == native.err


def names_alike(out: bytes) -> list[bytes]:
    import re

    return re.sub(rb"dir_[0-9_]+", b"dir", out).splitlines()


@pytest.mark.parametrize("number", [9, 11, 15])
def test_death_by_a_signal_is_death_by_that_signal(starter: Starter, number: int) -> None:
    ended = starter.run(b"#!/bin/sh\nkill -%d $$\n" % number, ad=IMAGE)
    assert (ended.status, ended.code, ended.signal, ended.err) == ("Completed", None, number, b"")


def test_output_is_there_while_the_job_runs_and_term_ends_it_with_grace(starter: Starter) -> None:
    running = starter.start(
        b"#!/bin/sh\ntrap 'echo ended; exit 5' TERM\necho begun\nwhile :; do sleep 0.1; done\n", ad=IMAGE
    )
    running.has_said(b"begun")
    running.soft_kill()
    ended = running.wait()
    assert (ended.code, ended.out) == (5, b"begun\nended\n")


def test_another_kill_signal_reaches_the_job_alone(starter: Starter) -> None:
    script = (
        b"#!/bin/sh\n(trap 'echo no' USR1; echo child; sleep 600; :) &\ntrap 'echo yes; kill $!; exit 6' USR1\nwait\n"
    )
    running = starter.start(script, ad=IMAGE)
    running.has_said(b"child")
    running.soft_kill(signal.SIGUSR1)
    ended = running.wait()
    assert (ended.code, ended.out) == (6, b"child\nyes\n")


def test_after_a_hard_kill_nothing_is_left(starter: Starter) -> None:
    running = starter.start(b"#!/bin/sh\necho begun\nsleep 600\n", ad=IMAGE)
    running.has_said(b"begun")
    running.hard_kill()
    assert running.wait().signal == 9
    starter.site.command("reap", user="bjalice")


def test_a_machine_that_cannot_be_had_sends_the_job_back_to_idle_and_at_last_fails_it(starter: Starter) -> None:
    starter.site.configure("retry_delay = 0.2", **BROKEN)
    for starts in (1, 2):
        ended = starter.run(b"#!/bin/sh\necho ran\n", ad=IMAGE, shadow_starts=starts)
        assert (ended.status, ended.out) == ("Idle", b"") and ended.reason.startswith(f"belljar: try {starts} of 3: ")
    ended = starter.run(b"#!/bin/sh\necho ran\n", ad=IMAGE, shadow_starts=3)
    assert (ended.status, ended.code) == ("Completed", 125), "there is no condor_chirp here that could hold it"
    assert b"condor_chirp" in ended.err or b"qemu" in ended.err.lower()


@pytest.mark.parametrize("image", ["no-such-image", "$(touch /tmp/owned)", "../../etc/passwd", 'a"; b', "x" * 200])
def test_a_wrong_image_is_the_askers_affair(starter: Starter, image: str) -> None:
    ended = starter.run(b"#!/bin/sh\necho ran\n", ad={"VmImage": image})
    assert (ended.status, ended.code, ended.out) == ("Completed", 125, b"")
    assert ended.err.startswith(b"belljar: ") and b"Traceback" not in ended.err


def test_the_hook_holds_what_may_not_start(starter: Starter) -> None:
    starter.site.configure('allow = ["* debian*"]')
    assert starter.prepare({"ClusterId": 1, **IMAGE}) == (0, "")
    assert starter.prepare({"ClusterId": 1}) == (0, "")
    code, why = starter.prepare({"ClusterId": 1, "VmImage": "sl7"})
    assert 1 <= code <= 299 and why.startswith("belljar: image sl7: not allowed for bjalice")


def test_a_directory_on_a_share_is_not_copied(starter: Starter) -> None:
    share_execute(starter)
    ended = starter.run(LOOK, inputs={"in": b"input\n"}, ad=IMAGE)
    assert (ended.code, ended.err) == (42, b"to stderr\n") and "in" not in ended.files, "what it removed is removed"


def share_execute(starter: Starter) -> None:
    """The site's homes are shared anyway; the execute directory is one more."""
    starter.site.configure()
    text = starter.site.config.read_text().replace(':rw"]', f':rw", "{starter.execute}:rw"]', 1)
    starter.site.config.write_text(text)
