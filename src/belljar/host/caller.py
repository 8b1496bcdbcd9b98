"""What a payload takes over from this process: its user, its limits, and the variables that every payload has."""

from __future__ import annotations

import os
import pwd
import resource

from belljar.errors import BadOption
from belljar.model import Account

LIMITS = ("CPU", "FSIZE", "DATA", "STACK", "CORE", "NPROC", "NOFILE", "MEMLOCK", "AS")
GUEST_PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def caller() -> Account:
    """The user this process runs as."""
    return describe(os.geteuid(), os.getegid(), tuple(os.getgroups()))


def describe(uid: int, gid: int, groups: tuple[int, ...] | None) -> Account:
    """What the user database says of these numbers; names are made up where it does not know them."""
    import grp

    if not (0 <= uid < 2**32 - 1 and 0 <= gid < 2**32 - 1):
        raise BadOption(f"--user {uid}:{gid}: not a user or group number")
    try:
        entry = pwd.getpwuid(uid)
        name, home, shell = entry.pw_name, entry.pw_dir, entry.pw_shell
    except KeyError:
        name, home, shell = f"user{uid}", f"/home/user{uid}", "/bin/sh"
    if groups is None:
        groups = tuple(os.getgrouplist(name, gid))
    names = {}
    for number in {gid, *groups}:
        try:
            names[number] = grp.getgrgid(number).gr_name
        except KeyError:
            names[number] = f"group{number}"
    others = tuple((number, names[number]) for number in sorted(set(groups)) if number != gid)
    return Account(name, uid, gid, names[gid], others, home or "/", shell or "/bin/sh")


def plain_environment(account: Account) -> dict[bytes, bytes]:
    """What a payload has that is given nothing else."""
    name, home, shell = account.name.encode(), os.fsencode(account.home), os.fsencode(account.shell)
    return {b"PATH": GUEST_PATH, b"LANG": b"C.UTF-8", b"HOME": home, b"USER": name, b"LOGNAME": name, b"SHELL": shell}


def rlimits() -> tuple[tuple[str, int, int], ...]:
    """(name, soft, hard) of each limit that a payload is given, as this process has it; -1 is unlimited."""
    return tuple((name, *resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))) for name in LIMITS)


def umask() -> int:
    """This process's umask, read without changing it (threads may be making files)."""
    with open("/proc/self/status", "rb") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith(b"Umask:"))
