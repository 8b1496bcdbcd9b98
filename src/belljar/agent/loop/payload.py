"""A payload's process: what the child does, from the fork to the payload's first instruction; and the child that is forked before
its payload is known."""

from __future__ import annotations

import _signal as signal
import errno
import os
from contextlib import suppress
from functools import partial

from belljar.agent.guest.accounts import Account
from belljar.agent.guest.cgroups import Box
from belljar.agent.guest.guest import Guest
from belljar.agent.guest.mounts import devices_of
from belljar.agent.guest.system import Refused, close_quietly, read_file, shown, write_all
from belljar.agent.transfer.tar import CHUNK, Exchange, Gatherer, Packer, has_large
from belljar.agent.transfer.untar import unpack
from belljar.agent.wire import FAILED, KIB, NOT_EXECUTABLE, NOT_FOUND, Words, join, with_nul

CODES = {"not-found": NOT_FOUND, "not-executable": NOT_EXECUTABLE}  # of what never began, as shells have them


class Environment:
    """Looks like a dictionary to execve, but keeps order and repeated names."""

    def __init__(self, pairs: list[list[bytes]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, name: bytes) -> bytes:
        return dict(self.pairs)[name]

    def keys(self) -> list[bytes]:
        return [name for name, _ in self.pairs]

    def values(self) -> list[bytes]:
        return [value for _, value in self.pairs]


class Job:
    """A `start` call, taken apart. What only the child needs is left in words until `read_rest`."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.stdio = words.text()  # three of s: stream, n: null, c: closed; o, as the third: where the second goes
        window = words.next()  # "" without a terminal, else its rows and columns, 0 where they are not known
        self.terminal = [int(size) for size in window.split(b" ")] if window else None
        self.builtin = words.next()  # "", or "put" (argv: path, serial of an `Exchange` or "", name), or "get" (argv: path, serial, "all" or "changed", and what to skip), or "collect" (argv: paths)
        self.program = words.next()  # "", or what is executed with argv as it is
        after = words.next()
        self.lingers = after == b"1"  # after TERM, what its leader leaves behind may end by itself
        self.prepares = after == b"3"  # what it leaves behind is there in every clone of the template to be
        # What its leader leaves behind goes on, and its end is told without that.
        self.leaves = self.prepares or after == b"2"
        self.umask = words.number()
        cwd = words.next()
        self.account = Account(words)
        self.cwd = cwd or self.account.home_path
        self.path = b""  # of the script, once it is there
        self.began = 0  # when the first payload did, in the clock that files are stamped with

    def read_rest(self) -> None:
        self.rlimits, self.argv = self.words.rows(3), self.words.some()
        self.env = Environment(self.words.rows(2))
        if self.words.at != len(self.words.words):
            raise ValueError("more words than an order has")


def place(files: list[list[bytes]], account: Account, guest: Guest) -> None:
    """Files of a payload, before it starts: path, mode, "u" or "r" (whose), and "f" with the content or "d"."""
    for path, mode, owner, content in files:
        if kept := guest.kept.pop(path, 0):
            os.pwrite(kept, with_nul(content[1:]), 0)
            os.close(kept)
            continue
        is_file = content[:1] == b"f"
        folder = os.path.dirname(path) if is_file else path
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o755)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC if is_file else os.O_RDONLY | os.O_DIRECTORY
        fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            if is_file:
                write_all(fd, with_nul(content[1:]))
            if owner == b"u":
                guest.give(fd, account)
            os.fchmod(fd, int(mode))
        finally:
            os.close(fd)


def become_payload(job: Job, guest: Guest, files: list[int], trouble: int) -> None:
    """Returns after a copy alone. Raises Refused, OSError."""
    job.read_rest()
    take_stdio(job, files)
    limit(job.rlimits)
    os.umask(job.umask)
    exchange = exchange_of(job)  # only root may open it
    guest.become(job.account)
    enter(job.cwd)
    if job.builtin:
        run_builtin(job, trouble, exchange)
    else:
        execute(job)


def report(fd: int, kind: str, message: str) -> None:
    os.write(fd, (kind + "\0" + message).encode("utf-8", "backslashreplace")[:4096])


def take_stdio(job: Job, files: list[int]) -> None:
    """Put the ends where the payload expects them; -1 is a descriptor that is to be closed."""
    for number, fd in enumerate(files):
        if fd >= 0:
            os.dup2(fd, number)
        else:
            os.close(number)
    if job.terminal:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def limit(rlimits: list[list[bytes]]) -> None:
    """Limits as outside. A guest's kernel may allow fewer open files than the host's: then as many as it allows."""
    if not rlimits:
        return
    import resource

    for kind, soft, hard in rlimits:
        name, values = kind.decode("ascii"), (int(soft), int(hard))
        number = getattr(resource, "RLIMIT_" + name, None)
        if number is None:
            continue
        try:
            try:
                resource.setrlimit(number, values)
            except (ValueError, OSError):
                if name != "NOFILE":
                    raise
                most = int(read_file("/proc/sys/fs/nr_open") or b"1048576")
                few, many = (most if value < 0 else min(value, most) for value in values)
                resource.setrlimit(number, (few, many))
        except (ValueError, OSError) as exc:
            raise Refused("rlimit", f"limit {name} to {values[0]}, {values[1]}: {exc}") from exc


def enter(cwd: bytes) -> None:
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", exc)
        raise Refused("no-cwd", f"{shown(cwd)}: cannot be the working directory: {why}") from exc


def execute(job: Job) -> None:
    """Become the program: by its path, else the first that can be run in the payload's own PATH. Raises Refused."""
    if job.path:
        job.argv[:1] = [job.path]
    name = job.program or (job.argv[0] if job.argv else b"")
    if not name:
        raise Refused("not-found", "an empty command")
    path = dict(job.env.pairs).get(b"PATH", b"/usr/local/bin:/usr/bin:/bin")
    folders = [b""] if b"/" in name else [(folder or b".") + b"/" for folder in path.split(b":")]
    refusal = ""
    for program in [folder + name for folder in folders]:
        try:
            run_program(program, job)
        except OSError as exc:
            if exc.errno == errno.ENOENT and os.path.lexists(program):
                why = f"{shown(program)}: its interpreter is missing"
                raise Refused("not-executable", why) from exc
            if exc.errno == errno.ENOENT or (exc.errno == errno.ENOTDIR and b"/" not in name):
                continue
            refusal = refusal or os.strerror(exc.errno or 0)
            if exc.errno != errno.EACCES:
                break
        except ValueError as exc:
            raise Refused("not-executable", f"{shown(name)}: {exc}") from exc
    if refusal:
        raise Refused("not-executable", f"{shown(name)}: {refusal}")
    raise Refused("not-found", f"{shown(name)}: not found in the guest")


def run_program(path: bytes, job: Job) -> None:
    try:
        os.execve(path, job.argv, job.env)  # type: ignore[arg-type]
    except OSError as exc:
        if exc.errno != errno.ENOEXEC:
            raise
    # A file without a format the kernel knows is a script for sh: so do shells.
    os.execve(b"/bin/sh", [b"/bin/sh", path, *job.argv[1:]], job.env)  # type: ignore[arg-type]


def exchange_of(job: Job) -> Exchange | None:
    """The disk of that serial, where there is something for it."""
    serial = job.argv[1] if job.builtin in (b"put", b"get") else b""
    if not serial or (job.builtin == b"get" and not has_large(os.path.join(job.cwd, job.argv[0]))):
        return None
    (device,) = devices_of([serial])
    return Exchange(os.open(device, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT), True)


def run_builtin(job: Job, trouble: int, exchange: Exchange | None) -> None:
    """Copy files as the user: the kernel itself checks what this user may do. Raises Refused."""
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in (trouble, exchange.fd if exchange else -1):
            close_quietly(int(entry))  # no exec closes them: the channel, other payloads' pipes
    path, write = job.argv[0], partial(write_all, 1)
    try:
        if job.builtin == b"put":
            unpack(lambda size: os.read(0, min(size, CHUNK)), path, job.argv[2], exchange=exchange)
        elif job.builtin == b"collect":
            Gatherer(write).gather(job.argv)
        else:
            since = job.began if job.argv[2] == b"changed" else 0
            Packer(write, job.argv[3:], since, exchange).pack(path)
    except OSError as exc:
        kind = "space" if exc.errno == errno.ENOSPC else "broken"
        raise Refused(kind, f"{shown(path)}: {exc.strerror}") from exc


# An order that asks for nothing.
NOTHING = [b"sss", b"", b"", b"", b"", b"18", b"", b"n", b"0", b"0", b"g", b"/", b"/bin/sh", b"0"]
NOTHING += [b"1", b"CPU", b"-1", b"-1", b"1", b"sh", b"1", b"PATH", b"/bin"]


def three_pipes() -> tuple[list[int], list[int]]:
    """The payload's ends, and ours."""
    pipes = [os.pipe() for _ in range(3)]
    return [pipes[0][0], pipes[1][1], pipes[2][1]], [pipes[0][1], pipes[1][0], pipes[2][0]]


class Zygote:
    """A child that is forked before it knows its payload, with its session, its box and its standard streams; a pipe tells it
    its order. A template holds one, so that the payload of a clone need not wait for a fork."""

    def __init__(self, guest: Guest, box: Box, inner: list[int], outer: list[int]) -> None:
        self.box, self.inner, self.outer = box, inner, outer
        self.trouble, trouble = os.pipe()
        orders, self.orders = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._wait(guest, orders, trouble)
        os.close(orders)
        os.close(trouble)

    def _wait(self, guest: Guest, orders: int, trouble: int) -> None:
        """In the child: all is ready but the order. Never returns."""
        code = FAILED
        try:
            signal.set_wakeup_fd(-1)  # the agent's signals are not ours
            os.setsid()
            self.box.join()
            guest.leave_agent()
            for fd in (*self.outer, self.orders):  # else our own end would keep the payload's stdin open
                os.close(fd)
            Job(Words(NOTHING)).read_rest()  # the pages this writes to are our own from now on
            order = bytearray()
            while part := os.read(orders, 64 * KIB):
                order += part
            if order:  # else nobody needs us
                words = bytes(order).split(b"\0")
                job = Job(Words(words[2:]))
                job.path, job.began = words[0], int(words[1])
                null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
                # "o" is put in its place just before.
                files = [
                    {"s": end, "n": null, "o": 1}.get(kind, -1) for kind, end in zip(job.stdio, self.inner, strict=True)
                ]
                become_payload(job, guest, self.inner if job.terminal else files, trouble)
            code = 0
        except Refused as exc:
            code = CODES.get(exc.kind, FAILED)
            report(trouble, exc.kind, exc.message)
        except BaseException as exc:
            report(trouble, "failed", f"{type(exc).__name__}: {exc}")
        finally:
            os._exit(code)

    def go(self, job: Job) -> None:
        """Hand over the order. A child that has ended meanwhile says why."""
        with suppress(BrokenPipeError):
            write_all(self.orders, join(job.path, b"%d" % job.began, *job.words.words))
        os.close(self.orders)

    def discard(self) -> None:
        """Without an order it ends by itself."""
        for fd in {*self.inner, *self.outer, self.trouble, self.orders}:
            close_quietly(fd)
