"""A held program is the payload of each clone; what else a preparation leaves behind runs on."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contracts.payloads import ENV, ME, begin, is_running, payload, python, ran, said, shell, talking
from tests.rehearsal import rehearse

from belljar.agent import bundle
from belljar.errors import GuestRefused
from belljar.guest.conversation import Conversation
from belljar.host import commands
from belljar.model import Payload, StdinKind

INSIDE = Path(bundle.FOLDER) / "inside"
LOADED = f"""
import os, random, sys, time
sys.path.append({str(INSIDE)!r})
import belljar_hold
print("loading", flush=True)
table = {{n: n * n for n in range(1000)}}
drawn = random.Random(7) and random.seed(7)
args = belljar_hold.hold(f"/tmp/belljar-rehearsal-{{os.getppid()}}.sock")
"""
JOB = """
print(args, table[31], os.environ["WORD"], os.getcwd(), sorted(os.environ) == ["PATH", "WORD"], args.leap >= 0)
print(random.random(), file=sys.stderr)
print(sys.stdin.read().upper(), end="")
sys.exit(7)
"""


def prepares(code: str) -> Payload:
    return python(code, prepares=True)


@asynccontextmanager
async def a_clone(preparation: Payload) -> AsyncIterator[Conversation]:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done = await ran(guest, preparation)
            assert done.status is not None and done.status.error in ("", "held") and done.out == b"loading\n"
            await guest.settle()
        async with talking(connection) as clone:
            yield clone


def job(*argv: bytes, **changes: object) -> Payload:
    return payload(*argv, **{"env": (*ENV, (b"WORD", b"w")), **changes})


async def test_a_held_program_gets_the_jobs_words_streams_and_place(tmp_path: Path) -> None:
    async with a_clone(prepares(LOADED + JOB)) as guest:
        done = await ran(guest, job(b"one", b"two \xff", cwd=os.fsencode(tmp_path), umask=0o027), b"some input\n")
        after = await ran(guest, shell("exit 3"))
    assert done.code == 7 and after.code == 3
    words = repr(["one", os.fsdecode(b"two \xff")])
    assert done.out.decode() == f"{words} 961 w {tmp_path} True True\nSOME INPUT\n"
    assert float(done.err) != 0.32383276483316237  # what random draws after seed(7)


async def test_a_job_script_is_the_held_programs_first_argument() -> None:
    async with a_clone(prepares(LOADED + "print(open(args[0]).read(), args[1:])")) as guest:
        done = await ran(guest, replace(job(b"job.sh", b"x"), script=b"#!/bin/sh\ntrue\n"))
    assert done.out == b"#!/bin/sh\ntrue\n ['x']\n"


@pytest.mark.parametrize("kind", [StdinKind.CLOSED, StdinKind.NULL, StdinKind.STREAM])
async def test_a_held_program_has_the_descriptors_that_the_job_asks_for(kind: StdinKind) -> None:
    look = "print({n: os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2) if os.path.lexists(f'/proc/self/fd/{n}')})"
    async with a_clone(prepares(LOADED + look)) as guest:
        done = await ran(guest, job(b"x", stdin=kind, stderr=kind), None)
    found = eval(done.out)
    assert found[1].startswith("pipe:") and (2 in found) is (kind is not StdinKind.CLOSED)
    assert all(found[number] == "/dev/null" for number in (0, 2) if kind is StdinKind.NULL)


async def test_a_held_program_dies_by_the_jobs_signals_and_takes_its_children_along() -> None:
    code = (
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\ntime.sleep(1000)"
    )
    async with a_clone(prepares(LOADED + code)) as guest:
        done = await begin(guest, job(b"x"))
        await said(done, b"\n")
        await done.process.signal(signal.SIGUSR1)
        status = await done.process.wait()
        await guest.end_payload()
    assert status.signal == signal.SIGUSR1 and not is_running(int(done.out))


async def test_a_shell_may_stand_before_the_held_program(tmp_path: Path) -> None:
    (tmp_path / "loaded.py").write_text(LOADED.replace("os.getppid()", "os.environ['AGENT']") + "sys.exit(5)")
    line = f"AGENT=$PPID; export AGENT; /usr/bin/python3 -IS {tmp_path}/loaded.py; exit $(($? + 1))"
    async with a_clone(shell(line, prepares=True)) as guest:
        assert (await ran(guest, job(b"x"))).code == 6


async def test_the_command_becomes_a_program_with_the_jobs_arguments(tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(
        (INSIDE / "belljar_hold.py").read_text().replace('"/run/belljar/hold.sock"', "sys.argv.pop(1)")
    )
    line = f"echo loading; exec /usr/bin/python3 -IS {tmp_path}/hold.py /tmp/belljar-rehearsal-$PPID.sock echo given"
    async with a_clone(shell(line, prepares=True)) as guest:
        assert (await ran(guest, job(b"one", b"two"))).out == b"given one two\n"


async def test_a_c_program_is_held_by_the_header(tmp_path: Path) -> None:
    header = (INSIDE / "belljar_hold.h").read_text().replace('"/run/belljar/hold.sock"', '""')
    header = header.replace(
        "    char rights",
        '    snprintf(place.sun_path, 99, "/tmp/belljar-rehearsal-%d.sock", getppid());\n    char rights',
    )
    (tmp_path / "hold.h").write_text("#include <stdio.h>\n" + header)
    (tmp_path / "held.c").write_text("""#include "hold.h"
