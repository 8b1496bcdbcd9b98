"""LSF's words: what a job finds, what it answers, and what the esub does with a submission."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar import batch
from belljar.batch import Settings
from belljar.batch.job.policy import Asker
from belljar.batch.job.terms import Ending, Surroundings, Verdict
from belljar.batch.lsf.dialect import DIALECT, Job, memory_of
from belljar.batch.lsf.hooks import Changes, esub, parameters, wants
from belljar.errors import BadOption, NotInAJob, NotPermitted, OverLimit
from belljar.model import GIB, KIB, MIB, Cause, Outcome, OutcomeClass

RECORDINGS = Path(__file__).parents[2] / "recordings/lsf"
FILE = "/home/bjalice/.lsbatch/1767225600.4711"
ENV = {
    "LSB_JOBID": "4711", "LSB_JOBINDEX": "0", "LSB_JOBNAME": "night run", "LSB_QUEUE": "normal", "LSB_JOBFILENAME": FILE,
    "LSB_TRAPSIGS": "trap # 15 10 12 2 1", "LSB_MCPU_HOSTS": "node01 2 node02 4", "LSB_DJOB_NUMPROC": "6",
    "LSB_EFFECTIVE_RSRCREQ": "select[type == any] order[r15s:pg] rusage[mem=2048.00:swp=1] span[hosts=1]",
    "LSB_DJOB_HOSTFILE": "/home/bjalice/.lsbatch/1767225600.4711.hostfile", "LSFUSER": "bjalice",
    "BELLJAR_LSF_IMAGE": "debian12", "BELLJAR_LSF_WALL": "3600",
}  # fmt: skip
SETTINGS = Settings()


def recorded(name: str) -> bytes:
    return (RECORDINGS / name).read_bytes()


def surroundings(file: str = "job-command", text: bytes | None = None, **changes: Any) -> Surroundings:
    content = recorded(file) if text is None else text

    def read(path: bytes) -> bytes:
        if path != FILE.encode():
            raise FileNotFoundError(2, "No such file or directory")
        return content

    env: Mapping[str, str] = {**ENV, **changes.pop("env", {})}
    here = Surroundings(
        argv=(), env=tuple((name.encode(), value.encode()) for name, value in env.items() if value is not None),
        cwd=b"/home/bjalice", uid=1001, gid=1001, groups=(), options={}, stdin=bytes, read=read,
    )  # fmt: skip
    return replace(here, **changes)


def job(*args: Any, **changes: Any) -> Job:
    return DIALECT.read(surroundings(*args, **changes))


def run(read: Job, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The command as it would be run without a machine."""
    command = read.native
    done = subprocess.run(
        [word.decode() for word in command.argv], executable=command.path, capture_output=True, text=True, timeout=20,
        env={"PATH": "/usr/bin:/bin", **(env or {})}, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


# -- what a job finds ----------------------------------------------------------------------------------------------------


def test_a_job_with_a_command() -> None:
    assert batch.load("lsf").dialect is DIALECT and DIALECT.name == "lsf"
    read = job()
    assert (read.id, read.name, read.queue, read.image) == ("4711", "night run", "normal", "debian12")
    assert (read.cpus, read.memory, read.disk, read.wall) == (2, 2048 * MIB, None, 3600), "of the first host"
    assert (read.started_before, read.grace, read.signals_reach_all, read.script) == (0, 8.0, True, b"")
    assert read.staged.into == (f"{FILE}.hostfile".encode(),)
    assert read.native.argv[0] == b"/bin/sh" and read.native.argv[3] == FILE.encode(), "$0 is the job file, as always"


def test_the_command_is_what_the_user_wrote_whatever_it_is() -> None:
    code, out = run(job())
    assert (code, out.splitlines()) == (3, ["1 its 0", "two words its 0"])
    assert job().native.argv[2].startswith(b'$LSB_TRAPSIGS\ncd /tmp && for i in 1 "two words";')


@pytest.mark.parametrize(
    ("command", "code", "out"),
    [
        ("sleep 0.1 && echo late & echo soon", 0, "soon\nlate\n"), ("kill -SEGV $$", -11, ""), ("exit 99", 99, ""),
        ("sh -c 'kill -SEGV $$'", 139, ""), ("echo 'unbalanced \" quote'", 0, 'unbalanced " quote\n'),
        ("{ echo a; echo b; } | wc -l", 0, "2\n"), ("exec echo gone", 0, "gone\n"), ("echo \"exec /x/wrap-lsf; y\"", 0, "exec /x/wrap-lsf; y\n"),
        ("echo 1\nexec /x/wrap-lsf; echo 2", 127, "1\n"),
    ],
)  # fmt: skip
def test_what_belongs_to_the_command_goes_with_it(command: str, code: int, out: str) -> None:
    """LSF's own trailer waits for the background and makes the exit code; it is the same with and without a starter."""
    text = recorded("job-bare").replace(b"echo plain", b"exec /o/wrap-lsf; " + command.encode())
    assert run(job(text=text)) == (code, out)


def test_the_shell_lives_through_what_ends_the_command() -> None:
    text = recorded("job-bare").replace(b"echo plain", b"exec /o/wrap-lsf; kill -TERM $$; sh -c 'kill $$'")
    assert run(job(text=text), {"LSB_TRAPSIGS": ENV["LSB_TRAPSIGS"]}) == (143, "")
    assert run(job(text=text)) == (-15, ""), "as without the trap"


def test_a_script_from_standard_input(tmp_path: Path) -> None:
    read = job("job-script", options={"unit": "GB"}, env={"LSB_EFFECTIVE_RSRCREQ": "rusage[mem=1.5]"})
    assert read.script == f"{FILE}.shell".encode() and read.native.argv[2].startswith(
        b"$LSB_TRAPSIGS\n$LSB_JOBFILENAME.shell\nsaveExit="
    )
    assert read.memory == 3 * GIB // 2
    shell = tmp_path / "file.shell"
    shell.write_text("#!/bin/sh\necho ran; exit 7\n")
    shell.chmod(0o755)
    assert run(read, {"LSB_JOBFILENAME": str(tmp_path / "file")}) == (7, "ran\n")


def test_a_starter_in_front_of_the_file_leaves_the_file_as_the_command() -> None:
    assert run(job("job-bare")) == (0, "plain\n")


def test_a_starter_that_passes_words_is_refused() -> None:
    with pytest.raises(NotInAJob, match="as words of the job starter") as refused:
        job(argv=(b"echo a; echo b",))
    assert "batch install lsf --print" in refused.value.hint


def test_an_array_and_a_restart() -> None:
    read = job(env={"LSB_JOBINDEX": "3", "LSB_RESTART": "Y"})
    assert (read.id, read.started_before) == ("4711[3]", 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"env": {"LSB_JOBID": ""}}, {"env": {"LSB_JOBID": "4711; id"}}, {"env": {"LSB_JOBFILENAME": ""}},
        {"env": {"LSB_JOBFILENAME": "/nowhere"}}, {"text": b""},
        {"text": b"#! /bin/sh\n# LSBATCH: User input\n/o/wrap-lsf \"echo a\"\n"},
    ],
)  # fmt: skip
def test_other_surroundings_are_no_job(changes: dict[str, Any]) -> None:
    with pytest.raises(NotInAJob):
        job(**changes)


