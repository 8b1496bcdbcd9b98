"""What a machine does with what it is told: by a real /bin/sh, in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.lease.broker.shells import Shell
from tests.unit.lease.broker.test_plan import CLUSTER, machines, play, text

from belljar.lease import InstanceState
from belljar.lease.broker import Context, Data, Member, Role
from belljar.lease.broker.plan import read
from belljar.records import replace

SAY = b'#!/bin/sh\necho "${0##*/cluster/} $*" >> $BELLJAR_CLUSTER/said\n'
OLD = {
    "1-ipandhost/worker": SAY, "1-gone/worker": SAY, "2-thishost/publicnic": SAY, "4-restarts/worker": SAY, "4-restarts/other": SAY,
    "3-data/motd": b"#!/bin/sh\necho data $(cat $1) >> $BELLJAR_CLUSTER/said\n", "5-thishost-finalize/localnic": SAY,
}  # fmt: skip


def context(files: Data, provides: tuple[str, ...] = ()) -> Context:
    head = Role("head", "slurm", requires=("worker",), needs=("motd",), provides=provides, files=files)
    return Context("r-1", "ada", replace(CLUSTER, roles=(head, CLUSTER.roles[1])))


def told(shell: Shell, program: str, provides: tuple[str, ...] = ()) -> Member:
    found = read(shell.told(f"token=t0\n{program}"), "t0", provides)
    assert found is not None
    return Member("i-0", "r-1", 1, "plan", *found)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "machine")


def said(shell: Shell) -> list[str]:
    return [line.removeprefix("scripts/") for line in shell.read("var/lib/belljar/cluster/said").splitlines()]


def test_scripts_of_the_convention_are_called_in_order_and_once(shell: Shell) -> None:
    found = play(machines(), (), context(tuple((path, text) for path, text in OLD.items())))
    assert told(shell, text(found, 0)).code == 0
    once = [
        "1-ipandhost/worker 10.98.0.2 worker1 worker1.pi", "1-ipandhost/worker 10.98.0.3 worker2 worker2.pi",
        "2-thishost/publicnic 10.98.0.1 head head.pi", "data welcome", "4-restarts/worker ",
        "5-thishost-finalize/localnic 10.98.0.1 head head.pi",
    ]  # fmt: skip
    assert said(shell) == once
    assert told(shell, text(found, 0)).code == 0  # the service was killed and asks again
    assert said(shell) == once
    smaller = play([*machines(2), replace(machines()[2], state=InstanceState.TERMINATED)], (), found.context)
    assert told(shell, text(smaller, 0)).code == 0
    assert said(shell)[len(once) :] == [
        "1-gone/worker 10.98.0.3 worker2 worker2.pi", "4-restarts/worker ", "5-thishost-finalize/localnic 10.98.0.1 head head.pi",
    ]  # fmt: skip
    again = play(machines(), (), smaller.context)
    assert told(shell, text(again, 0)).code == 0
    assert said(shell)[-3] == "1-ipandhost/worker 10.98.0.3 worker2 worker2.pi"


def test_names_and_host_keys_of_all_machines_are_known(shell: Shell) -> None:
    program = text(play(machines(), (), context(())), 0)
    for _ in range(2):
        told(shell, program)
    assert shell.read("proc/sys/kernel/hostname") == shell.read("etc/hostname") == "head\n"
    assert shell.read("etc/hosts").splitlines()[:2] == [
        "127.0.0.1 localhost",
        "10.98.0.1 head.pi head # belljar cluster",
    ]
    assert len(shell.read("etc/hosts").splitlines()) == 4
    assert "worker2.pi,worker2,10.98.0.3 ssh-ed25519 AAAA\n" in shell.read("etc/ssh/ssh_known_hosts")


def test_a_failing_script_ends_it_and_what_it_wrote_is_told(shell: Shell) -> None:
    files = (("1-ipandhost/worker", b"#!/bin/sh\necho no route to $2 >&2; exit 3\n"), ("2-thishost/localnic", SAY))
    program = text(play(machines(), (), context(files)), 0)
    for _ in range(2):  # what failed is done again, when it is asked for again
        answer = told(shell, program)
        assert (answer.code, answer.script) == (3, "1-ipandhost/worker")
        assert answer.log.decode() == "== 1-ipandhost/worker 10.98.0.2 worker1 worker1.pi\nno route to worker1\n"
    assert not (shell.folder / "var/lib/belljar/cluster/said").exists()


def test_of_a_long_output_the_end_is_told(shell: Shell) -> None:
    files = (("2-thishost/localnic", b"#!/bin/sh\nyes line | head -c 100000; echo the last; exit 1\n"),)
    answer = told(shell, text(play(machines(), (), context(files)), 0))
    assert len(answer.log) == 4096 and answer.log.endswith(b"the last\n")


@pytest.mark.parametrize(
    ("script", "code", "log"),
    [
        (b'printf "\\001\\377" > $BELLJAR_CLUSTER/provide/munge_key', 0, b""),
        (b"true", 1, b"provide/munge_key: no script has left it"),
        (b"head -c 16385 /dev/zero > $BELLJAR_CLUSTER/provide/munge_key", 1, b"more than 16384 bytes"),
    ],
)
def test_data_that_scripts_leave_is_told(shell: Shell, script: bytes, code: int, log: bytes) -> None:
    found = play(machines(), (), context((("2-thishost/localnic", b"#!/bin/sh\n" + script),), ("munge_key",)))
    answer = told(shell, text(found, 0), ("munge_key",))
    assert answer.code == code and log in answer.log
    assert answer.data == (() if code else (("munge_key", b"\x01\xff"),))


def test_a_daemon_that_a_script_starts_does_not_hold_the_answer(shell: Shell) -> None:
    files = (("2-thishost/localnic", b"#!/bin/sh\nsleep 20 & echo $! > $BELLJAR_CLUSTER/daemon\n"),)
    assert told(shell, text(play(machines(), (), context(files)), 0)).code == 0
    daemon = int(shell.read("var/lib/belljar/cluster/daemon"))
    assert Path(f"/proc/{daemon}").exists()
    import os
    import signal

    os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("part", [0.2, 0.9, 0.999])
def test_half_of_what_it_is_told_does_nothing(shell: Shell, part: float) -> None:
    program = text(play(machines(), (), context((("2-thishost/localnic", SAY),))), 0)
    assert shell.told(program[: int(len(program) * part)] or " ") == b""
    assert not (shell.folder / "var/lib/belljar/cluster").exists()
