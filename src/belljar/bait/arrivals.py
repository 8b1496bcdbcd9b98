"""How a job's arrival is told: the batch system's prolog on the bait asks by a socket, and is answered when the job has been taken back.

Only root, and whom the bait runs as, are heard. One line asked, `{"job": "4711"}`, and one answered, `{"taken": true}`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, HostError

SOCKET = "arrivals.sock"
LONGEST = 4096
SETTLE = 0.5  # seconds in which the node's daemon has heard that the job was taken back, where it cannot be asked
OFF = 0.01  # between two questions to it
AGAIN = 0.5  # seconds between two tries to reach a bait that is just being restarted
NUMBER = re.compile(r"[0-9]{1,18}(\.[0-9]{1,9}|\[[0-9]{1,9}\])?")


@asynccontextmanager
async def listening(folder: Path, arrived: Callable[[str], Awaitable[bool]]) -> AsyncIterator[None]:
    """*arrived* returns when the job is off the bait; False: it could not be taken back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError, BelljarError):
            async with asyncio.timeout(600):
                if _peer(writer.get_extra_info("socket")) in (0, os.geteuid()):
                    job = json.loads(await reader.readline())["job"]
                    is_good = isinstance(job, str) and NUMBER.fullmatch(job) is not None and await arrived(job)
                    writer.write(json.dumps({"taken": is_good}).encode() + b"\n")
                    await writer.drain()
        writer.close()

    path = folder / SOCKET
    with suppress(FileNotFoundError):
        path.unlink()  # of a bait that was killed: the folder's lock is ours
    server = await asyncio.start_unix_server(serve, path, limit=LONGEST)
    os.chmod(path, 0o600)
    try:
        yield
    finally:
        server.close()


def tell(folder: Path, job: str, timeout: float, is_off: Callable[[], bool] = lambda: False) -> None:
    """From a prolog: return when the job is off this bait. Raises HostError where that is not so in time. *is_off*: the node's daemon
    knows that, too; before, it might start the job when its prolog ends."""
    import time

    end, why = time.monotonic() + timeout, "it is not started"
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(left)
                line.connect(str(folder / SOCKET))
                line.sendall(json.dumps({"job": job}).encode() + b"\n")
                answer = line.makefile("rb").readline(LONGEST)
            if answer and json.loads(answer).get("taken") is True:
                heard = time.monotonic() + SETTLE
                while time.monotonic() < heard and not is_off():
                    time.sleep(OFF)
                return
            why = "it could not take the job back" if answer else "it was stopped meanwhile"
        except (OSError, ValueError) as exc:
            why = getattr(exc, "strerror", None) or str(exc)
        time.sleep(min(AGAIN, max(end - time.monotonic(), 0)))
    raise HostError(
        f"the bait in {folder} did not take job {job} back within {timeout:g} s: {why}",
        hint="Is `belljar bait run` there?",
    )


def _peer(connection: socket.socket) -> int:
    """uid of the process at the other end."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)
