"""The command itself: which verb, which exit code, what is said when something goes wrong."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from belljar import cli
from belljar.cli import VERBS, CommandLine, main, split
from belljar.cli.host import reap
from belljar.cli.parser import Verb
from belljar.errors import BadOption, DomainDied, NoSuchMachine, about

PYTHON = [sys.executable, "-I"]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], None]:
    """Put a verb of the test's own in the place of `kill-all`."""

    def put(does: Callable[[], int]) -> None:
        made = Verb("A test.", lambda args, runtime: does(), needs_runtime=False)
        monkeypatch.setitem(reap.VERBS, "kill-all", made)

    return put


def fails_with(error: BaseException) -> Callable[[], int]:
    def fail() -> int:
        raise error

    return fail


# -- which verb --------------------------------------------------------------------------------------------------------


def test_global_options_stand_before_the_verb_and_the_rest_is_the_verbs() -> None:
    line = split(["--config", "a.toml", "-v", "run", "--config", "b", "--", "ls", "-v"])
    assert line == CommandLine("run", ["--config", "b", "--", "ls", "-v"], "a.toml", True)
    assert split(["--config=x", "ps"]).config_file == "x"


@pytest.mark.parametrize("words", [["--cofnig", "x", "ps"], ["--config"], ["-x"]])
def test_an_unknown_global_option_is_refused(words: list[str]) -> None:
    with pytest.raises(BadOption, match=words[0]):
        split(words)


def test_a_mistyped_verb_is_told_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["destroy-all"]) == 125
    assert main(["kil"]) == 125
    assert "Did you mean `belljar kill`?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_names_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert [name for name, entry in VERBS.items() if entry.group and f"  {name} " not in shown] == []


def test_without_a_verb_help_goes_to_stderr_and_it_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 125
    output = capsys.readouterr()
    assert output.out == "" and "VERB" in output.err


def test_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("belljar 0.")


def test_a_wrong_option_of_a_verb_is_our_failure_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--frmat", "json"]) == 125
    assert capsys.readouterr().err == "belljar: unrecognized arguments: --frmat json\nhint: See `belljar ps --help`.\n"


def test_a_value_that_means_nothing_leads_to_the_help_of_its_own_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("STORE", "SCRATCH", "RUN", "LOGS"):
        monkeypatch.setenv(f"BELLJAR_PATHS_{name}", str(tmp_path / name))
    assert main(["image", "insert", "some", "a:b", "--name", "other"]) == 125
    assert capsys.readouterr().err.endswith("hint: `belljar image insert --help` tells the forms an option takes.\n")


def test_options_are_not_guessed_from_their_beginnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--form", "json"]) == 125


