"""What a payload may rely on, with real machines: the same command gives the same result inside as outside."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest
from tests.live.conftest import Belljar

MIB = 1 << 20


@pytest.mark.parametrize("code", [0, 1, 2, 42, 99, 100, 125, 126, 127, 128, 137, 143, 255])
def test_an_exit_code_comes_back_as_it_is(belljar: Belljar, code: int) -> None:
    done = belljar.run("--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")
    assert belljar.leftovers() == []


def test_all_exit_codes_come_back_from_one_machine(belljar: Belljar) -> None:
    script = "for code in $(seq 0 255); do (exit $code); echo $?; done"
    assert belljar.run("--", "sh", "-c", script).stdout.split() == [str(code).encode() for code in range(256)]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "KILL", "SEGV", "ABRT", "USR1", "PIPE", "XCPU"])
def test_death_by_a_signal_is_death_by_the_same_signal(belljar: Belljar, name: str) -> None:
    done = belljar.run("--", "kill", f"-{name}", "0")  # its own group; a shell may ignore some
    assert done.returncode == -getattr(signal, f"SIG{name}")


def test_what_cannot_be_found_or_executed_is_told_apart_from_what_exits_so(belljar: Belljar, tmp_path: Path) -> None:
    missing = belljar.run("--report", str(tmp_path / "r"), "--", "/no/such/program")
    assert missing.returncode == 127 and b"/no/such/program" in missing.stderr
    assert b'"error":"not-found"' in (tmp_path / "r").read_bytes()
    assert belljar.run("--", "/etc/passwd").returncode == 126
    same = belljar.run("--report", str(tmp_path / "r"), "--", "sh", "-c", "exit 127")
    assert same.returncode == 127 and b'"error":""' in (tmp_path / "r").read_bytes()


def test_stdout_and_stderr_stay_apart_and_stdin_arrives_with_its_end(belljar: Belljar) -> None:
    done = belljar.run("--", "sh", "-c", "cat; echo err >&2", input=b"in\0\xff\n")
    assert (done.stdout, done.stderr) == (b"in\0\xff\n", b"err\n")


def test_the_kinds_of_stdin(belljar: Belljar, tmp_path: Path) -> None:
    tell = (
        "--",
        "sh",
        "-c",
        "if [ -e /proc/self/fd/0 ]; then readlink -f /proc/self/fd/0; wc -c; else echo closed; fi",
    )
    assert belljar.run(*tell).stdout.split() == [b"/dev/null", b"0"]
    (tmp_path / "file").write_bytes(b"12345")
    with open(tmp_path / "file", "rb") as file:
        assert belljar.run(*tell, stdin=file).stdout.split()[-1] == b"5"
    closed = belljar.run(*tell, preexec_fn=lambda: os.close(0), stdin=None)
    assert closed.stdout == b"closed\n"
    null_out = belljar.run("--", "sh", "-c", "exec 3>&1; readlink /proc/$$/fd/3 >&2; true", stdout=subprocess.DEVNULL)
    assert null_out.stderr == b"/dev/null\n"


@pytest.mark.slow
def test_a_quarter_gibibyte_goes_in_and_comes_out_unchanged_in_bounded_memory(belljar: Belljar, tmp_path: Path) -> None:
    size, block = 256 * MIB, os.urandom(MIB)
    wanted = hashlib.sha256()
    with open(tmp_path / "data", "wb") as file:
        for number in range(256):
            piece = block[number * 4096 :] + block[: number * 4096]
            wanted.update(piece)
            file.write(piece)
    with open(tmp_path / "data", "rb") as file:
        keeper = belljar.popen("run", "--", "cat", stdin=file)
        assert keeper.stdout is not None
        got, count, largest = hashlib.sha256(), 0, 0
        while data := keeper.stdout.read(MIB):
            got.update(data)
            count += len(data)
            largest = max(largest, peak_memory(keeper.pid))
    assert keeper.wait(60) == 0 and (count, got.hexdigest()) == (size, wanted.hexdigest())
    assert 0 < largest < 60 * MIB, f"{largest // MIB} MiB"


def peak_memory(pid: int) -> int:
    """The largest resident size so far of a process alone, without its children; 0 once it ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def test_a_reader_that_goes_away_ends_the_payload_by_sigpipe(belljar: Belljar) -> None:
    keeper = belljar.popen("run", "--", "sh", "-c", "yes; echo $? >&2")
    assert keeper.stdout is not None and keeper.stderr is not None
    keeper.stdout.read(10)
    keeper.stdout.close()
    assert keeper.stderr.read() == b"141\n" and keeper.wait(60) == 0


def test_words_and_variables_arrive_to_the_byte(belljar: Belljar) -> None:
    words = [
        b"new\nline",
        b"'\"`$(id)\\",
        b"\x80\xfe\xff",
        b"\xffBELLJAR",
        b"\xff\x01",
        b"\xff",
        b"",
        b" ",
        b"-x",
        "ü€".encode(),
    ]
    done = belljar.run("--env", "ODD=a\n'\"\udc80", "--", "sh", "-c", 'printf "%s\\0" "$@" "$ODD"', "sh", *words)
    assert done.stdout.split(b"\0")[:-1] == [*words, b"a\n'\"\x80"]