int main(void) { char **argv; puts("loading"); fflush(stdout); int count = belljar_hold(&argv);
return count < 0 ? 99 : printf("%d %s %s\\n", count, argv[1], getenv("WORD")) != 8; }
""")
    commands.run(["cc", "-Wall", "-Werror", "-o", f"{tmp_path}/held", f"{tmp_path}/held.c"], timeout=60)
    async with a_clone(payload(os.fsencode(tmp_path / "held"), prepares=True)) as guest:
        done = await ran(guest, job(b"one", b"two", rlimits=(("CORE", 0, 0),)))
    assert (done.out, done.code) == (b"2 two w\n", 0)


async def test_a_second_program_is_not_held(tmp_path: Path) -> None:
    second = f"""
import _socket, os, sys
sys.path.append({str(INSIDE)!r})
import belljar_hold
path = f"/tmp/belljar-rehearsal-{{os.getppid()}}.sock"
print("loading", flush=True)
line = _socket.socket(_socket.AF_UNIX)
line.connect(path)
try:
    belljar_hold.hold(path)
except belljar_hold.NotHeld as exc:
    reason = str(exc)
belljar_hold._become(belljar_hold._take(line)[0], ())
os.write(os.open({str(tmp_path / "reason")!r}, os.O_CREAT | os.O_WRONLY), reason.encode())
"""
    async with a_clone(prepares(second)) as guest:
        assert (await ran(guest, job(b"x"))).code == 0
    reason = (tmp_path / "reason").read_text()  # the second, when the host has frozen the guest already
    assert reason.startswith(("another program is held already", "a program is held by `belljar image warm`, while"))


async def test_where_nothing_is_prepared_no_program_is_held() -> None:
    with rehearse() as connection:
        async with talking(connection) as guest:
            done = await ran(guest, python(LOADED))
            command = await ran(
                guest, payload(b"/usr/bin/python3", b"-IS", os.fsencode(INSIDE / "belljar_hold.py"), b"true")
            )
    assert done.code == 1 and b"NotHeld: a program is held by `belljar image warm`" in done.err
    assert command.code == 125 and command.err.startswith(b"belljar-hold: a program is held by")


async def test_a_program_that_holds_once_more_in_its_machine_is_told() -> None:
    again = "try:\n    belljar_hold.hold('/nowhere')\nexcept belljar_hold.NotHeld as exc:\n    print(exc)"
    async with a_clone(prepares(LOADED + again)) as guest:
        assert b"and nowhere else" in (await ran(guest, job(b"x"))).out


async def test_what_a_held_program_cannot_do_is_refused() -> None:
    async with a_clone(prepares(LOADED)) as guest:
        with pytest.raises(GuestRefused, match="takes no terminal"):
            await begin(guest, job(b"x", terminal=True))
        assert (await ran(guest, job(b"x"))).code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_a_program_of_another_user_is_not_handed_a_job() -> None:
    code = LOADED.replace("args =", "path = f'/tmp/belljar-rehearsal-{os.getppid()}.sock'\nos.setuid(65534)\nargs =")
    async with a_clone(prepares(code)) as guest:
        with pytest.raises(GuestRefused, match="runs as uid 65534 and cannot become uid 0"):
            await begin(guest, job(b"x", account=ME))


async def test_a_held_program_that_was_killed_is_missed_by_the_job() -> None:
    kill = LOADED.replace("args =", "import threading\nthreading.Timer(0.3, os._exit, (9,)).start()\nargs =")
    async with a_clone(prepares(kill)) as guest:
        await asyncio.sleep(0.6)
        with pytest.raises(GuestRefused, match="has ended before it was given a job"):
            await begin(guest, job(b"x"))


async def test_daemons_of_a_preparation_run_on_in_its_clones(tmp_path: Path) -> None:
    line = f"echo loading; sleep 1000 > /dev/null 2>&1 < /dev/null & echo $! > {tmp_path}/pid"
    async with a_clone(shell(line, prepares=True)) as guest:
        pid = int((tmp_path / "pid").read_text())
        assert is_running(pid) and (await ran(guest, shell("exit 4"))).code == 4 and is_running(pid)
    os.kill(pid, signal.SIGKILL)
