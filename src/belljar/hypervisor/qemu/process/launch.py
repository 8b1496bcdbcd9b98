"""Runs QEMU as a child that cannot outlive us: setpriv gives it a death signal and takes every privilege away.

It inherits exactly the descriptors it is given, writes what it has to say into a capped log, ignores the signals of
the terminal and the batch system (those are for the supervisor), and its end is an event, not a guess.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import stat
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from belljar.errors import CommandMissing, HostError, ImageCorrupt, NoMemory, TemplateError
from belljar.hints import TYPE_CHECKING
from belljar.host.commands import SEARCH_PATH, path_of
from belljar.host.files import private, write_all
from belljar.host.threads import MORE_THREADS
from belljar.hypervisor import DomainSpec, Template
from belljar.hypervisor.qemu.template.folders import DISK, RAM, STATE, TemplateStore
from belljar.model import SEED, NetworkMode
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    from belljar.host.guard.egress import Egress

FEW_WORKERS = 8  # where a limit counts their stacks (batch/job/policy.py, DATA_SPACE)
WAYS = {True: os.O_RDONLY, False: os.O_RDWR}  # by whether a file is only read
LOG_LIMIT = 1 << 20  # a guest can make QEMU complain without end
TAIL = 8 << 10
# One heap for all threads: each further one reserves 64 MiB, and a job's limit on virtual memory counts what is reserved.
ENVIRONMENT = {"PATH": SEARCH_PATH, "LC_ALL": "C", "HOME": "/nonexistent", "MALLOC_ARENA_MAX": "1"}

# Sent by batch systems and terminals to the whole process group or session: the supervisor answers them, QEMU must not.
# (The vCPU threads of KVM unblock the one they use themselves.)
NOT_FOR_QEMU = frozenset(
    (
        signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE,
        signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGTSTP,
        signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH, signal.SIGURG, signal.SIGIO,
    )
)  # fmt: skip


def confined(
    argv: Sequence[str], owner: tuple[int, int], *, capabilities: Iterable[str] = (), groups: Iterable[int] = ()
) -> list[str]:
    """The command line that runs *argv* as *owner* with no way to gain rights, and kills it when we die."""
    words = [path_of("setpriv", "Install util-linux."), "--pdeathsig=KILL", "--no-new-privs"]
    if os.geteuid() == 0:
        kept = "".join(f",+{name}" for name in capabilities)
        words += [f"--reuid={owner[0]}", f"--regid={owner[1]}"]
        gids = ",".join(map(str, groups))
        words += [f"--groups={gids}" if gids else "--clear-groups"]
        words += [f"--bounding-set=-all{kept}", f"--inh-caps=-all{kept}", "--ambient-caps=-all"]
    return [*words, "--", *argv]


def kvm_groups() -> tuple[int, ...]:
    """The group that may use /dev/kvm, where not everybody may."""
    with suppress(OSError):
        device = os.stat("/dev/kvm")
        return () if device.st_mode & stat.S_IROTH and device.st_mode & stat.S_IWOTH else (device.st_gid,)
    return ()


Spawn = Callable[[Sequence[str], Iterable[int], int], int]  # command line, descriptors, stderr; the process's id


class Child:
    """A running process of ours. `on_end` is called once, in the event loop, with the wait status."""

    def __init__(
        self, argv: Sequence[str], fds: Iterable[int], log: Path, on_end: Callable[[int], None], start: Spawn
    ) -> None:
        """Must be called on the thread that lives as long as the process may: the death signal of `spawn` is tied to it. Another
        *start* sees to that itself."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._tail = bytearray()
        self._written = 0
        self.status: int | None = None
        self.usage: tuple[float, float, int] | None = None
        self._log = private(os.fspath(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._stderr, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.set_blocking(theirs, True)
            self.pid = start(argv, fds, theirs)
        except BaseException:
            os.close(self._stderr)
            os.close(self._log)
            raise
        finally:
            os.close(theirs)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._stderr, self._hear)
        self._loop.add_reader(self._pidfd, self._ended)

    def send(self, number: int) -> None:
        """Signal it. Signalling what ended is success."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def last_words(self) -> str:
        """The end of what it wrote to stderr."""
        return self._tail.decode(errors="replace").strip()

    def _hear(self) -> None:
        try:
            data = os.read(self._stderr, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr)
            return
        self._tail = (self._tail + data)[-TAIL:]
        with suppress(OSError):  # a full disk must not stop the machine
            write_all(self._log, data[: max(LOG_LIMIT - self._written, 0)])
        self._written += len(data)

    def _ended(self) -> None:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._hear()  # its last words
        self._loop.remove_reader(self._stderr)
        os.close(self._stderr)
        os.close(self._log)
        self.status = status
        self.usage = (usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024)
        self._on_end(status)


def spawn(argv: Sequence[str], fds: Iterable[int], stderr: int, environment: Mapping[str, str] = ENVIRONMENT) -> int:
    """Start the program with *fds* under their own numbers, and nothing else of ours."""
    inherited, (soft, hard) = set(fds), resource.getrlimit(resource.RLIMIT_CORE)
    actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
        *((os.POSIX_SPAWN_DUP2, stderr, fd) for fd in (1, 2)),
    ]
    # No core file: a guest's memory has no business in somebody's working folder.
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        # Neither those that our own parent left open for us. (In the child alone, glibc refuses to close one that is above the limit on
        # open files, and dup2 onto itself would do from 2.29 on.)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with suppress(OSError):  # that of the listing
                if fd > 2:
                    os.set_inheritable(fd, fd in inherited)
        return os.posix_spawn(argv[0], list(argv), environment, file_actions=actions, setsigmask=NOT_FOR_QEMU)
    except FileNotFoundError as exc:
        raise CommandMissing(f"{argv[0]}: no such program on this host") from exc
    except OSError as exc:
        kind = NoMemory if exc.errno in (errno.ENOMEM, errno.EAGAIN) else HostError
        hint = MORE_THREADS if exc.errno == errno.EAGAIN else None
        raise kind(f"{argv[0]}: cannot be started: {exc.strerror}", hint=hint) from exc
    finally:
        for fd in inherited:
            os.set_inheritable(fd, False)
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def ended(status: int | None) -> str:
    """A wait status in words."""
    if status is None:
        return "no reason known"
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"


# -- descriptors on their way into QEMU -------------------------------------------------------------------------------

# QEMU runs as a user who may not walk our folders. What it inherits it can use; a path of the form /proc/self/fd/N reopens
# an inherited file by its own mode alone. Removing such a file after it was opened harms nobody.


MAGIC, DEEPEST = b"QFI\xfb", 32
LONGEST_NAME = 1023  # docs/interop/qcow2.txt: backing_file_size


def reopened(fd: int) -> str:
    """A path by which whoever inherits this descriptor opens the file again."""
    return f"/proc/self/fd/{fd}"


class Wiring(ExitStack):
    """The descriptors one QEMU is to inherit. Leaving it closes ours, whatever became of it."""

    def __init__(self, owner: tuple[int, int]) -> None:
        super().__init__()
        self.fds: list[int] = []
        self._owner = owner

    def lend(self, fd: int) -> int:
        """QEMU inherits *fd*, which somebody else closes here."""
        self.fds.append(fd)
        return fd

    def take(self, fd: int) -> int:
        """QEMU inherits *fd*, which is closed here with the others."""
        self.callback(os.close, fd)
        return self.lend(fd)

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """QEMU inherits *path*, opened by us. Raises ImageCorrupt when it is missing, HostError when we may not."""
        return self.lend(self._open(path, flags))

    def folder(self, path: Path) -> Path:
        """A name that stays this folder's, though another takes its place; ours, until the end. Raises as `open`."""
        return Path(reopened(self._open(path, os.O_PATH | os.O_DIRECTORY)))

    def readable(self, path: Path) -> str:
        """A path under which QEMU can open the file for reading, whoever it is: a copy in memory where the mode is in the way."""
        fd = self.open(path)
        status = os.fstat(fd)
        if self._owner[0] not in (status.st_uid, os.geteuid()) and not status.st_mode & 0o004:
            original, fd = fd, self.take(os.memfd_create("belljar", os.MFD_CLOEXEC))
            while os.sendfile(fd, original, None, 1 << 24):
                pass
        return reopened(fd)

    def disk(self, overlay: Path) -> dict[Path, int]:
        """QEMU inherits the files of a qcow2 disk, from the overlay down to its base: so it needs no right to walk our folders and
        can open nothing else. Raises ImageCorrupt, HostError."""
        files: dict[Path, int] = {}
        path: Path | None = overlay
        while path is not None:
            if path in files or len(files) == DEEPEST:
                raise ImageCorrupt(f"{overlay}: more than {DEEPEST} files deep")
            files[path] = self.open(path, os.O_RDONLY if files else os.O_RDWR)
            path = _backing(path, files[path])
        return files

    def _open(self, path: Path, flags: int) -> int:
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as exc:
            raise ImageCorrupt(f"{path}: missing") from exc
        except OSError as exc:
            raise HostError(f"{path}: cannot be opened: {exc.strerror}") from exc
        self.callback(os.close, fd)
        return fd


def _backing(path: Path, fd: int) -> Path | None:
    """The file below this one, by its header; None at the base."""
    head = os.pread(fd, 20, 0)
    if len(head) < 20 or head[:4] != MAGIC:
        raise ImageCorrupt(f"{path}: not a qcow2 file")
    offset, length = struct.unpack(">QI", head[8:])
    if length > LONGEST_NAME:
        raise ImageCorrupt(f"{path}: the name of its backing file is {length} bytes long")
    return path.parent / os.fsdecode(os.pread(fd, length, offset)) if offset else None


# -- one start of a QEMU ----------------------------------------------------------------------------------------------


@dataclass
class Launch:
    """A domain that is started, and its ends on this host, as they are made. Numbers are descriptors that QEMU inherits."""

    spec: DomainSpec
    layers: tuple[int, ...]  # the disk, overlay first
    doing: str = "starting"  # for the message when it dies of it
    ram: int = -1  # guest memory in a file, which QEMU reopens as its own user
    incoming: int = -1  # the device state of a clone's template, which is waited for instead of starting the guest
    is_draft: bool = False  # boots a template, or takes in what becomes one: nothing of the host is to be reached
    has_uplink: bool = False  # but by the network with which a warm image is prepared
    is_stream: bool = False  # what comes in comes by a pipe or socket
    is_grown: bool = False  # what its template did not have is there from the start, as when its state was written
    more: tuple[int, ...] = ()  # files of the memory that this machine was given; empty: it is QEMU's own
    seed: int = -1  # the disc the guest's own init reads: a clone's is its template's
    monitor: int = -1
    channel: int = -1
    console: int = -1
    kernel: str = ""
    initrd: str = ""
    firmware: str = ""  # the file of the UEFI; empty: QEMU's own BIOS
    folders: tuple[int, ...] = ()  # sockets to those who serve folders beside QEMU; empty: nobody does yet
    disks: tuple[tuple[int, ...], ...] = ()  # further disks, in the order of the spec, with what each of them stands on
    network: int = -1  # a tap, or a socket that carries frames
    workers: int = 0  # most threads for input and output, each with a stack; 0: QEMU's own number

    @property
    def egress(self) -> Egress | None:
        """The rules for the guard of its user network."""
        return self.spec.nic.egress if self.spec.nic and (self.has_uplink or not self.is_draft) else None


def prepare(spec: DomainSpec, template: Template | None, wires: Wiring) -> Launch:
    """A cold start, or that of a clone, which maps its template's memory. Raises TemplateError, ImageCorrupt."""
    if template is None:
        return Launch(spec, (*wires.disk(spec.disk).values(),), seed=wires.open(spec.seed) if spec.seed else -1)
    try:
        folder = wires.folder(template.folder)  # all files of one boot: another may be made in its place meanwhile
        disk = tuple(wires.disk(spec.disk).values())
        state, ram, below = (wires.open(folder / name) for name in (STATE, RAM, DISK))
        more = tuple(wires.open(folder / name) for name in (TemplateStore.more(template.folder) if spec.fork else ()))
        seed = wires.open(folder / SEED) if spec.seed else -1
        if not any(os.path.sameopenfile(fd, below) for fd in disk[1:2]):
            raise ImageCorrupt("another was made in its place meanwhile")
    except ImageCorrupt as exc:
        raise TemplateError(f"the template {template.key} cannot be used any more: {exc.message}") from exc
    return Launch(spec, disk, "going on from its template", ram, state, seed=seed, is_grown=bool(spec.fork), more=more)


def prepare_draft(spec: DomainSpec, draft: Path, wires: Wiring) -> Launch:
    """The boot of a template's guest. What a clone brings of its own is left out. Raises TemplateError."""
    try:
        disk, ram = tuple(wires.disk(draft / DISK).values()), wires.open(draft / RAM)
    except ImageCorrupt as exc:
        raise TemplateError(f"the template's draft is damaged: {exc.message}") from exc
    seed = wires.open(spec.seed) if spec.seed else -1
    has_uplink = spec.uplink is not None
    return Launch(_alone(spec), disk, "booting a template", ram, is_draft=True, has_uplink=has_uplink, seed=seed)


def prepare_heir(spec: DomainSpec, draft: Path, line: int, wires: Wiring) -> Launch:
    """What takes in the memory of a running guest by this *line*, to become a template. Raises ImageCorrupt, HostError."""
    wires.disk(spec.disk)  # else nothing could be cloned from it
    ram, *more = (wires.open(draft / name) for name in (RAM, *TemplateStore.more(draft)))
    seed, incoming = wires.open(spec.seed) if spec.seed else -1, wires.lend(line)
    return Launch(
        _alone(spec), (), "taking in a running guest", ram, incoming, seed=seed, is_draft=True, is_stream=True,
        is_grown=True, more=(*more,),
    )  # fmt: skip


def _alone(spec: DomainSpec) -> DomainSpec:
    """Without what a clone brings of its own."""
    return replace(spec, disks=(), nic=replace(spec.nic, fd=-1) if spec.nic else None)


def plug(launch: Launch, wires: Wiring, ends: Mapping[str, socket.socket], firmware: str) -> None:
    """Add all else that QEMU inherits. *ends*: its ends of monitor, channel and console. Raises ImageCorrupt, HostError."""
    spec, boot = launch.spec, launch.spec.boot
    launch.firmware = firmware
    launch.monitor, launch.channel, launch.console = (wires.lend(end.fileno()) for end in ends.values())
    if launch.incoming < 0:
        launch.kernel = wires.readable(boot.kernel) if boot.kernel else ""
        launch.initrd = wires.readable(boot.initrd) if boot.initrd else ""
    launch.folders = tuple(map(wires.lend, launch.folders))
    launch.disks = tuple(
        (*wires.disk(disk.path).values(),) if disk.chained else (wires.open(disk.path, WAYS[disk.readonly]),)
        for disk in spec.disks
    )
    if spec.nic and spec.nic.fd >= 0:
        launch.network = wires.lend(spec.nic.fd)
    elif spec.nic and spec.nic.mode is NetworkMode.NONE:
        # A socket without another end: what is sent there is lost. (QEMU has a hub for that, and warns of it in each log.)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ours.close()
        launch.network = wires.take(theirs.detach())
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:  # it counts the stacks of threads
        launch.workers = FEW_WORKERS
