"""What a pilot was told and what it said: a line each, on disk before anything follows from it. After a kill it tells what there was."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from belljar.host.files import no_space_as_error, private_folder, write_all
from belljar.model import dumps

FILE = "journal.jsonl"


class Journal:
    """One pilot's, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = private_folder(folder) / FILE
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)

    def write(self, event: str, **facts: Any) -> None:
        """Raises NoSpace."""
        with no_space_as_error(self.path):
            write_all(self._descriptor, dumps({"time": time.time(), "event": event, **facts}) + b"\n")
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
