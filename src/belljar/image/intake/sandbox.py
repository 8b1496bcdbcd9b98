"""Run a program on bytes nobody trusts: under limits, without rights, on open files instead of paths.

`run` gives the program each file as /proc/self/fd/N: it can open that file and no other: when we are root, it runs as the user nobody.
`run_in` is for programs that work in a folder of ours: by the user's own rights, or as root of a user namespace.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, CommandFailed, ImageCorrupt, ImageTooLarge, NoSpace
from belljar.host.commands import SEARCH_PATH, path_of
from belljar.image.store import qcow2

NOBODY = 65534
# Signals that end a process, sent by a person or a batch system.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
LARGEST_ANSWER, LARGEST_COMPLAINT = 256 << 20, 64 << 10
WATCH, UNPACKING, CONVERSION = 0.25, 60, 3600  # seconds
GZIP = b"\x1f\x8b\x08"
# How a packed file begins -> what unpacks it.
PACKED = {
    GZIP: ("gzip", "-dc"),
    b"\xfd7zXZ\0": ("xz", "-dc", "--memlimit-decompress=1GiB"),
    b"\x28\xb5\x2f\xfd": ("zstd", "-dcq", "--memory=1024MB"),
}
ENVIRONMENT = {"PATH": SEARCH_PATH, "LC_ALL": "C"}
MEMORY = 8 << 30  # address space; qemu-img reserves much and touches little
AS_NOBODY = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all")
# As an ordinary user: root of a user namespace, with the subordinate ids of /etc/subuid.
WITHOUT_ROOT = ("unshare", "--user", "--map-auto", "--map-root-user", "--mount", "--")
MKE2FS = ("mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m", "0")
# Called now and then while a program runs, to show how far it is; what it raises ends the program.
Watch = Callable[[], object]
# What root keeps: to write files of any owner and mode, or nothing.
FILES_ONLY = "-all,+chown,+dac_override,+dac_read_search,+fowner,+fsetid,+setfcap,+mknod"


def run(
    argv: Sequence[str],
    files: Sequence[Path],
    seconds: int,
    largest: int,
    *,
    writable: Sequence[Path] = (),
    stdin: Path | None = None,
    stdout: Path | None = None,
    fine: Sequence[int] = (0,),
    watch: Watch | None = None,
) -> bytes:
    """Run *argv* to its end, for at most so many *seconds*, and return what it printed. No file that it writes, its standard
    output too, is larger than *largest*. `{0}`, `{1}`... in argv stand for *files*, then for *writable*, which exist already;
    *stdin* and *stdout* may be files too. *watch* is called now and then meanwhile, to show how far it is. Raises ImageCorrupt,
    with the last line of its errors, when its exit code is not *fine* or its time is up; ImageTooLarge, NoSpace, CommandMissing."""
    confined = [*_limits(largest, seconds), f"--as={MEMORY}", path_of("setpriv"), "--no-new-privs", "--pdeathsig=KILL"]
    confined += AS_NOBODY if os.geteuid() == 0 else ()
    with ExitStack() as stack:
        lent = [_lent(stack, path, os.O_RDONLY) for path in files]
        lent += [_lent(stack, path, os.O_RDWR) for path in writable]
        names = [f"/proc/self/fd/{descriptor}" for descriptor in lent]
        words = [*confined, path_of(argv[0]), *(word.format(*names) for word in argv[1:])]
        source = _opened(stack, stdin or Path(os.devnull))
        code, complaint, printed = _ended(
            argv[0], words, seconds, stdout, watch, stdin=source, pass_fds=lent, env=ENVIRONMENT, cwd="/"
        )
    if code not in fine:
        raise _failure(argv[0], code, complaint)
    return printed


def run_in(
    folder: Path,
    argv: Sequence[str],
    seconds: int,
    largest: int,
    *,
    with_owners: bool = False,
    env: Mapping[str, str] | None = None,
    stdout: Path | None = None,
    watch: Watch | None = None,
) -> bytes:
    """Run *argv* in a folder of ours, and return what it printed; limits as for `run`. *with_owners*: it may make files of any owner, for
    which an ordinary user has a user namespace; else it has the rights of this user, and as root no more than to its own files.
    Raises CommandMissing; CommandFailed with all it said, when it failed or its time is up; what *watch* raises."""
    is_root, name = os.geteuid() == 0, argv[0]
    words = [*_limits(largest, seconds), *(WITHOUT_ROOT if with_owners and not is_root else ())]
    words += [path_of("setpriv"), "--no-new-privs", "--pdeathsig=KILL"]
    words += ("--inh-caps=-all", f"--bounding-set={FILES_ONLY if with_owners else '-all'}") if is_root else ()
    environment = {**ENVIRONMENT, "TMPDIR": str(folder), **(env or {})}
    words += [path_of(name), *argv[1:]]
    code, complaint, printed = _ended(
        name, words, seconds, stdout, watch, stdin=subprocess.DEVNULL, env=environment, cwd=folder
    )
    if code == -signal.SIGXFSZ:
        complaint += f"\n{name}: file size limit exceeded"
    if code:
        raise CommandFailed(complaint or f"{name} failed")
    return printed


def remove(folder: Path) -> None:
    """Remove a folder that may have files of any owner, however deep."""
    run_in(folder.parent, ["rm", "-rf", "--", folder.name], CONVERSION, LARGEST_COMPLAINT, with_owners=True)


def make_ext4(folder: Path, disk: Path, size: int, *options: str) -> None:
    """Write the folder `tree` in *folder* into a file system, and remove it. Nothing is mounted; no journal, which a disk that is
    thrown away does not need."""
    argv = [*MKE2FS, "-L", "belljar", *options, "-d", "tree", str(disk), f"{size >> 10}k"]
    run_in(folder, argv, CONVERSION, size, with_owners=True)
    remove(folder / "tree")


def check_qcow2(disk: Path, largest: int) -> int:
    """The size of the disk in it. Raises ImageCorrupt or ImageTooLarge unless QEMU may open this file as it is."""
    size = qcow2.check_alone(disk, largest)
    leaks = 3  # clusters nobody uses: harmless
    try:
        run(["qemu-img", "check", "-q", "-f", "qcow2", "{0}"], [disk], CONVERSION, 1 << 20, fine=(0, leaks))
    except ImageTooLarge as exc:
        raise ImageCorrupt(f"{disk}: its tables have more errors than qemu-img may print") from exc
    return size


def convert(source: Path, kind: str, target: Path, target_kind: str, largest: int) -> None:
    """Write a disk anew, as raw or qcow2. Holes stay holes. The source's kind is given: its bytes are never taken for a header."""
    target.touch(0o600)
    argv = ["qemu-img", "convert", "-f", kind, "-O", target_kind, "{0}", "{1}"]
    run(argv, [source], CONVERSION, largest, writable=[target])


