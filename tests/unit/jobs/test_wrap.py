"""`belljar internal wrap`: a job that wants no machine is left alone to the last bit, and every end is told as the verdict says."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from belljar.batch import Settings
from belljar.batch.job.terms import Command, Ending, Job, Surroundings, Verdict
from belljar.errors import BadOption
from belljar.host import commands
from belljar.jobs import wrap
from belljar.jobs.batch import ending as ending_module
from belljar.jobs.batch.ending import carry_out
from belljar.jobs.wrap import count_tries, leave, surroundings
from belljar.model import Cause, Outcome, OutcomeClass

FAKE = """
import sys, types
from belljar.batch.job.terms import Command, Job
class Fake:
    name = "slurm"
    def read(self, here):
        stdin = here.stdin() if "stdin" in here.options else None
        return Job("slurm", "1", image=here.options.get("image", ""), native=Command(here.argv[0], here.argv[1:], stdin))
    def count(self, job):
        return ()
    def tell(self, job, verdict, outcome, tries, settings):
        from belljar.batch.job.terms import Ending
        print("told", verdict.value, file=sys.stderr)
        return Ending(1 if verdict.value == "requeue" else 125)
sys.modules["belljar.batch.slurm.dialect"] = types.SimpleNamespace(DIALECT=Fake())
from belljar.cli import entry
config = [] if sys.argv[1] == "-" else ["--config", sys.argv[1]]
sys.argv = ["belljar", *config, "internal", "wrap", "slurm", *sys.argv[2:]]
entry()
"""
LOOK = r"""
import json, os, sys
status = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\t" in line)
print(json.dumps({
    "environ": open("/proc/self/environ", "rb").read().decode("latin-1"), "argv": open("/proc/self/cmdline", "rb").read().decode("latin-1"),
    "cwd": os.getcwd(), "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) < 50), "limits": open("/proc/self/limits").read(),
    "stdin": sys.stdin.buffer.read().decode("latin-1"), "pid": os.getpid(), "ppid": os.getppid(), "sid": os.getsid(0), "pgid": os.getpgid(0),
    **{name: status[name] for name in ("SigIgn", "SigBlk", "Umask", "NoNewPrivs", "Groups")},
}))
"""
ODD = {
    b"PATH": b"/usr/bin:/bin", b"LD_X": b"1", b"LC_ALL": b"C", b"B": b"two\nlines", b"A": b"\xff\xfe", b"EMPTY": b"", b"PYTHONPATH": b"/no/such",
    b"BASH_FUNC_f%%": b"() { :; }",
}  # fmt: skip


def wrapped(
    *words: str | bytes, env: Mapping[bytes, bytes] = ODD, config: Path = Path("-"), **options: object
) -> subprocess.Popen[bytes]:
    path = ":".join(sys.path)
    code = f"import sys; sys.path[:] = {path!r}.split(':')\n{FAKE}"
    env = {**env, b"BELLJAR_PATHS_LOGS": b"/proc/no/such"}  # what is refused here is not for the host's records
    return subprocess.Popen(
        [sys.executable, "-IS", "-c", code, config, *words], env=env, stdout=subprocess.PIPE, **options
    )  # type: ignore[call-overload,no-any-return]


def told(process: subprocess.Popen[bytes]) -> dict[str, object]:
    out, _ = process.communicate(timeout=60)
    return {"exit": process.returncode, **json.loads(out)}


# -- without a machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stdin", ["null", "pipe"])
def test_a_job_without_a_machine_is_what_it_would_have_been(tmp_path: Path, stdin: str) -> None:
    argv: list[bytes] = [b"odd name", b"-ISc", LOOK.encode(), b"a b", b"\xff", b"", b"--image=x", b"--"]
    python = os.fsencode(sys.executable)
    options: dict[str, object] = {"cwd": tmp_path, "umask": 0o027}

    def run(process: subprocess.Popen[bytes]) -> dict[str, object]:
        if process.stdin is not None:
            process.stdin.write(b"what stands there")
            process.stdin.close()
            process.stdin = None
        found = told(process)
        found["environ"] = str(found["environ"]).replace("BELLJAR_PATHS_LOGS=/proc/no/such\0", "")
        assert found["pid"] == process.pid, "it became another process"
        return {name: value for name, value in found.items() if name != "pid"}

    def given() -> dict[str, object]:
        return {**options, "stdin": subprocess.DEVNULL if stdin == "null" else subprocess.PIPE}

    native = subprocess.Popen(argv, executable=python, env=ODD, stdout=subprocess.PIPE, **given())  # type: ignore[call-overload]
    assert run(wrapped(b"--", python, *argv, **given())) == run(native)


def test_an_entry_without_a_name_is_passed_on_as_it_came() -> None:
    """By a program that can make one: Python cannot."""
    look = "import sys; sys.stdout.buffer.write(open('/proc/self/environ', 'rb').read())"
    path = ":".join(sys.path)
    code = f"import sys; sys.path[:] = {path!r}.split(':')\n{FAKE}"
    words = [sys.executable, "-IS", "-c", code, "-", "--", sys.executable, "python", "-ISc", look]
    done = subprocess.run(["env", "-i", "=x", "A=1", *words], stdout=subprocess.PIPE, timeout=60, check=True)
    assert done.stdout == b"=x\0A=1\0"
    missing = subprocess.run(["env", "-i", "=x", *words[:6], "/no/such", "x"], timeout=60, check=False)
    assert missing.returncode == 127


def test_its_exit_code_and_its_death_are_its_own() -> None:
    for script, end in ((b"exit 99", 99), (b"kill -9 $$", -9), (b"kill -PIPE $$", -signal.SIGPIPE)):
        process = wrapped(b"--", b"/bin/sh", b"sh", b"-c", script)
        process.communicate(timeout=60)
        assert process.returncode == end


def test_what_the_system_told_on_standard_input_is_put_back() -> None:
    process = wrapped(b"--stdin=1", b"--", b"/bin/cat", b"cat", stdin=subprocess.PIPE)
    out, _ = process.communicate(b"/spool/1.SC a 'b c'\n", timeout=60)
    assert (process.returncode, out) == (0, b"/spool/1.SC a 'b c'\n")


def test_a_program_that_is_missing_ends_as_with_a_shell(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for path, code in ((b"/no/such", 127), (os.fsencode(tmp_path / "plain"), 126)):
        process = wrapped(b"--", path, b"x", stderr=subprocess.PIPE)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code and err.startswith(b"belljar: " + path)


def test_a_wrong_image_name_is_told_to_the_job_and_nothing_is_executed(tmp_path: Path) -> None:
    for name in ("$(touch${IFS}ran)", "../../x", "a;touch ran"):
        process = wrapped(
            f"--image={name}".encode(), b"--", b"/bin/touch", b"touch", b"ran", stderr=subprocess.PIPE, cwd=tmp_path
        )
        _, err = process.communicate(timeout=60)
        assert process.returncode != 0 and err.startswith(b"belljar: ")
    assert list(tmp_path.iterdir()) == []


# -- settings that are wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "image", "code"),
    [
        ("[machine]\nmemory = -1", "", 99),  # such a job needs none of that
        ("[batch]\nretries = 'x'", "", 99),
        ("[batch]\nqueue_images = 7", "", 1),  # it may be one that is to have a machine
        ("[batch", "", 1),
        ("[machine]\nmemory = -1", "debian12", 1),
    ],
)
def test_a_mistake_of_the_sites_fails_no_job(tmp_path: Path, settings: str, image: str, code: int) -> None:
    """1: tried again elsewhere, as this dialect says it."""
    (tmp_path / "site.toml").write_text(settings)
    options = [f"--image={image}"] if image else []
    words = [*options, "--", "/bin/sh", "sh", "-c", "exit 99"]
    process = wrapped(*words, config=tmp_path / "site.toml", stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    if code == 1:
        assert b"this node's settings: " + os.fsencode(tmp_path / "site.toml") in err and b"requeue" in err


# -- surroundings --------------------------------------------------------------------------------------------------------


def test_options_may_come_as_the_one_word_a_kernel_makes_of_a_line() -> None:
    here = surroundings(["--image=debian12 --time=60", "/spool/slurm_script", "--image=mine", "a b"])
    assert here.options == {"image": "debian12", "time": "60"}
    assert here.argv == (b"/spool/slurm_script", b"--image=mine", b"a b")


@pytest.mark.parametrize("word", ["--image", "--=x", "--image=a b"])
def test_options_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(BadOption, match="not of the form --WORD=VALUE"):
        surroundings([word, "/spool/x"])


# -- the end -------------------------------------------------------------------------------------------------------------

JOB = Job("slurm", "7", started_before=4)
END = Outcome("0123456789ab", Cause.FINISHED, OutcomeClass.PAYLOAD, exit_code=0)


PLAIN = Ending()


class Fake:
    """A dialect that says what it was told."""

    name = "slurm"

    def __init__(self, ending: Ending = PLAIN, count: tuple[str, ...] = ()) -> None:
        self.ending, self.command = ending, count
        self.told: list[tuple[Verdict, int]] = []

    def tell(self, job: Job, verdict: Verdict, outcome: Outcome, tries: int, settings: Settings) -> Ending:
        self.told.append((verdict, tries))
        return self.ending if verdict is not Verdict.MIRROR else Ending(outcome.exit_code, outcome.signal)

    def count(self, job: Job) -> tuple[str, ...]:
        return self.command

    def counted(self, job: Job, printed: bytes) -> Job:
        return replace(job, failed_starts=int(printed))


def ran(argv: tuple[str, ...]) -> bytes:
    return commands.run(argv, timeout=0.2).out


@pytest.mark.parametrize(
    ("command", "tries"), [((), 5), (("echo", "1"), 2), (("echo", "x"), 5), (("false",), 5), (("no-such-command",), 5)]
)
def test_tries_are_counted_by_the_system_or_else_by_what_the_job_was_told(command: tuple[str, ...], tries: int) -> None:
    assert count_tries(Fake(count=command), JOB, ran)[1] == tries  # type: ignore[arg-type]


def test_a_requeue_says_why_on_stderr_and_counts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending_module, "ignore_signals", lambda verdict: None)
    lost = Outcome("", Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, reason="waited 30 s", hint="see `belljar logs ID`")
    dialect = Fake(Ending(exit_code=99), count=("echo", "1"))
    assert leave(dialect, JOB, lost, Settings(retries=3), ran) == 99  # type: ignore[arg-type]
    assert dialect.told == [(Verdict.REQUEUE, 2)]
    assert capsys.readouterr().err.splitlines()[0] == "belljar: waited 30 s"


@pytest.mark.parametrize(("retries", "phases", "is_told"), [(3, {}, False), (1, {}, False), (3, {"run": 2.0}, True)])
def test_a_start_that_failed_leaves_no_word_where_it_would_stay_for_ever(
    retries: int, phases: dict[str, float], is_told: bool,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """PBS appends what later starts write. One that had begun may be one that is not started again."""
    monkeypatch.setattr(ending_module, "ignore_signals", lambda verdict: None)
    lost = Outcome("", Cause.BOOT_FAILED, OutcomeClass.TRANSIENT, reason="waited 30 s", phases=phases)
    leave(Fake(Ending(exit_code=99)), replace(JOB, keeps_output=True), lost, Settings(retries=retries), ran)  # type: ignore[arg-type]
    assert ("waited 30 s" in capsys.readouterr().err) is is_told


def test_an_ending_whose_command_fails_leaves_the_other_way(capsys: pytest.CaptureFixture[str]) -> None:
    ending = Ending(0, commands=(("true",), ("false",)), otherwise=Ending(125))
    held, trouble = carry_out(ending, ran)
    assert held.exit_code == 125 and "false: exit 1" in trouble


def test_others_find_what_an_ending_wrote_once_this_process_leaves_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, seen = tmp_path / "scratch", list[int]()
    folder.mkdir(mode=0o700)
    file = folder / ".job_wrapper_failure"
    ending = Ending(1, files=((bytes(file), b"no space\n"),), opens=bytes(folder), delay=9.0)
    monkeypatch.setattr(ending_module, "ignore_signals", lambda verdict: None)
    monkeypatch.setattr(ending_module, "wait_for_term", lambda seconds: seen.append(mode(folder)))
    lost = Outcome("", Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)
    assert leave(Fake(ending), JOB, lost, Settings(), ran) == 1  # type: ignore[arg-type]
    assert (seen, mode(folder), mode(file)) == ([0o700], 0o711, 0o644)
    monkeypatch.setattr(ending_module, "wait_for_term", lambda seconds: shutil.rmtree(folder))
    assert leave(Fake(ending), JOB, lost, Settings(), ran) == 1  # type: ignore[arg-type]
    assert "cannot see that the job is to start again" in capsys.readouterr().err


def test_a_job_that_is_deleted_while_it_is_kept_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    ending = Ending(125, files=((bytes(note), b"{}"),), delay=9.0)
    lost = Outcome("", Cause.BOOT_FAILED, OutcomeClass.TRANSIENT)
    monkeypatch.setattr(ending_module, "ignore_signals", lambda verdict: None)
    for was_ended in (True, False):
        monkeypatch.setattr(ending_module, "wait_for_term", lambda seconds, it=was_ended: it)
        assert leave(Fake(ending), JOB, lost, Settings(), ran) == 125  # type: ignore[arg-type]
        assert note.exists() is not was_ended


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_a_command_that_hangs_is_cut_off_at_the_deadline() -> None:
    held, trouble = carry_out(Ending(0, commands=(("sleep", "1000"),), otherwise=Ending(1)), ran)
    assert held.exit_code == 1 and "not finished" in trouble


def test_no_word_of_ours_for_a_job_that_ended_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(Fake(), JOB, END, Settings(retries=3), ran) == 0  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_surroundings_are_the_processes_own() -> None:
    here: Surroundings = surroundings([])
    assert (here.uid, here.cwd) == (os.geteuid(), os.getcwdb()) and here.var("PATH")
    assert resource.getrlimit(resource.RLIMIT_CORE) is not None
    assert Command(b"x", ()).stdin is None


def test_what_the_starter_ignores_is_read_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)  # Python ignores SIGPIPE
    assert wrap.ignored_by_parent() >> (signal.SIGPIPE - 1) & 1
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert wrap.ignored_by_parent() == 0


@pytest.mark.parametrize("kind", ["large", "pipe"])
def test_a_script_that_cannot_be_read_whole_still_runs_without_a_machine(kind: str, tmp_path: Path) -> None:
    from belljar.batch.slurm.dialect import DIALECT

    script = tmp_path / "script"
    if kind == "large":
        script.touch()
        os.truncate(script, 17 << 20)
    else:
        os.mkfifo(script)
    here = replace(surroundings([str(script)]), env=((b"SLURM_JOB_ID", b"7"),))
    with pytest.raises(OSError, match="no plain file, or larger than 16 MiB"):
        here.read(os.fsencode(script))
    assert DIALECT.read(here).native.path == os.fsencode(script)
