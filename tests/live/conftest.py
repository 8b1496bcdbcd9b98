"""Real machines: the `belljar` command as its users call it, with a store of the tests' own and fresh folders.

The store (images, templates) is shared by all live tests and kept between runs; machines, scratch and records are each
test's own. `BELLJAR_TEST_STORE` names another store.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STORE = Path(os.environ.get("BELLJAR_TEST_STORE", ROOT / ".state/store"))
LONGEST = 240  # seconds any one command may take here; the slowest is a template being made on a busy host

Completed = subprocess.CompletedProcess[bytes]

# A shell ignores INT and QUIT for what it runs in the background, nohup HUP; belljar heeds that, and the tests of these
# signals would wait for ever.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "live" in item.path.parts:
            item.add_marker(pytest.mark.live)


class Belljar:
    """The command, in one set of folders."""

    def __init__(self, folder: Path, store: Path = STORE, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.keepers: list[subprocess.Popen[bytes]] = []
        self.run_folder, self.scratch, self.logs = folder / "run", folder / "scratch", folder / "logs"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("BELLJAR_")},
            "BELLJAR_PATHS_RUN": str(self.run_folder),
            "BELLJAR_PATHS_SCRATCH": str(self.scratch),
            "BELLJAR_PATHS_LOGS": str(self.logs),
            "BELLJAR_PATHS_STORE": str(store),
            **(settings or {}),
        }

    def argv(self, *words: str | bytes) -> list[str | bytes]:
        return [sys.executable, "-I", "-m", "belljar", *words]

    def __call__(self, *words: str | bytes, env: Mapping[str, str] | None = None, **options: Any) -> Completed:
        """Run to the end with output captured; stdin is /dev/null unless given."""
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("timeout", LONGEST)
        return subprocess.run(self.argv(*words), env={**self.env, **(env or {})}, check=False, **options)

    def run(self, *words: str | bytes, **options: Any) -> Completed:
        return self("run", *words, **options)

    def popen(
        self, *words: str | bytes, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        keeper = subprocess.Popen(self.argv(*words), env={**self.env, **(env or {})}, **options)
        self.keepers.append(keeper)
        return keeper

    def close(self) -> None:
        """End what a test left running, and close its pipes."""
        for keeper in self.keepers:
            if keeper.poll() is None:
                keeper.kill()
            for pipe in (keeper.stdin, keeper.stdout, keeper.stderr):
                if pipe is not None:
                    pipe.close()
            keeper.wait(10)
        for pid in self.domains():
            os.kill(pid, signal.SIGKILL)

    def json(self, *words: str) -> Any:
        done = self(*words, "--format", "json")
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def machines(self) -> list[str]:
        return _names(self.run_folder / "machines")

    def leftovers(self) -> list[str]:
        """Everything of a machine that is still there: folders, overlays, identities, processes."""
        files = [str(path) for folder in ("machines", "identities") for path in _paths(self.run_folder / folder)]
        return files + [str(path) for path in _paths(self.scratch)] + [f"qemu {pid}" for pid in self.domains()]

    def power_cut(self) -> None:
        """All processes of these folders are gone, `run` was on a tmpfs, and the host was started again."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while self.processes():
            assert time.monotonic() < end, "killed processes stay"
            time.sleep(0.01)
        shutil.rmtree(self.run_folder)
        now = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        for journal in self.logs.glob(".begun-*/*/journal.jsonl"):
            facts = journal.stat()
            journal.write_text(journal.read_text().replace(now, "00000000-0000-4000-8000-000000000000"))
            os.utime(journal, (facts.st_atime, facts.st_mtime))

    def processes(self) -> list[int]:
        """Everything that runs with these folders, but for zombies."""
        found = []
        for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
            with contextlib.suppress(OSError):
                if f"={self.run_folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def domains(self) -> list[int]:
        """QEMU processes whose machine lived in our folders, or that were started for an id we know."""
        known = {name[:12] for name in _names(self.logs)} | set(self.machines())
        return [pid for pid, id in marked_processes() if id in known or str(self.folder) in command_line(pid)]


def marked_processes() -> list[tuple[int, str]]:
    """(pid, machine) of every QEMU with belljar's mark on this host."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            for word in command_line(int(entry)).split("\0"):
                if word.startswith("guest=belljar-"):
                    found.append((int(entry), word.removeprefix("guest=belljar-").partition(",")[0]))
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture(autouse=True)
def in_a_place_that_everybody_may_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job begins where its caller is, and the checkout may lie in a home that only its owner can enter."""
    monkeypatch.chdir("/")


@pytest.fixture
def belljar(tmp_path: Path) -> Iterator[Belljar]:
    """The command in folders of its own; whatever the test did, nothing of its machines is left alive."""
    command = Belljar(tmp_path)
    yield command
    command.close()


@pytest.fixture(scope="session", autouse=True)
def default_image() -> None:
    """The default image is in the store before any test counts its seconds; one worker builds it, the others wait."""
    if os.environ.get("BELLJAR_TEST_STORE") is None:
        STORE.parent.mkdir(exist_ok=True)
    env = {**os.environ, "BELLJAR_PATHS_STORE": str(STORE)}
    code = "from belljar.assembly import Runtime; Runtime().images.ensure('debian12')"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def _paths(folder: Path) -> list[Path]:
    return [folder / name for name in _names(folder)]
