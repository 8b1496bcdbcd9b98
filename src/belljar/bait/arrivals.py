"""How a job's arrival is told: the batch system's prolog on the bait asks by a socket, and is answered when the job has been taken back.

Only root, and whom the bait runs as, are heard. One line asked, `{"job": "4711", "again": false}`, and one answered, `{"taken": true}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, HostError
from belljar.service.streams import peer_uid

SOCKET = "arrivals.sock"
LONGEST = 4096
SETTLE = 0.5  # seconds in which the node's daemon has heard that the job was taken back, where it cannot be asked
HEARD = 10.0  # seconds in which it has, where it can
OFF = 0.01  # between two questions to it
AGAIN = 0.5  # seconds between two tries to reach a bait that is just being restarted
NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,9}|\[[0-9]{1,9}\])?")


@asynccontextmanager
async def listening(folder: Path, arrived: Callable[[str, bool], Awaitable[bool | None]]) -> AsyncIterator[None]:
    """*arrived* returns when the job is off the bait; None: not yet; False: it could not be taken back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, BelljarError):
            async with asyncio.timeout(600):
                if peer_uid(writer.get_extra_info("socket")) in (0, os.geteuid()):
                    asked = json.loads(await reader.readline())
                    is_good = isinstance(job := asked["job"], str) and NUMBER.fullmatch(job) is not None
                    taken = is_good and await arrived(job, asked.get("again") is True)
                    writer.write(json.dumps({"taken": taken}).encode() + b"\n")
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


def tell(folder: Path, job: str, timeout: float, is_off: Callable[[], bool | None] = lambda: None) -> None:
    """From a prolog: return when the job is off this bait. Raises HostError where that will not be so, and where the bait is silent for
    *timeout* seconds. *is_off*: the node's daemon knows it, too (None: it cannot be asked); before, it would start the job when its prolog
    ends, and start it without a prolog later when that fails."""
    end, why, again = time.monotonic() + timeout, "it is not started", False
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(left)
                line.connect(str(folder / SOCKET))
                line.sendall(json.dumps({"job": job, "again": again}).encode() + b"\n")
                answer = line.makefile("rb").readline(LONGEST)
            why = "it could not take the job back" if answer else "it was stopped meanwhile"
            taken = json.loads(answer or b"{}").get("taken", False)
            told = time.monotonic()
            while not (knows := is_off()) and taken and time.monotonic() - told < (SETTLE if knows is None else HEARD):
                time.sleep(OFF)
            if knows or (taken and (knows is None or again)):
                return
            again, end = again or taken is True, end if taken is False else told + timeout
        except (OSError, ValueError) as exc:
            why = getattr(exc, "strerror", None) or str(exc)
        time.sleep(min(AGAIN, max(end - time.monotonic(), 0)))
    raise HostError(
        f"the bait in {folder} did not take job {job} back within {timeout:g} s: {why}",
        hint="Is `belljar bait run` there?",
    )
