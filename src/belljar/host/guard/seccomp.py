"""Seccomp filters with a listener: system calls of a child that this process answers. Linux, x86_64.

Only what the guard of a network needs: put a program together, install it on the calling thread, take a notice, look at
what the call points to, answer it. Policy lives elsewhere. See seccomp(2), seccomp_unotify(2), pidfd_getfd(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress

from belljar.errors import NetworkFailed
from belljar.records import dataclass

AUDIT_ARCH_X86_64 = 0xC000003E
X32_BIT = 0x40000000
ALLOW, NOTIFY, KILL, ERRNO = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
NR_OFFSET, ARCH_OFFSET, ARGS_OFFSET = 0, 4, 16  # in struct seccomp_data
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06

SYS_SECCOMP, SYS_PIDFD_GETFD = 317, 438
SET_MODE_FILTER, NEW_LISTENER, WAIT_KILLABLE = 1, 1 << 3, 1 << 5
PR_SET_NO_NEW_PRIVS = 38
NOTICE_SIZE = 80
UNGUARDED = 'It takes Linux 5.9; `network.egress = "open"` lets machines go where their host may, loopback too.'
RECV, SEND, ID_VALID, ADDFD = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103
SETFD = 1
ANY = 0xFFFFFFFF  # the mask of a whole argument

Test = tuple[int, int, Sequence[int], bool]  # offset of half an argument, mask, values, is it to be one of them
Rule = tuple[Sequence[int], int, Sequence[Test]]  # calls, action, what all has to hold


def among(argument: int, values: Sequence[int], mask: int = ANY) -> Test:
    """The low half of an argument, under *mask*, is one of *values*."""
    return ARGS_OFFSET + 8 * argument, mask, values, True


def beside(argument: int, values: Sequence[int], mask: int = ANY, *, half: int = 0) -> Test:
    """It is none of them. *half* 1: the high one."""
    return ARGS_OFFSET + 8 * argument + 4 * half, mask, values, False


def program(rules: Iterable[Rule]) -> bytes:
    """The filter: the first rule that fits decides; what fits none is allowed. Calls by another architecture's numbers (32 bit,
    x32) kill the process: nothing honest makes them."""
    steps = [
        (LOAD, 0, 0, ARCH_OFFSET), (EQUAL, 1, 0, AUDIT_ARCH_X86_64), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NR_OFFSET), (AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL),
    ]  # fmt: skip
    for calls, action, tests in rules:
        block = [(RETURN, 0, 0, action)]
        for offset, mask, values, is_among in reversed(tests):
            rest = len(block)  # of the rule: passed over where the test fails
            # From the first value, where it is the argument's.
            over = len(values) if is_among else len(values) + rest - 1
            compare = [(EQUAL, over - place, 0, value) for place, value in enumerate(values)]
            if is_among:  # it was none of them
                compare.append((EQUAL, rest, rest, 0))
            block = [(LOAD, 0, 0, offset), (AND, 0, 0, mask), *compare, *block]
        assert len(block) <= 255, "a block that no jump can pass"
        for call in calls:
            steps += [(EQUAL, 0, len(block), call), *block, (LOAD, 0, 0, NR_OFFSET)]
    return b"".join(struct.pack("HBBI", *step) for step in [*steps, (RETURN, 0, 0, ALLOW)])


def failing(code: int) -> int:
    """The action that lets a call fail with this errno; 0: it is not made, and succeeds."""
    return ERRNO | code


@dataclass(frozen=True)
class Notice:
    """A call that waits for its answer."""

    id: int
    call: int
    args: tuple[int, ...]


# For the system calls Python has no functions for.
libc = ctypes.CDLL(None, use_errno=True)


def install(program: bytes) -> int:
    """Put the filter on the calling thread and what it starts, for good. Returns the listener. Raises NetworkFailed."""
    if os.uname().machine != "x86_64":
        raise NetworkFailed(f"a network cannot be guarded on {os.uname().machine} processors", hint=UNGUARDED)
    count = len(program) // 8
    text = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", count, ctypes.addressof(text)))
    zero = ctypes.c_ulong(0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        raise NetworkFailed(f"no_new_privs: {os.strerror(ctypes.get_errno())}", hint=UNGUARDED)
    for flags in (NEW_LISTENER | WAIT_KILLABLE, NEW_LISTENER):  # the first from Linux 5.19 on
        words = ctypes.c_long(SYS_SECCOMP), ctypes.c_ulong(SET_MODE_FILTER), ctypes.c_ulong(flags), head
        listener = libc.syscall(*words)
        if listener >= 0:
            return int(listener)
        if ctypes.get_errno() != errno.EINVAL:
            break
    why = os.strerror(ctypes.get_errno())
    raise NetworkFailed(f"this kernel gives no listener for system calls: {why}", hint=UNGUARDED)


def take_descriptor(pidfd: int, number: int) -> int:
    """A descriptor of ours for another process's open file. Raises OSError."""
    words = ctypes.c_long(SYS_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_uint(0)
    descriptor = libc.syscall(*words)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(descriptor)


def read_memory(pid: int, address: int, size: int) -> bytes:
    """What is there in a process; fewer bytes where the rest is not. Raises PermissionError, FileNotFoundError."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory, suppress(OSError, OverflowError):
        return os.pread(memory.fileno(), size, address)
    return b""


def receive(listener: int) -> Notice | None:
    """The next notice; None when whoever made the call is gone."""
    buffer = bytearray(NOTICE_SIZE)
    try:
        fcntl.ioctl(listener, RECV, buffer)
    except (FileNotFoundError, InterruptedError):
        return None
    id, _, _, call, _, _, *args = struct.unpack("=QIIiIQ6Q", buffer)
    return Notice(id, call, tuple(args))


def is_valid(listener: int, notice: Notice) -> bool:
    """Does the call still wait? What was read from its process before is its own only then."""
    try:
        fcntl.ioctl(listener, ID_VALID, struct.pack("=Q", notice.id))
    except OSError:
        return False
    return True


def answer(listener: int, notice: Notice, value: int, code: int = 0) -> None:
    """The call returns *value*, or fails with errno *code*. A caller that is gone needs no answer."""
    with suppress(FileNotFoundError):
        fcntl.ioctl(listener, SEND, bytearray(struct.pack("=QqiI", notice.id, value, -code, 0)))


def put_descriptor(listener: int, notice: Notice, ours: int) -> None:
    """Put our open file in the place of the descriptor that the call is for, closed on exec. Raises OSError."""
    number = notice.args[0] & 0xFFFFFFFF
    fcntl.ioctl(listener, ADDFD, bytearray(struct.pack("=QIIII", notice.id, SETFD, ours, number, os.O_CLOEXEC)))
