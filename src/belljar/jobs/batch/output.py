"""The output files of a job that goes on from a checkpoint: they end where its program was, whatever its batch system did to them.

Some systems begin them anew at each start: then what was in them is put back, from a copy beside the checkpoints. Others append:
then what the job wrote after its checkpoint, and writes again now, is cut off, unless others write to the file as well.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from shutil import copyfileobj

from belljar.host.files import private, read_json
from belljar.host.threads import in_thread
from belljar.jobs import complain
from belljar.machine.checkpoints import Checkpoint
from belljar.machine.extras import Equipment, Extra
from belljar.machine.life.life import Lifecycle
from belljar.model import RunPayload, StdinKind

DESCRIPTORS = {"stdout": 1, "stderr": 2}
RECORD = "output.json"  # in a checkpoint: how large each file was
REMEDY = "Have the batch system append to it (Slurm: --open-mode=append)."


class Output(Extra):
    """Standard output and error of this process, where they are files to which its payload writes."""

    _files: dict[str, int]

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        """Make them what they were at the checkpoint that the machine goes on from."""
        work = life.request.work
        assert isinstance(work, RunPayload)  # no other can be frozen
        ours = {name: number for name, number in DESCRIPTORS.items() if getattr(work.payload, name) is StdinKind.STREAM}
        self._files = {name: number for name, number in ours.items() if stat.S_ISREG(os.fstat(number).st_mode)}
        if (origin := life.checkpoint) is not None:
            await in_thread(lambda: self._go_on_from(origin))
        elif life.request.restore:  # it begins anew
            for name in DESCRIPTORS:
                (Path(life.request.restore) / name).unlink(missing_ok=True)
        return there

    async def freeze(self, draft: Path) -> None:
        """Copy what is new. Raises OSError."""
        await in_thread(lambda: self._keep(draft))

    def _keep(self, draft: Path) -> None:
        sizes, folder = {}, draft.parent
        for name, number in self._files.items():
            with open(f"/proc/self/fd/{number}", "rb") as file, open(folder / name, "ab", opener=private) as copy:
                file.seek(copy.tell())
                copyfileobj(file, copy)
                copy.flush()
                os.fsync(copy.fileno())
                sizes[name] = copy.tell()
        (draft / RECORD).write_text(json.dumps(sizes))

    def _go_on_from(self, origin: Checkpoint) -> None:
        try:
            for name, length in read_json(origin.folder / RECORD).items():
                if name in self._files:
                    is_ours = length == getattr(origin.standstill, name)  # nobody else has written to it
                    put_back(self._files[name], length, origin.folder.parent / name, is_ours=is_ours)
        except OSError as exc:
            complain(f"the job's earlier output cannot be put back: {exc}", REMEDY)


def put_back(number: int, length: int, copy: Path, *, is_ours: bool) -> None:
    """The file has at least *length* bytes, out of its copy where they are missing. Raises OSError."""
    if (size := os.fstat(number).st_size) > length and is_ours:
        os.ftruncate(number, length)
    os.truncate(copy, min(length, os.stat(copy).st_size))
    with open(copy, "rb") as kept, open(number, "ab", closefd=False) as file:
        kept.seek(size)
        copyfileobj(kept, file)
    if (lost := length - os.fstat(number).st_size) > 0:
        complain(f"{lost} bytes of the job's earlier output are lost", REMEDY)