def unpacked(data: bytes, largest: int, what: str) -> bytes:
    """What was packed by gzip, xz or zstd; anything else as it is. Raises ImageCorrupt, also for more than *largest* bytes;
    CommandMissing, NoSpace."""
    program = next((argv for magic, argv in PACKED.items() if data.startswith(magic)), None)
    if program is None:
        return data
    with in_memory() as packed:
        packed.write_bytes(data)
        try:
            return run(program, [], UNPACKING, largest, stdin=packed)
        except ImageTooLarge as exc:
            raise ImageCorrupt(f"{what}: larger than the limit ({largest} bytes)") from exc


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty file that nobody else finds, and that is gone with us."""
    with os.fdopen(os.memfd_create("belljar")) as file:
        yield Path(f"/proc/self/fd/{file.fileno()}")


def _opened(stack: ExitStack, path: Path, flags: int = os.O_RDONLY) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, descriptor)
    return descriptor


def _lent(stack: ExitStack, path: Path, flags: int) -> int:
    """Open it. The file belongs to the user nobody while the program runs, which opens /proc/self/fd/N with its own rights."""
    descriptor = _opened(stack, path, flags)
    if os.geteuid() == 0:
        os.fchown(descriptor, NOBODY, -1)
        stack.callback(os.fchown, descriptor, 0, -1)
    return descriptor


def _limits(largest: int, seconds: int) -> list[str]:
    return [path_of("prlimit"), f"--fsize={largest}", f"--cpu={max(1, seconds)}", "--core=0"]


def _ended(
    name: str, argv: list[str], seconds: int, stdout: Path | None, watch: Watch | None, **how: Any
) -> tuple[int, str, bytes]:
    """Its exit code, what it complained of, and what it printed, unless that went into the file *stdout*. *how*: for Popen."""
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        to = _opened(stack, stdout, os.O_WRONLY | os.O_CREAT | os.O_EXCL) if stdout else out
        # It hears no order to end: a batch system gives that to all processes of a job, and a program that obeys would seem to have failed.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, signals)
        process = subprocess.Popen(argv, stdout=to, stderr=err, start_new_session=True, **how)
        stack.callback(process.wait)
        stack.callback(process.kill)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        descriptor, poller, deadline = os.pidfd_open(process.pid), select.poll(), time.monotonic() + seconds
        stack.callback(os.close, descriptor)
        poller.register(descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0 and not poller.poll(1000 * min(left, WATCH if watch else left)):
            if watch:
                watch()
        process.kill()
        code = process.wait()
        err.seek(0)
        complaint = err.read(LARGEST_COMPLAINT).decode(errors="replace").strip()
        complaint += f"\n{name}: not finished after {seconds} s, killed" * (left <= 0)
        out.seek(0)
        return code, complaint, out.read(min(LARGEST_ANSWER, os.fstat(out.fileno()).st_size))


def _failure(name: str, code: int, complaint: str) -> BelljarError:
    if code == -signal.SIGXFSZ or "File too large" in complaint:
        return ImageTooLarge(f"{name}: what it unpacks is larger than the limit")
    end = f"exit {code}" if code > 0 else f"killed by signal {-code}"
    text = ": ".join([name, end, *complaint.splitlines()[-1:]])
    return NoSpace(text) if "No space left on device" in complaint else ImageCorrupt(text)
