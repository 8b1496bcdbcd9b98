"""How a job arrives: the batch system's prolog on the bait asks by a socket, and is answered when the job has been taken back.

The bait answers root and its own user alone: a line for a line, `taken` for the job `4711`. `4711 again`: it was answered so before.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import Enum
from pathlib import Path

from belljar.errors import BelljarError, HostError
from belljar.host.processes import peer_uid
from belljar.pool import Revoked

SOCKET = "arrivals.sock"
LONGEST = 4096
SETTLE = 0.5  # seconds in which the node's daemon has heard that the job was taken back, where it cannot be asked
HEARD = 10.0  # seconds in which it has, where it can
OFF = 0.01  # between two questions to it
AGAIN = 0.5  # seconds between two tries to reach a bait that is just being restarted
QUESTION = re.compile(rb"([0-9]{1,18}(?:\.[0-9]{1,9}|\[[0-9]{1,9}\])?)( again)?\n")


class Answer(str, Enum):
    TAKEN = "taken"  # the job is off the bait
    NOT_YET = "not-yet"  # the prolog is to ask again
    FAILED = "failed"  # it could not be taken back


@asynccontextmanager
async def listening(folder: Path, arrived: Callable[[str, bool], Awaitable[Answer]]) -> AsyncIterator[None]:
    """*arrived*: the answer for a job's number, and whether that was answered before."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, BelljarError):
            async with asyncio.timeout(600):
                if peer_uid(writer.get_extra_info("socket")) in (0, os.geteuid()):
                    job = QUESTION.fullmatch(await reader.readline())
                    answer = await arrived(job[1].decode(), bool(job[2])) if job else Answer.FAILED
                    writer.write(answer.value.encode() + b"\n")
                    await writer.drain()
        writer.close()

    path = folder / SOCKET
    path.unlink(missing_ok=True)  # of a bait that was killed: the folder's lock is ours
    server = await asyncio.start_unix_server(serve, path, limit=LONGEST)
    os.chmod(path, 0o600)
    try:
        yield
    finally:
        server.close()


def tell(folder: Path, job: str, timeout: float, revoked: Callable[[], Revoked] = lambda: Revoked.CANNOT_TELL) -> None:
    """From a prolog: return when the job is off this bait. Raises HostError where that will not be so, and where the bait is silent for
    *timeout* seconds. *revoked*: the node's daemon knows it, too; before, it would start the job when its prolog ends, and start it without
    a prolog later when that fails."""
    end, why, again = time.monotonic() + timeout, "it is not started", False
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX) as channel:
                channel.settimeout(left)
                channel.connect(str(folder / SOCKET))
                channel.sendall(f"{job}{' again' * again}\n".encode())
                line = channel.makefile("rb").readline(LONGEST)
            why = "it could not take the job back" if line else "it was stopped meanwhile"
            answer, answered = Answer(line.decode().strip() or "failed"), time.monotonic()
            while (known := revoked()) is not Revoked.YES and answer is Answer.TAKEN:
                if time.monotonic() - answered >= (SETTLE if known is Revoked.CANNOT_TELL else HEARD):
                    break
                time.sleep(OFF)
            if known is Revoked.YES or (answer is Answer.TAKEN and (again or known is Revoked.CANNOT_TELL)):
                return
            again, end = again or answer is Answer.TAKEN, end if answer is Answer.FAILED else answered + timeout
        except (OSError, ValueError) as exc:
            why = getattr(exc, "strerror", None) or str(exc)
        time.sleep(min(AGAIN, max(end - time.monotonic(), 0)))
    raise HostError(
        f"the bait in {folder} did not take job {job} back within {timeout:g} s: {why}",
        hint="Is `belljar bait run` running there?",
    )