@pytest.mark.parametrize(
    ("requirement", "unit", "size"),
    [
        ("rusage[mem=1000]", "MB", 1000 * MIB), ("rusage[mem=2]", "GB", 2 * GIB), ("rusage[mem=2G]", "MB", 2 * GIB),
        ("rusage[mem=1.5GB:swp=3]", "KB", 3 * GIB // 2), ("rusage[swp=3,mem=4]", "MB", 4 * MIB), ("rusage[mem=512KB]", "MB", 512 * KIB),
        ("select[mem>1000]", "MB", None), ("", "MB", None), ("rusage[mem=0]", "MB", None), ("rusage[maxmem=3]", "MB", None),
        ("rusage[mem=x]", "MB", None), ("rusage[mem=999999999999999P]", "MB", 1 << 62), ("rusage[mem=5", "odd", None),
    ],
)  # fmt: skip
def test_memory_of_a_requirement(requirement: str, unit: str, size: int | None) -> None:
    assert memory_of(requirement, unit) == size


def test_a_limit_counts_before_a_reservation() -> None:
    assert job(env={"BELLJAR_LSF_MEMORY": str(GIB), "BELLJAR_LSF_DISK": "x"}).memory == GIB
    assert job(env={"LSB_MCPU_HOSTS": "", "LSB_EFFECTIVE_RSRCREQ": ""}).cpus == 6


# -- what it answers -----------------------------------------------------------------------------------------------------


def tell(asked: Job, verdict: Verdict, tries: int = 1, **changes: Any) -> Ending:
    made = Outcome("0123456789ab", Cause.NODE_FAULT, OutcomeClass.NODE, reason="no space\nleft $(id)")
    return DIALECT.tell(asked, verdict, replace(made, **changes), tries, SETTINGS)


@pytest.mark.parametrize(
    ("code", "number", "expected"),
    [
        (0, None, 0),
        (99, None, 99),
        (231, None, 231),
        (None, 9, 137),
        (None, 15, 143),
        (143, 15, 143),
        (None, None, 143),
    ],
)
def test_the_jobs_own_end_is_told_as_lsfs_shell_tells_it(code: int | None, number: int | None, expected: int) -> None:
    """A wrapper that dies by a signal is "Done successfully" to LSF."""
    assert tell(job(), Verdict.MIRROR, exit_code=code, signal=number) == Ending(expected)


def test_a_job_is_given_back_with_the_reason_in_its_messages() -> None:
    note, requeue = tell(job(env={"LSB_JOBINDEX": "3"}), Verdict.REQUEUE, tries=2).commands
    assert note == ("bpost", "-i", "98", "-d", "belljar: try 2 of 3: no space?left $(id)", "4711[3]")
    assert requeue == ("brequeue", "-r", "4711[3]")


def test_where_brequeue_fails_the_job_does() -> None:
    assert tell(job(), Verdict.REQUEUE, tries=2).otherwise == Ending(exit_code=125)


def test_a_hold_keeps_the_job_in_the_queue() -> None:
    ending = tell(job(), Verdict.HOLD, tries=3)
    assert ending.commands[-1] == ("brequeue", "-H", "-r", "4711") and ending.delay > 0
    assert ending.otherwise == Ending(exit_code=125) == tell(job(), Verdict.FAIL)


def test_the_count_is_read_from_the_messages() -> None:
    assert DIALECT.count(job()) == ("bread", "-i", "98", "4711")
    assert DIALECT.counted(job(), recorded("bread.txt")).failed_starts == 2
    assert DIALECT.counted(job(), b"4711 98 - - -\n").failed_starts == 0


# -- which jobs live, the node, the hook ---------------------------------------------------------------------------------


def test_which_jobs_live() -> None:
    assert DIALECT.living(recorded("bjobs.txt")) == {"4711", "4712[3]", "4714"}
    for printed in (b"", b"LSF is down. Please wait ...\n", b"4711,0,ODD\n", b"4711,0\n", b"4711,$(id),RUN\n"):
        with pytest.raises(ValueError, match="bjobs"):
            DIALECT.living(printed)


def test_a_node_is_closed_with_a_comment_and_opened_only_if_it_is_ours() -> None:
    assert DIALECT.close_node("node01", "belljar: x") == (("badmin", "hclose", "-C", "belljar: x", "node01"),)
    assert DIALECT.open_node("node01")[0][:2] == ("badmin", "hopen") and DIALECT.why_closed("n") == (
        "bhosts",
        "-l",
        "n",
    )
    said = recorded("bhosts.txt")
    assert DIALECT.closed_by_us(said)
    assert not DIALECT.closed_by_us(said.replace(b'"belljar: 3', b'"repair: belljar'))
    assert not DIALECT.closed_by_us(said.replace(b"closed_Adm", b"ok")) and not DIALECT.closed_by_us(b"")


def test_the_hook_knows_job_and_user() -> None:
    assert DIALECT.epilog({**ENV, "LSB_JOBINDEX": "3"}, ()) == ("4711[3]", "bjalice")
    for wrong in ({"LSFUSER": ""}, {"LSFUSER": "a b"}, {"LSB_JOBID": "x"}, {"LSFUSER": "../root\n"}):
        with pytest.raises(NotInAJob):
            DIALECT.epilog({**ENV, **wrong}, ())


# -- at submit -----------------------------------------------------------------------------------------------------------

ALICE = Asker("alice", {"physics"})


def asked(name: str = "parm-command", *words: str, env: Mapping[str, str] | None = None, **settings: Any) -> Changes:
    return esub(words, parameters(recorded(name)), env or {}, ALICE, replace(SETTINGS, **settings))


def test_a_submission_that_asks_for_a_machine() -> None:
    for words in ((), ("image=debian12", "disk=20G"), ("image=debian12,disk=20G",)):
        assert asked("parm-command", *words) == (
            {"LSB_SUB3_APP": "vm"},
            {"BELLJAR_LSF_IMAGE": "debian12", "BELLJAR_LSF_MEMORY": str(GIB), "BELLJAR_LSF_DISK": str(20 * GIB),
             "BELLJAR_LSF_WALL": "3600"},
        )  # fmt: skip


def test_a_command_cannot_forge_another_line() -> None:
    found = parameters(recorded("parm-command"))
    assert (found["LSB_SUB_QUEUE"], found["LSB_SUB_JOB_NAME"]) == ("normal", "night $(id)")


def test_other_submissions_are_left_alone() -> None:
    plain = {"LSB_SUB_QUEUE": "normal", "LSB_SUB_ADDITIONAL": "openmpi"}
    assert esub((), plain, {}, ALICE, SETTINGS) == ({}, {})
    inner = esub((), plain, {"BELLJAR_LSF_IMAGE": "debian12"}, ALICE, SETTINGS)
    assert inner == ({}, {"BELLJAR_LSF_IMAGE": ""}), "a job within a job asks for itself"
    assert asked("parm-bmod") == ({}, {})


def test_a_queue_that_is_an_environment_needs_no_word() -> None:
    plain = {"LSB_SUB_QUEUE": "night", "LSB_SUB_RLIMIT_RUN": "60"}
    changes = esub((), plain, {}, ALICE, replace(SETTINGS, queue_images=("night=sl7",)))
    assert changes == ({}, {"BELLJAR_LSF_WALL": "60"}), "the node knows the image; only the limits are told"


@pytest.mark.parametrize(
    ("words", "settings", "error", "says"),
    [
        (("image=debian12",), {"allow": ("group:chemistry *",)}, NotPermitted, "not allowed for alice in queue normal"),
        (("image=$(id)",), {}, NotPermitted, "not a name of an image"),
        (("image=debian12",), {"max_cpus": 1}, OverLimit, "at most 1"),
        (("image=debian12",), {"max_memory": 512 * MIB}, OverLimit, "at most 512"),
        (("image=debian12", "disk=1T"), {"max_disk": GIB}, OverLimit, "at most 1024"),
        (("disk=1G",), {}, BadOption, "which image"), (("imgae=x",), {}, BadOption, "means nothing"),
        (("image=x", "disk=$(id)"), {}, BadOption, "not a size"), (("image=",), {}, BadOption, "means nothing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_a_sentence(
    words: tuple[str, ...], settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        asked("parm-command", *words, **settings)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("additional", "expected"),
    [
        ("vm(image=a)", {"": "", "image": "a"}), ("openmpi vm(image=a) fluent", {"": "", "image": "a"}), ("vm", {"": ""}),
        ("openmpi", {}), ("", {}), ("svm(image=a)", {}), ("vmx", {}),
    ],
)  # fmt: skip
def test_the_word_among_others(additional: str, expected: dict[str, str]) -> None:
    assert wants((), additional) == expected


@given(st.binary(max_size=300), st.lists(st.text(max_size=30), max_size=3))
def test_no_submission_breaks_the_esub(data: bytes, words: list[str]) -> None:
    try:
        changes = esub(words, parameters(data), {}, ALICE, SETTINGS)
    except (BadOption, NotPermitted, OverLimit):
        return
    assert not any(set(value) & set('"\n\\$`') for value in (*changes[0].values(), *changes[1].values()))
