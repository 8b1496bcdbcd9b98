"""`-t`: the payload has a terminal of the caller's size and temper, and the caller gets his own back in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.live.conftest import LONGEST, Belljar, marked_processes
from tests.live.terminal import Terminal, terminal
from tests.live.test_faults import cpu_ticks

FOREVER = "while :; do sleep 0.05; done"


def at(seat: Terminal, belljar: Belljar, *words: str, **options: object) -> subprocess.Popen[bytes]:
    """`belljar` at this terminal."""
    return seat.start(belljar.argv(*words), belljar.env, **options)


def test_the_payload_has_a_terminal_of_the_callers_size(belljar: Belljar) -> None:
    with terminal() as seat:
        before = seat.modes()
        job = at(
            seat,
            belljar,
            "run",
            "-t",
            "--",
            "sh",
            "-c",
            "stty size; for n in 0 1 2; do test -t $n; echo $?; done; exit 9",
        )
        assert seat.rest() == b"31 117\r\n0\r\n0\r\n0\r\n"
        assert job.returncode == 9
        assert seat.modes() == before
    assert belljar.leftovers() == []


def test_the_payload_leads_a_session_of_its_own_at_that_terminal(belljar: Belljar) -> None:
    tell = (
        "import os, sys; tty = os.ttyname(0); print(os.getsid(0) == os.getpid(), os.tcgetpgrp(0) == os.getpgrp(), "
        "os.open('/dev/tty', os.O_RDWR) > 2, os.environ.get('TERM'), os.stat(tty).st_uid)"
    )
    with terminal() as seat:
        belljar.env["TERM"] = "belljar-term"
        at(seat, belljar, "run", "-t", "--user", "54321:54322", "--", "python3", "-c", tell)
        assert seat.rest() == b"True True True belljar-term 54321\r\n"


def test_a_new_size_is_told_at_once(belljar: Belljar) -> None:
    with terminal() as seat:
        at(seat, belljar, "run", "-t", "--", "sh", "-c", f"trap 'stty size' WINCH; echo up; {FOREVER}")
        seat.expect(b"up")
        for rows, columns in ((50, 201), (7, 20)):
            seat.resize(rows, columns)
            seat.expect(b"%d %d\r\n" % (rows, columns))


def test_control_c_goes_to_the_guest_and_ends_both(belljar: Belljar) -> None:
    with terminal() as seat:
        before = seat.modes()
        # It lives on for a moment: the guest's kernel may drop the echo together with a terminal's last user.
        dies = "trap 'sleep 0.3; trap - INT; kill -INT $$' INT; echo up; sleep 1000 & wait"
        job = at(seat, belljar, "run", "-t", "--", "sh", "-c", dies)
        seat.expect(b"up\r\n")
        seat.type(b"\x03")
        assert seat.rest() == b"^C"  # echoed by the guest's terminal
        assert job.returncode == -signal.SIGINT
        assert seat.modes() == before
    assert belljar.leftovers() == []


def test_every_key_reaches_a_payload_that_wants_it_raw(belljar: Belljar) -> None:
    keys = bytes(range(256))
    program = (
        "import os, sys, tty; tty.setraw(0); os.write(1, b'up'); got = b''\n"
        "while len(got) < 256: got += os.read(0, 256)\n"
        "os.write(1, got)"
    )
    with terminal() as seat:
        at(seat, belljar, "run", "-t", "--", "python3", "-c", program)
        seat.expect(b"up")
        seat.type(keys)
        assert seat.rest() == keys


def test_control_d_is_the_end_of_what_is_typed(belljar: Belljar) -> None:
    with terminal() as seat:
        job = at(seat, belljar, "run", "-t", "--", "sh", "-c", "echo up; cat | wc -l")
        seat.expect(b"up\r\n")
        seat.type(b"one\ntwo\n\x04")
        assert seat.rest().split() == [b"one", b"two", b"2"]
        assert job.returncode == 0


def test_much_output_arrives_whole_and_with_its_line_ends(belljar: Belljar) -> None:
    with terminal() as seat:
        at(seat, belljar, "run", "-t", "--", "seq", "20000")
        assert seat.rest() == b"".join(b"%d\r\n" % number for number in range(1, 20001))


def test_a_terminal_is_asked_for_where_there_is_none(belljar: Belljar) -> None:
    done = belljar.run("-t", "--", "true")
    assert done.returncode == 125
    assert done.stderr.splitlines()[0] == b"belljar: --tty: standard input is not a terminal"


def test_output_may_go_elsewhere(belljar: Belljar, tmp_path: Path) -> None:
    with terminal() as seat, open(tmp_path / "out", "wb") as out:
        job = at(seat, belljar, "run", "-t", "--", "stty", "size", stdout=out)
        assert seat.rest() == b""
    assert job.returncode == 0 and (tmp_path / "out").read_bytes() == b"31 117\r\n"


ENDS = {
    "the payload's own end": (("--", "sh", "-c", "echo up; read line; exit 3"), "type", 3),
    "a payload that is not there": (("--", "/no/such/program"), "", 127),
    "TERM": (("--", "sh", "-c", "echo up; exec sleep 1000"), "TERM", -signal.SIGTERM),
    "HUP": (("--", "sh", "-c", "echo up; exec sleep 1000"), "HUP", -signal.SIGHUP),
    "a payload that ignores TERM": (("--grace", "0.2s", "--", "sh", "-c", f"trap '' TERM; echo up; {FOREVER}"), "TERM", -signal.SIGTERM),
    "a time limit": (("--timeout", "0.3s", "--", "sh", "-c", "echo up; exec sleep 1000"), "", -signal.SIGTERM),
    "a guest that is lost": (("--", "sh", "-c", "echo up; exec sleep 1000"), "lose", 125),
    "a guest that cannot be had": (("--start", "clone", "--disk", "1M", "--", "true"), "", 125),
    "an image that is not known": (("--image", "nosuch", "--", "true"), "", 125),
}  # fmt: skip


@pytest.mark.parametrize("way", ENDS)
def test_the_terminal_is_given_back_as_it_was(belljar: Belljar, way: str) -> None:
    words, act, code = ENDS[way]
    with terminal() as seat:
        before = seat.modes()
        job = at(seat, belljar, "run", "-t", *words)
        if act:
            seat.expect(b"up\r\n")
            assert seat.modes() != before
        if act == "type":
            seat.type(b"\r")
        elif act == "lose":
            os.kill(domain_of(belljar), signal.SIGKILL)
        elif act:
            job.send_signal(getattr(signal, f"SIG{act}"))
        screen = seat.rest()
        assert job.returncode == code, screen
        assert seat.modes() == before
        if code == 125:  # said when the terminal is itself again: no staircase
            assert b"belljar: " in screen and b"\r\nhint: " in screen
    assert belljar.leftovers() == []


def domain_of(belljar: Belljar) -> int:
    (id,) = belljar.machines()
    return next(pid for pid, machine in marked_processes() if machine == id)


def test_a_line_that_is_cut_ends_the_machine(belljar: Belljar) -> None:
    with terminal() as seat:
        job = at(seat, belljar, "run", "-t", "--", "sh", "-c", "echo up; exec sleep 1000")
        seat.expect(b"up\r\n")
        seat.hang_up()
        assert job.wait(LONGEST) == -signal.SIGHUP
    assert belljar.leftovers() == []


def test_a_start_that_is_cancelled_gives_the_terminal_back(belljar: Belljar) -> None:
    events = belljar.popen("events", "-f", "--format", "json")
    with terminal() as seat:
        before = seat.modes()
        job = at(seat, belljar, "run", "-t", "--start", "cold", "--", "true")
        assert events.stdout is not None
        while json.loads(events.stdout.readline()).get("state") != "booting":
            pass
        job.send_signal(signal.SIGTERM)
        seat.rest()
        assert job.returncode == -signal.SIGTERM and seat.modes() == before


@pytest.fixture
def shell(belljar: Belljar, tmp_path: Path) -> str:
    """How a person would call belljar in a shell."""
    script = tmp_path / "belljar"
    words = " ".join(f"'{word!s}'" for word in belljar.argv())
    script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    script.chmod(0o755)
    return str(script)


def at_a_shell(seat: Terminal, belljar: Belljar) -> None:
    env = {**belljar.env, "PS1": "$ ", "TERM": "dumb", "HISTFILE": ""}
    seat.start(["/bin/bash", "--norc", "--noprofile", "-i"], env)
    seat.expect(rb"\$ ")


def test_control_z_halts_the_machine_and_fg_goes_on(belljar: Belljar, shell: str) -> None:
    with terminal() as seat:
        at_a_shell(seat, belljar)
        seat.type(f"{shell} run -- sh -c 'n=0; while :; do n=$((n+1)); echo tick $n.; sleep 0.05; done'\n".encode())
        seat.expect(rb"\ntick 2\.")
        domain = domain_of(belljar)
        seat.type(b"\x1a")
        seat.expect(rb"Stopped.*\$ ")
        before, begin = cpu_ticks(domain), time.monotonic()
        seat.type(b"jobs; sleep 0.5\n")
        seat.expect(rb"Stopped.*\$ ")
        assert cpu_ticks(domain) - before <= 5, f"the vcpus went on for {time.monotonic() - begin:.1f} s"
        seat.type(b"fg\n")
        seat.expect(rb"\ntick \d+\..*\ntick \d+\.")
        seat.type(b"\x03")
        seat.expect(rb"\$ ")
        seat.type(b"echo code $?.\n")
        seat.expect(rb"code 130\.")
        seat.type(b"exit\n")
        seat.rest()
    assert belljar.leftovers() == []


def test_a_job_in_the_background_runs_and_hears_only_what_is_typed_in_front(belljar: Belljar, shell: str) -> None:
    with terminal() as seat:
        at_a_shell(seat, belljar)
        script = "echo up; sleep 0.3; echo on; while read line; do echo got $line.; done"
        seat.type(f"{shell} run -- sh -c '{script}' &\n".encode())
        seat.expect(rb"\[1\] \d+.*up\r\n.*on\r\n")
        seat.type(b"echo for the shell $((1 + 1)); jobs\n")
        seat.expect(rb"\nfor the shell 2.*Running")
        seat.type(b"fg\n")
        seat.expect(rb"belljar run .*\n")
        seat.type(b"first\n")
        seat.expect(rb"got first\.")
        seat.type(b"\x1a")
        seat.expect(rb"Stopped.*\$ ")
        seat.type(b"bg\n")
        seat.expect(rb"\$ ")
        seat.type(b"echo for the shell $((1 + 2)); jobs\n")
        seat.expect(rb"\nfor the shell 3.*Running")
        seat.type(b"fg\n")
        seat.expect(rb"belljar run .*\n")
        seat.type(b"second\n")
        seat.expect(rb"got second\.")
        seat.type(b"\x04")
        seat.expect(rb"\$ ")
        seat.type(b"exit\n")
        seat.rest()
    assert belljar.leftovers() == []


def test_stopping_belljar_gives_the_terminal_to_the_shell_meanwhile(belljar: Belljar, shell: str) -> None:
    with terminal() as seat:
        at_a_shell(seat, belljar)
        seat.type(f"{shell} run -t -- sh -c 'trap \"echo; stty size\" WINCH; echo up; {FOREVER}'\n".encode())
        seat.expect(rb"[\n ]up\r\n")  # the shell may have shown its prompt before
        raw = seat.modes()
        (keeper,) = keepers(belljar)
        os.kill(keeper, signal.SIGTSTP)
        seat.expect(rb"Stopped.*\$ ")
        seat.resize(40, 99)
        seat.type(b"fg\n")
        seat.expect(b"40 99\r\n")  # what changed while nobody looked is told now
        assert seat.modes() == raw
        seat.type(b"\x03")
        seat.expect(rb"\$ ")
        seat.type(b"stty -a | grep -c ' icanon'; exit\n")
        assert b"\n1\r\n" in seat.rest()


def keepers(belljar: Belljar) -> list[int]:
    """The supervisors of the machines that live."""
    found = []
    for machine in belljar.machines():
        with open(belljar.run_folder / "machines" / machine / "journal.jsonl") as journal:
            found.append(int(json.loads(journal.readline())["pid"]))
    return found


def test_exec_has_a_terminal_too(belljar: Belljar) -> None:
    job = belljar.popen("run", "--name", "job", "--", "sh", "-c", "echo up; exec sleep 1000")
    assert job.stdout is not None and job.stdout.readline() == b"up\n"
    script = f"trap 'stty size; exit 5' WINCH; stty size; {FOREVER}"
    with terminal() as seat:
        before = seat.modes()
        second = at(seat, belljar, "exec", "-t", "job", "--", "sh", "-c", script)
        seat.expect(b"31 117\r\n")
        seat.resize(12, 34)
        assert seat.rest() == b"12 34\r\n"
        assert second.returncode == 5 and seat.modes() == before


def test_exec_gives_the_terminal_back_when_its_machine_ends(belljar: Belljar) -> None:
    job = belljar.popen("run", "--name", "job", "--", "sh", "-c", "echo up; exec sleep 1000")
    assert job.stdout is not None and job.stdout.readline() == b"up\n"
    with terminal() as seat:
        before = seat.modes()
        second = at(seat, belljar, "exec", "-t", "job", "--", "sh", "-c", "echo up; exec sleep 1000")
        seat.expect(b"up\r\n")
        job.send_signal(signal.SIGTERM)
        screen = seat.rest()
        assert second.returncode == 125 and seat.modes() == before, screen
        assert job.wait(LONGEST) == -signal.SIGTERM
