"""A runtime of paper: the reading verbs see machines that were never run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.image import FakeStore

from belljar import config
from belljar.cli import parser_of
from belljar.machine import Folders, MachineView
from belljar.machine.cleaning.reaper import Undone
from belljar.machine.outside.registry import Machines


class PaperReaper:
    """Finds what the test says it finds."""

    def __init__(self) -> None:
        self.found: list[Undone] = []
        self.reaped = 0

    def quick(self, patience: float) -> list[Undone]:
        return self.found

    def lost(self) -> list[Undone]:
        return []

    def full(self) -> list[Undone]:
        self.reaped += 1
        return self.found

    def finish(self, id: str) -> list[Undone]:
        self.reaped += 1
        return self.found

    def leftovers(self) -> list[Undone]:
        return self.found


@dataclass
class PaperRuntime:
    """What verbs use of a Runtime, over folders of the test."""

    folder: Path
    reaper: PaperReaper = field(default_factory=PaperReaper)
    config_file: Path | None = None
    verbose: bool = False
    images: FakeStore = field(default_factory=FakeStore)

    @property
    def folders(self) -> Folders:
        return Folders(self.folder / "run", self.folder / "scratch", self.folder / "store", self.folder / "logs")

    @property
    def machines(self) -> Machines:
        return Machines(self.folders, self.reaper)  # type: ignore[arg-type]

    @property
    def settings(self) -> config.Settings:
        return config.Settings(
            config.Paths(
                self.folder / "run", self.folder / "store", None, self.folder / "scratch", self.folder / "logs"
            )
        )

    def machine(self, id: str, *, name: str = "", outcome: dict[str, Any] | None = None, ended: bool = False) -> Path:
        """A machine's folder as its supervisor writes it."""
        folder = self.folders.ended(id) if ended else self.folders.machine(id)
        folder.mkdir(parents=True)
        asked = {"image": "debian12", "cpus": 2, "memory": 512 << 20, "network": "none", "shares": []}
        request = {
            "id": id,
            "name": name,
            "requester": "cli",
            "machine": asked,
            "work": {"payload": {"argv": ["echo", "a b"]}},
        }
        (folder / "request.json").write_text(json.dumps(request))
        self.journal(folder, "claim", pid=1)
        if outcome is not None:
            (folder / "outcome.json").write_text(
                json.dumps({"id": id, "cause": "finished", "class": "payload", "ended": 1.6e9, **outcome})
            )
        if not ended:
            (folder / "lock").touch()
        return folder

    def journal(self, folder: Path, event: str, *, time: float = 1.6e9, **facts: Any) -> None:
        with open(folder / "journal.jsonl", "a") as file:
            file.write(json.dumps({"time": time, "event": event, **facts}) + "\n")


@pytest.fixture
def runtime(tmp_path: Path) -> PaperRuntime:
    return PaperRuntime(tmp_path)


@pytest.fixture
def call(runtime: PaperRuntime) -> Callable[..., int]:
    """Call a verb as main does, in the paper runtime."""

    def call(verb: str, *words: str) -> int:
        args: argparse.Namespace = parser_of(verb).parse_args(list(words))
        return int(args.carry_out(args, runtime))

    return call


__all__ = ["MachineView", "PaperRuntime"]
