"""Images with the agent put in, for guests that boot by firmware with an init of their own: a layer on top of the image.

    images/layers/<image>-<agent>.qcow2    what the workshop changed; the image below it is never written
    images/layers/<image>-<agent>.json     the layer's own digest, written last; without it there is no layer
    images/layers/<image>-<agent>.lock     held by whoever makes it

A layer that is made again is another one, for its files have other times: its digest is part of a template's key.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import file_digest
from pathlib import Path

from belljar.errors import BelljarError
from belljar.host.files import no_space_as_error, read_json, sync_file, write_whole
from belljar.host.interpreter import Interpreter
from belljar.host.threads import in_thread
from belljar.image import AGENT_PATH, PYTHON_PATH, UNIT_PATH, Image, Overlays, agent_source, agent_unit, layer_name
from belljar.machine.life.waiting import Showing, in_silence, lock_of
from belljar.machine.workshop.workshop import Workshop
from belljar.model import dumps

PATIENCE = 900.0  # seconds: another process boots a machine and works in it


class Layers:
    """Layers of one user."""

    def __init__(
        self,
        folder: Callable[[], Path],
        python_for: Callable[[Image], Interpreter | None],
        overlays: Overlays,
        workshop: Callable[[], Workshop],
        showing: Showing = in_silence,
    ) -> None:
        self._folder, self._python_for, self._overlays = folder, python_for, overlays
        self._workshop, self._showing = workshop, showing

    async def get(self, image: Image) -> tuple[Image, str]:
        """The image as the layer has it, and the layer's digest; made now where it is missing, by one process at a time.
        Raises WorkshopFailed, LockTimeout, NoSpace."""
        python = await in_thread(lambda: self._python_for(image))
        path = self._folder() / f"{layer_name(image, python)}.qcow2"
        if digest := _known(path):
            return replace(image, disk=path), digest
        with self._showing(f"Putting the agent into {image.called}, once, in a machine", ""):
            lock = await lock_of(
                path.with_suffix(".lock"), timeout=PATIENCE, what=f"put the agent into {path.stem:.12}"
            )
            try:
                digest = _known(path) or await self._make(path, image, python)
            finally:
                lock.release()
        return replace(image, disk=path), digest

    async def _make(self, path: Path, image: Image, python: Interpreter | None) -> str:
        draft = path.with_suffix(".draft")
        draft.unlink(missing_ok=True)
        try:
            self._overlays.create(draft, image, None)
            workshop = await in_thread(self._workshop)  # its image may have to be built first
            unit = agent_unit(is_carried=python is not None)
            carried = (PYTHON_PATH, python.path) if python else None
            await workshop.inject(draft, (AGENT_PATH, agent_source()), (UNIT_PATH, unit), carried)
            with no_space_as_error(path):
                draft.chmod(0o400)
                sync_file(draft)
                digest = _digest(draft)
                path.with_suffix(".json").unlink(missing_ok=True)
                draft.rename(path)
                write_whole(path.with_suffix(".json"), dumps({"sha256": digest, **_stamp(path)}), durable=True)
        finally:
            draft.unlink(missing_ok=True)
        return digest


def _known(path: Path) -> str:
    """The digest of a layer that is whole; empty where there is none."""
    with suppress(OSError, ValueError, BelljarError):
        said = read_json(path.with_suffix(".json"))
        if {name: said.get(name) for name in ("size", "mtime_ns", "ino")} == _stamp(path):
            return str(said["sha256"])
    return ""


def _stamp(path: Path) -> dict[str, int]:
    facts = os.stat(path, follow_symlinks=False)
    return {"size": facts.st_size, "mtime_ns": facts.st_mtime_ns, "ino": facts.st_ino}


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()
