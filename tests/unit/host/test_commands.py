"""Programs that are run to their end, and those whose end nobody waits for."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from belljar.errors import CommandFailed, CommandMissing
from belljar.host.commands import run, run_beside

LONGEST = 20.0
HANGS = ("sh", "-c", 'echo $$ > "$0"; exec sleep 600')


async def test_a_program_beside_the_loop_is_as_any_other() -> None:
    done = await run_beside(["sh", "-c", "echo out; echo err >&2"], timeout=LONGEST)
    assert (done.code, done.out, done.err) == (0, b"out\n", b"err\n")
    with pytest.raises(CommandFailed, match="sh: exit 3: so it is"):
        await run_beside(["sh", "-c", "echo so it is >&2; exit 3"], timeout=LONGEST)
    with pytest.raises(CommandMissing, match="no-such-program"):
        await run_beside(["no-such-program"], timeout=LONGEST)
    with pytest.raises(CommandFailed, match="sh: not started: Argument list too long"):
        await run_beside(["sh", "-c", ":" * (1 << 17)], timeout=LONGEST)


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("warning: old\nno such queue", "no such queue"),
        ("belljar: in use\nhint: look there", "belljar: in use"),
        ("denied: vm is used in all.q\nremoved vm_disk", "denied: vm is used in all.q"),
        ("hint: look there", "no message"),
    ],
)
def test_of_what_a_failed_program_prints_the_cause_is_told(printed: str, cause: str) -> None:
    with pytest.raises(CommandFailed, match=f"sh: exit 1: {cause}$"):
        run(["sh", "-c", 'printf "%s" "$0" >&2; exit 1', printed], timeout=LONGEST)


async def test_a_program_that_hangs_keeps_nobody_from_being_heard_and_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    os.mkfifo(told)
    waiting = asyncio.ensure_future(run_beside([*HANGS, str(told)], timeout=600))
    pid = int(await asyncio.to_thread(told.read_text))  # the loop goes on meanwhile
    pidfd = os.pidfd_open(pid)
    try:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, LONGEST)
        gone = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(pidfd, lambda: gone.done() or gone.set_result(None))
        await asyncio.wait_for(gone, LONGEST)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize("beside", [True, False])
def test_a_program_that_does_not_end_in_time_is_killed(beside: bool) -> None:
    with pytest.raises(CommandFailed, match="sleep: not finished after 0 s, killed"):
        asyncio.run(run_beside(["sleep", "600"], timeout=0.05)) if beside else run(["sleep", "600"], timeout=0.05)
