"""The output files of a job that goes on from a checkpoint: they end where its program was, whatever its batch system did to them.

Some systems begin them anew at each start: then what was in them is put back, from a copy beside the checkpoints. Others append:
then what the job wrote after its checkpoint, and writes again now, is cut off, unless others write to the file as well.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path

from belljar.guest import Standstill, Streams
from belljar.guest.stdio import FdSink
from belljar.hints import Any
from belljar.host.files import private, read_json, write_all, write_whole
from belljar.host.threads import in_thread
from belljar.jobs import complain
from belljar.records import replace

DESCRIPTORS = {"stdout": 1, "stderr": 2}
RECORD = "output.json"  # by checkpoint and stream
CHUNK = 1 << 20
REMEDY = "Have the batch system append to it (Slurm: --open-mode=append)."


class OwnFile(FdSink):
    """A descriptor of this process that is a file, and the copy of what is in it."""

    def __init__(self, number: int, copy: Path) -> None:
        super().__init__(number)
        self._number, self._copy = number, copy
        self._position = 0  # bytes that the job has written to this stream, at all of its starts
        self._more = os.fstat(number).st_size  # bytes in the file beyond those
        self._is_ours = self._more == 0  # nobody else has written to it

    def go_on(self, position: int, more: int, is_ours: bool) -> None:
        """Make it what it was at a checkpoint. Raises OSError."""
        wanted, size = position + more, os.fstat(self._number).st_size
        self._position, self._is_ours = position, is_ours
        if size > wanted and is_ours:
            os.ftruncate(self._number, wanted)
        with open(self._copy, "rb", buffering=0) as copy:
            copy.seek(size)
            while data := copy.read(max(min(CHUNK, wanted - copy.tell()), 0)):
                write_all(self._number, data)
        os.truncate(self._copy, min(wanted, os.stat(self._copy).st_size))
        self._more = os.fstat(self._number).st_size - position
        if self._more < more:
            complain(f"{more - self._more} bytes of the job's earlier output are lost", REMEDY)

    async def keep(self) -> tuple[int, bool]:
        """Copy what is new. What `go_on` is to be told of a checkpoint that was made. Raises OSError."""
        await in_thread(self._copy_on)
        return self._more, self._is_ours

    def _copy_on(self) -> None:
        more = os.fstat(self._number).st_size - self._position
        self._is_ours, self._more = self._is_ours and more == self._more, more
        with (
            open(f"/proc/self/fd/{self._number}", "rb", buffering=0) as file,
            open(self._copy, "ab", buffering=0, opener=private) as copy,
        ):
            file.seek(copy.tell())
            while data := file.read(CHUNK):
                write_all(copy.fileno(), data)
            os.fsync(copy.fileno())

    def _write(self, data: bytes) -> None:
        super()._write(data)
        self._position += len(data)


class Output:
    """Standard output and error of the job with this folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, OwnFile] = {}

    def streams(self, streams: Streams) -> Streams:
        """The streams of this start."""
        for name, number in DESCRIPTORS.items():
            if getattr(streams, name) is not None and stat.S_ISREG(os.fstat(number).st_mode):
                self._files[name] = OwnFile(number, self._folder / name)
        stdout, stderr = (self._files.get(name, getattr(streams, name)) for name in DESCRIPTORS)
        return replace(streams, stdout=stdout, stderr=stderr)

    def go_on(self, checkpoint: int, at: Standstill) -> None:
        """This start goes on from that checkpoint."""
        before = self._record().get(str(checkpoint), {})
        for name in self._files.keys() & before.keys():
            try:
                self._files[name].go_on(getattr(at, name), *before[name])
            except OSError as exc:
                complain(f"the job's earlier {name} cannot be put back: {exc}", REMEDY)

    async def note(self, checkpoint: int) -> None:
        """This checkpoint was made."""
        try:
            states = {name: await file.keep() for name, file in self._files.items()}
            record = json.dumps({**self._record(), str(checkpoint): states})
            write_whole(self._folder / RECORD, record.encode(), durable=True)
        except OSError as exc:
            complain(f"no copy of the job's output: {exc}", REMEDY)

    def _record(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return read_json(self._folder / RECORD)
        return {}
