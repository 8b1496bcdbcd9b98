"""A shell of root's in an ssh guest that stays: one script after the other on one session.

An emulated guest takes longer to begin a session than to do what most scripts of ours want.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from belljar.errors import ProtocolViolation
from belljar.guest.ssh_link import MOST_OUTPUT, Answer, library, lost

COMMAND = "sh -c 'command -v bash > /dev/null && exec bash --norc; exec sh'"
LONGEST_CODE = 8


class Shell:
    """On one session, which is its own. Whoever breaks off a script closes it: the next one would get its answer."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self._mark = os.urandom(12).hex().encode()
        self._rest = {False: bytearray(), True: bytearray()}  # of what it says; and of what it complains of

        self._is_closed = False

    @property
    def is_over(self) -> bool:
        return bool(self._is_closed or self._process.channel.is_closing())

    def close(self) -> None:
        self._is_closed = True
        self._process.channel.abort()

    async def ask(self, script: bytes) -> Answer:
        """What a script said and how it ended. It has no input. Raises AgentLost, ProtocolViolation."""
        is_done = False
        try:
            answer = await self._ask(script)
            is_done = True
            return answer
        except (library().Error, OSError) as exc:
            raise lost(exc) from exc
        finally:
            if not is_done:
                self.close()

    async def _ask(self, script: bytes) -> Answer:
        mark = self._mark
        told = b"(\n%b\n) < /dev/null\nprintf '\\n%b %%d\\n' $?; printf '\\n%b\\n' >&2\n" % (script, mark, mark)
        self._process.stdin.write(told)
        out, err = await asyncio.gather(
            self._until(self._process.stdout, b"\n" + mark + b" ", is_error=False),
            self._until(self._process.stderr, b"\n" + mark + b"\n", is_error=True),
        )
        code = await self._until(self._process.stdout, b"\n", is_error=False)
        if not code.isdigit() or len(code) > LONGEST_CODE:
            raise ProtocolViolation("a script in the guest ended in no way a shell knows")
        return Answer(int(code), out, err)

    async def _until(self, reader: Any, end: bytes, *, is_error: bool) -> bytes:
        """What comes before *end*. What comes after it waits for the next time."""
        rest = self._rest[is_error]
        while (at := rest.find(end)) < 0:
            data = await reader.read(1 << 16)
            if not data:
                raise ConnectionResetError("the shell in the guest ended")
            rest += data
            if len(rest) > MOST_OUTPUT:
                raise ProtocolViolation("the guest says more than was asked of it")
        said = bytes(rest[:at])
        del rest[: at + len(end)]
        return said