# -- interrupted before it has begun ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "says"), [("belljar", b""), ("a_program_of_somebody", b"KeyboardInterrupt")])
def test_ctrl_c_among_the_imports_ends_the_command_without_a_word(tmp_path: Path, name: str, says: bytes) -> None:
    """A program that imports belljar keeps Python's own way."""
    (tmp_path / name).write_text(
        "import os, signal, sys\nimport belljar\nos.kill(os.getpid(), signal.SIGINT)\nfrom belljar.cli import entry\nentry()\n"
    )
    done = subprocess.run([*PYTHON, tmp_path / name, "--version"], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGINT
    assert says in done.stderr and bool(says) == bool(done.stderr)


def test_a_verb_can_clear_up_after_ctrl_c_again(verb: Callable[..., None]) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        verb(fails_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            main(["kill-all"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_an_error_of_ours_is_one_line_and_a_hint(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verb(fails_with(NoSuchMachine("x: no machine of this id or name")))
    assert main(["kill-all"]) == 125
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("belljar: x: no machine of this id or name\nhint: `belljar ps -a`")


def test_a_hint_names_the_machine_that_is_meant(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verb(fails_with(DomainDied("it ended")))
    main(["kill-all"])
    assert capsys.readouterr().err.endswith(
        "hint: `belljar logs ID --qemu` shows what QEMU said. `belljar ps -a` lists each ID.\n"
    )
    assert (
        about("`belljar logs ID --qemu`, `belljar stop ID`; ID", "abc")
        == "`belljar logs abc --qemu`, `belljar stop abc`; ID"
    )


def test_too_little_memory_for_ourselves_is_no_defect(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(fails_with(MemoryError()))
    assert main(["kill-all"]) == 125
    said = capsys.readouterr().err
    assert "no more memory" in said and "defect" not in said and "hint: " in said


def test_words_of_a_guest_cannot_steer_the_terminal(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(fails_with(NoSuchMachine("a\x1b]0;evil\x07b\r")))
    main(["kill-all"])
    assert "\x1b" not in capsys.readouterr().err


def test_an_error_of_the_system_names_the_file(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verb(fails_with(PermissionError(errno.EACCES, "Permission denied", "/etc/shadow")))
    assert main(["kill-all"]) == 125
    assert "belljar: /etc/shadow: Permission denied" in capsys.readouterr().err


def test_a_defect_is_our_failure_and_no_traceback_unless_asked(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(fails_with(ZeroDivisionError("division by zero")))
    assert main(["kill-all"]) == 125
    assert "Traceback" not in capsys.readouterr().err
    assert main(["-v", "kill-all"]) == 125
    assert "Traceback" in capsys.readouterr().err


def test_a_payloads_own_v_asks_for_no_traceback(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nosuch", "--", "ls", "-v"]) == 125
    assert "Traceback" not in capsys.readouterr().err


def test_a_broken_pipe_to_a_machine_is_an_error_not_silence(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    verb(fails_with(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert main(["kill-all"]) == 125
    assert "Broken pipe" in capsys.readouterr().err


# -- as a process ------------------------------------------------------------------------------------------------------


def in_process(code: str, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    """Run *code* after `from belljar import cli` in a Python of its own."""
    before = f"import sys; sys.path[:0] = {[str(Path(cli.__file__).parents[2])]!r}; import os\n"
    return subprocess.run([*PYTHON, "-c", before + code], capture_output=True, timeout=30, **kwargs)  # type: ignore[call-overload,no-any-return]


def test_standard_descriptors_that_were_closed_are_known_and_covered() -> None:
    code = """
os.close(0); os.close(2); sys.stdin = sys.stderr = None
from belljar.host.descriptors import CLOSED
assert CLOSED == (0, 2), CLOSED
assert os.readlink('/proc/self/fd/0') == os.readlink('/proc/self/fd/2') == '/dev/null'
assert open('/etc/passwd').fileno() > 2
print('good')
"""
    assert in_process(code).stdout == b"good\n"


def test_a_variable_without_a_name_is_left_alone() -> None:
    """The hooks of a batch system clear what a job may have set."""
    look = "import os; from belljar import cli; print(dict(os.environb)); os.environ.clear(); print(dict(os.environ))"
    path = f"import sys; sys.path[:] = {sys.path!r}; "
    done = subprocess.run(
        ["env", "-i", "=x", "A=1", *PYTHON, "-c", path + look], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.splitlines()[0].startswith("{b'A': b'1'") and done.stdout.splitlines()[1] == "{}", done.stderr


def test_closed_output_fails_nothing() -> None:
    code = """
os.close(1); os.close(2)
sys.stdout = sys.stderr = None
sys.argv = ['belljar', '--help']
from belljar.cli import entry
entry()
"""
    done = in_process(code)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_that_goes_away_ends_us_by_sigpipe_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PYTHON, "-m", "belljar", "--help"], stdout=writer, stderr=subprocess.PIPE, timeout=30)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["image", "lsit"], "list"), (["batch", "instal", "slurm"], "install"), (["batch", "check", "slrum"], "slurm"),
        (["ps", "--format", "jsn"], "json"), (["template", "xyz"], ""),
    ],
)  # fmt: skip
def test_a_mistyped_act_is_told_the_one_that_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 125
    said = capsys.readouterr().err
    assert said.startswith("belljar: ") and "no such word for `belljar " in said and "hint: One of " in said
    assert (f"Did you mean `{meant}`?" in said) if meant else "Did you mean" not in said


@pytest.mark.parametrize("words", [["wrap", "slurm"], ["batch", "prolog", "slurm"], ["keep"]])
def test_old_words_of_hooks_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 125
    assert "no such" in capsys.readouterr().err


def test_what_batch_systems_call_is_no_verb_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "internal" not in shown and "keep" not in shown and "wrap" not in shown
    assert [line for line in shown.splitlines() if line.endswith(":")] == [
        "Run:", "Machines:", "Images:", "Batch systems:", "Vacuum:", "Monitoring:", "This host:",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("image", "ls"), "Did you mean `list`?"), (("image", "archive", "kept"), "extract"), (("template", "show", "abc"), "list"),
        (("template", "expire"), "list"), (("cache", "prepare", "--size", "20G"), "list, remove"), (("completion", "ksh"), "bash, zsh, fish"),
        (("batch", "install", "slurm", "--force"), "belljar batch --help"), (("version",), "belljar --help"),
    ],
)  # fmt: skip
def test_a_word_that_is_no_more_is_refused_with_those_there_are(
    words: tuple[str, ...], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 125
    said = capsys.readouterr().err
    assert said.count("hint: ") == 1 and hint in said.partition("hint: ")[2], said


def test_output_that_cannot_be_written_is_our_failure() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PYTHON, "-m", "belljar", "--help"], stdout=full, stderr=subprocess.PIPE, timeout=30)
    assert done.returncode == 125
    assert done.stderr == b"belljar: standard output: No space left on device\n"


def test_an_interrupt_ends_us_by_sigint_without_a_traceback() -> None:
    code = """
sys.argv = ['belljar', '--version']
from belljar import cli
def interrupted(*arguments): raise KeyboardInterrupt
cli.main = interrupted
cli.entry()
"""
    done = in_process(code)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")


def test_names_in_no_encoding_are_printed_all_the_same() -> None:
    code = r"""
sys.argv = ['belljar', 'x\udcff']
from belljar.cli import entry
entry()
"""
    done = in_process(code, env={"LC_ALL": "C.UTF-8"})
    assert done.returncode == 125
    assert b"no such verb" in done.stderr