def test_a_mebibyte_of_arguments_arrives(belljar: Belljar) -> None:
    words = [b"%06d" % number + b"x" * 993 for number in range(1049)]
    done = belljar.run("--", "sh", "-c", 'printf "%s\n" "$@" | sha256sum', "sh", *words)
    assert done.stdout.split()[0] == hashlib.sha256(b"".join(word + b"\n" for word in words)).hexdigest().encode()


def test_the_payload_is_where_who_and_how_its_caller_is(belljar: Belljar, tmp_path: Path) -> None:
    place = tmp_path / "a place\nwith ü"
    place.mkdir()

    def like_a_batch_system() -> None:
        os.umask(0o027)
        resource.setrlimit(resource.RLIMIT_NOFILE, (333, 444))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    tell = "pwd; umask; ulimit -Sn; ulimit -Hn; ulimit -c; id -u; id -g; id -un"
    done = belljar.run("--", "sh", "-c", tell, cwd=place, preexec_fn=like_a_batch_system)
    assert done.stdout.decode() == f"{place}\n0027\n333\n444\n0\n0\n0\nroot\n"


def test_soft_limits_bind_the_payload_and_not_its_machine(belljar: Belljar) -> None:
    small = {"FSIZE": 4096, "NOFILE": 64, "AS": 1 << 29, "DATA": 1 << 28}

    def limit() -> None:
        for name, soft in small.items():
            number = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(number, (soft, resource.getrlimit(number)[1]))

    tell = "ulimit -f; ulimit -n; ulimit -v; ulimit -d; head -c 5000 /dev/zero > /tmp/x; echo $?"
    done = belljar.run("--", "sh", "-c", tell, preexec_fn=limit)
    assert done.stdout.split() == [b"8", b"64", b"524288", b"262144", b"153"], done.stderr  # 153: SIGXFSZ


def test_another_user_has_name_groups_and_home(belljar: Belljar) -> None:
    done = belljar.run(
        "--user", "54321:54322", "--", "sh", "-c", "id -un; id -u; id -gn; id -g; cd; pwd; touch mine; stat -c %u mine"
    )
    assert done.stdout.split() == [b"user54321", b"54321", b"group54322", b"54322", b"/home/user54321", b"54321"]


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "USR1", "USR2"])
def test_signals_reach_the_payload(belljar: Belljar, name: str) -> None:
    script = f"trap 'echo got {name}; exit 7' {name}; echo ready; while :; do sleep 0.05; done"
    keeper = belljar.popen("run", "--", "sh", "-c", script)
    assert keeper.stdout is not None and keeper.stdout.readline() == b"ready\n"
    keeper.send_signal(getattr(signal, f"SIG{name}"))
    assert keeper.stdout.read() == f"got {name}\n".encode()
    assert keeper.wait(60) == 7


def test_a_script_runs_by_its_own_first_line(belljar: Belljar, tmp_path: Path) -> None:
    script = tmp_path / "job $(id) ü.py"
    script.write_text("#!/bin/printf [%s]\nexit 1\n")
    done = belljar.run(str(script), "a b", "--cpus")
    assert done.returncode == 0 and done.stdout.decode().endswith("/job $(id) ü.py][a b][--cpus]"), done.stderr


def test_a_script_without_a_first_line_is_a_shell_script(belljar: Belljar, tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("echo shell $1\n")
    assert belljar.run(str(tmp_path / "plain"), "x").stdout == b"shell x\n"


def test_nothing_of_the_payload_holds_the_machine(belljar: Belljar) -> None:
    done = belljar.run("--", "sh", "-c", "setsid sh -c 'sleep 1000' & (sleep 1000 &) ; echo done", timeout=60)
    assert (done.returncode, done.stdout) == (0, b"done\n")


def test_the_last_byte_before_the_end_arrives(belljar: Belljar) -> None:
    done = belljar.run("--", "sh", "-c", "head -c 3000001 /dev/zero; printf x; kill -9 $$")
    assert done.returncode == -9 and len(done.stdout) == 3000002 and done.stdout.endswith(b"x")


def test_a_slow_reader_costs_no_memory(belljar: Belljar) -> None:
    keeper = belljar.popen("run", "--", "sh", "-c", f"head -c {64 * MIB} /dev/zero; echo end >&2")
    assert keeper.stdout is not None and keeper.stderr is not None
    assert keeper.stdout.read(1) == b"\0"
    # While nobody reads, the payload must stand still: nothing arrives on stderr until the reader goes on.
    resident = int(Path(f"/proc/{keeper.pid}/statm").read_text().split()[1]) * resource.getpagesize()
    assert resident < 100 * MIB
    assert len(keeper.stdout.read()) == 64 * MIB - 1
    assert keeper.stderr.read() == b"end\n" and keeper.wait(60) == 0
