"""The caller's terminal in raw mode, and always back again."""

from __future__ import annotations

import atexit
import termios
import tty
from contextlib import suppress
from typing import Any


class RawTerminal:
    """Every byte goes to the guest, which echoes and interprets them. `restore` gives the terminal back as it was."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] = termios.tcgetattr(descriptor)
        atexit.register(self.restore)

    def enter(self) -> None:
        tty.setraw(self._descriptor, termios.TCSADRAIN)

    def restore(self) -> None:
        """Give it back. Restoring twice, or a terminal that is gone, is fine."""
        with suppress(termios.error):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
