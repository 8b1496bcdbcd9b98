"""A terminal with a process at it, as a person has it: a pseudo-terminal that is a session's own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

CLOCK = re.compile(rb"(?:\r\x1b\[Kbelljar: [^\r\n\x1b]*)+\r\x1b\[K")  # while a template is made
LONGEST = 60.0  # seconds a person would wait for words on the screen


class Terminal:
    """The person's end: `type` keys, `expect` words on the screen, `resize` the window."""

    def __init__(self, rows: int = 31, columns: int = 117) -> None:
        self.master, self.slave = pty.openpty()
        self.screen = b""  # what came since the last match
        self.process: subprocess.Popen[bytes] | None = None
        self.resize(rows, columns)

    def start(self, argv: Sequence[str | bytes], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """A process whose controlling terminal this is, with its standard streams on it unless given."""
        for name in ("stdin", "stdout", "stderr"):
            options.setdefault(name, self.slave)

        def take_terminal() -> None:
            fcntl.ioctl(self.slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            argv, env=env, start_new_session=True, preexec_fn=take_terminal, pass_fds=(self.slave,), **options
        )
        return self.process

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self.slave)

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def expect(self, pattern: bytes, longest: float = LONGEST) -> bytes:
        """Everything up to and with the pattern (a regular expression), as soon as it is there."""
        deadline = time.monotonic() + longest
        while (found := re.search(pattern, self.screen, re.DOTALL)) is None:
            if not self._more(deadline - time.monotonic()):
                raise AssertionError(f"waited {longest:g} s for {pattern!r}; the screen has {self.screen[-2000:]!r}")
        seen, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return seen

    def rest(self) -> bytes:
        """Everything until the process ends, which it must; without what belljar drew and took away before the payload began."""
        assert self.process is not None
        deadline = time.monotonic() + LONGEST
        watch = os.pidfd_open(self.process.pid)
        try:
            while not select.select([watch], [], [], 0)[0]:
                assert time.monotonic() < deadline, f"it does not end; the screen has {self.screen[-2000:]!r}"
                if select.select([self.master, watch], [], [], deadline - time.monotonic())[0] == [self.master]:
                    self._more(0)
            while self._more(0):
                pass
        finally:
            os.close(watch)
        self.process.wait()
        seen, self.screen = CLOCK.sub(b"", self.screen), b""
        return seen

    def _more(self, longest: float) -> bool:
        if longest < 0 or not select.select([self.master], [], [], longest)[0]:
            return False
        data = os.read(self.master, 1 << 16)
        self.screen += data
        return bool(data)

    def hang_up(self) -> None:
        """The window is closed, the line is cut."""
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def close(self) -> None:
        self.hang_up()
        os.close(self.slave)
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)
            self.process.wait(10)


@contextmanager
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    try:
        yield made
    finally:
        made.close()
