"""A lock dies with its holder, and with nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from belljar.errors import LockTimeout
from belljar.host.locks import is_locked, locked, try_lock
from belljar.machine.states import class_of_error
from belljar.model import OutcomeClass

# A stranger who may read the file, and tries each lock there is on it: flock's, then fcntl's, exclusive and shared.
GRAB = """
import fcntl, os, struct, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    pass
for kind in (fcntl.F_WRLCK, fcntl.F_RDLCK):
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, 0, 0, 0, 0))
    except OSError:
        pass
print("held", flush=True)
sys.stdin.read()
"""
HOLD = "import sys; from pathlib import Path; from belljar.host.locks import try_lock; l = try_lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_second_taker_gets_nothing_until_the_first_gives_it_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = try_lock(path)
    assert first is not None and try_lock(path) is None and is_locked(path)
    first.release()
    first.release()
    assert not is_locked(path)
    second = try_lock(path)
    assert second is not None
    second.release()


def test_kill_9_of_the_holder_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == b"held\n" and is_locked(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert not is_locked(path)


def test_a_lock_taken_on_a_file_that_was_replaced_meanwhile_is_a_lock_on_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    old = try_lock(path)
    assert old is not None
    path.unlink()
    new = try_lock(path)
    assert new is not None and os.path.samestat(os.fstat(new.descriptor), path.stat())
    new.release()
    old.release()


def test_looking_at_a_lock_makes_no_file(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


def test_waiting_ends_at_the_deadline_and_says_for_what(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = try_lock(path)
    assert held is not None
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(LockTimeout, match="waiting to build a thing"), locked(path, timeout=0.02, what="build a thing"):
        pytest.fail("entered with the lock held elsewhere")
    assert signal.getsignal(signal.SIGALRM) is before
    held.release()


def test_a_waiter_goes_on_as_soon_as_the_holder_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = try_lock(path)
    assert held is not None
    threading.Timer(0.02, held.release).start()
    with locked(path, timeout=30, what="go on"):
        assert is_locked(path)
    assert not is_locked(path)


def test_a_signal_of_the_callers_own_is_his_while_he_waits(tmp_path: Path) -> None:
    """A supervisor forwards ALRM; nobody may take it from him for the time of a wait."""
    path, heard = tmp_path / "lock", list[int]()
    held = try_lock(path)
    assert held is not None

    def hear(number: int, _: object) -> None:
        heard.append(number)
        held.release()

    before = signal.signal(signal.SIGALRM, hear)
    try:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGALRM)).start()
        with locked(path, timeout=30, what="go on"):
            assert heard == [signal.SIGALRM]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_gives_up_does_not_get_it_later(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(LockTimeout, match="held by another process for") as caught:
            with locked(path, timeout=0.02, what="go on"):
                pytest.fail("entered with the lock held elsewhere")
        assert class_of_error(caught.value) is OutcomeClass.TRANSIENT  # no fault of this node's
    finally:
        holder.communicate()
    with locked(path, timeout=30, what="go on"):
        pass  # after the abandoned waiter, who gave it back


def test_a_waiter_in_a_thread_gets_it_too(tmp_path: Path) -> None:
    path, got = tmp_path / "lock", []
    held = try_lock(path)
    assert held is not None

    def wait() -> None:
        with locked(path, timeout=30, what="go on"):
            got.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    held.release()
    thread.join(30)
    assert got == [True]


def test_shared_holders_keep_a_lone_taker_out(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    one, two = try_lock(path, shared=True), try_lock(path, shared=True)
    assert one is not None and two is not None and try_lock(path) is None
    one.release()
    assert try_lock(path) is None
    two.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_stranger_who_may_only_read_the_file_keeps_nobody_from_using_it(
    public: Path, stranger: Callable[[Path], None]
) -> None:
    """flock gives an exclusive lock to whoever can open the file."""
    stranger(public)
    shared = try_lock(public, shared=True)
    assert shared is not None and not is_locked(public)
    shared.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_strangers_shared_lock_is_no_exclusive_one(public: Path, stranger: Callable[[Path], None]) -> None:
    """It counts, as that of a machine of theirs; who wants the file alone waits no longer than the deadline."""
    stranger(public)
    assert try_lock(public) is None
    with pytest.raises(LockTimeout, match=f"{public}: held by "):
        with locked(public, timeout=0.02, what="remove it"):
            pytest.fail("entered with the lock held elsewhere")


def test_a_file_that_others_may_read_is_locked_as_any_other(public: Path) -> None:
    alone = try_lock(public)
    assert alone is not None and is_locked(public) and try_lock(public, shared=True) is None
    threading.Timer(0.02, alone.release).start()
    with locked(public, timeout=30, what="go on", shared=True):
        assert not is_locked(public) and try_lock(public) is None


@pytest.fixture
def public() -> Iterator[Path]:
    """A lock's file that everybody may read, in a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "lock")
        path.touch()
        path.chmod(0o644)
        yield path


@pytest.fixture
def stranger() -> Iterator[Callable[[Path], None]]:
    """Another user, who holds what they can get of a file's locks."""
    started = list[subprocess.Popen[bytes]]()

    def hold(path: Path) -> None:
        argv = ["/usr/bin/python3", "-Ic", GRAB, str(path)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, user=65534, group=65534, extra_groups=[], cwd="/")
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"held\n"

    yield hold
    for process in started:
        process.communicate()
