"""The interpreter that is taken along into guests: what is in it, that it needs nothing beside it, and that it is made once."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

from belljar.agent import bundle
from belljar.host.python import interpreter as made
from belljar.host.python.interpreter import Interpreter, command, interpreter

CHROOT = shutil.which("chroot", path="/usr/sbin:/sbin:/usr/bin") or "chroot"
SCRIPT = b"import json, tarfile\ndef later():\n    import ctypes, resource\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def carried(folder: Path) -> Interpreter:
    return interpreter(folder, bundle.key(), bundle.source)


@pytest.fixture(scope="module")
def unpacked(carried: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name, data, mode in carried.files():
        path = root / "belljar" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)
    return root


def test_it_is_made_once_for_a_key(folder: Path, carried: Interpreter) -> None:
    assert carried.path == folder / f"{sha256(bundle.key()).hexdigest()}.tar"
    assert interpreter(folder, b"another", lambda: SCRIPT).digest != carried.digest
    before = carried.path.stat()
    assert interpreter(folder, bundle.key(), bundle.source) == carried
    assert (carried.path.stat().st_ino, carried.path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert carried.path.stat().st_mode & 0o777 == 0o600


def test_one_that_is_lost_is_made_again_the_same(tmp_path: Path) -> None:
    first = interpreter(tmp_path, b"key", lambda: SCRIPT)
    data = first.path.read_bytes()
    first.path.unlink()
    assert interpreter(tmp_path, b"key", lambda: SCRIPT) == first and first.path.read_bytes() == data


def test_two_at_once_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, real = [], made.archive_of

    def counted(files: Iterable[tuple[str, bytes, int]]) -> bytes:
        count.append(files)
        return real(files)

    monkeypatch.setattr(made, "archive_of", counted)
    threads = [threading.Thread(target=interpreter, args=(tmp_path, b"key", lambda: SCRIPT)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1


def test_it_holds_what_the_agent_imports_as_bytecode_and_little_else(carried: Interpreter) -> None:
    names = {name for name, _, _ in carried.files()}
    library = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    assert {
        "python",
        "loader",
        f"{library}/os.pyc",
        f"{library}/tarfile.pyc",
        f"{library}/ctypes/__init__.pyc",
    } <= names
    assert not any(name.endswith(".py") or "asyncio" in name or "_lzma" in name for name in names)
    assert carried.path.stat().st_size < 40 << 20


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone changes its root folder")
def test_it_runs_the_agent_in_a_root_that_holds_nothing_else(unpacked: Path) -> None:
    argv = [CHROOT, str(unpacked), *command("/belljar").split(), "/belljar/agent.pyc", "--nonsense"]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60, env={})
    assert done.returncode == 2 and b"usage: agent.pyc" in done.stderr, done.stderr
    says = "import sys, ctypes, json, resource, tarfile, termios; ctypes.CDLL(None).getpid; print(sys.prefix)"
    argv = [CHROOT, str(unpacked), *command("/belljar").split(), "-c", says]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60, env={})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"/belljar\n", b"")


def test_its_own_loader_is_no_affair_of_its_children(unpacked: Path) -> None:
    says = "import os; os.execv('/bin/sh', ['sh', '-c', 'env; true'])"
    argv = [*command(str(unpacked / "belljar")).split(), "-c", says]
    done = subprocess.run(argv, capture_output=True, check=True, timeout=60, env={})
    assert b"LD_" not in done.stdout and b"PYTHON" not in done.stdout
