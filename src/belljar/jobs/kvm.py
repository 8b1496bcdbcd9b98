"""May those who have jobs use /dev/kvm? Without the right to, machines run in software, 5 to 20 times slower, and say nothing."""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from belljar.errors import BelljarError
from belljar.host.privileges import User, as_user
from belljar.records import dataclass

DEVICE, CPUINFO = Path("/dev/kvm"), Path("/proc/cpuinfo")
NOBODY = User(65534, 65534, "nobody", "/nonexistent")  # in no group that a site may have given rights
PATIENCE = 10.0
REMEDY = (
    'Let everybody use it: a udev rule `KERNEL=="kvm", MODE="0666"` (EL has one), or put users into its group:'
    " `usermod --append --groups kvm USER`."
)


@dataclass(frozen=True)
class Right:
    """What an ordinary user may. *is_lost*: the host has KVM, and its users do not."""

    is_lost: bool
    text: str
    remedy: str = ""


def of_users(device: Path = DEVICE, cpuinfo: Path = CPUINFO) -> Right:
    """Tried as a user without groups where we are root, else as who we are."""
    from belljar.hypervisor.qemu.proof import has_native_flag

    if not has_native_flag(cpuinfo.read_text(errors="replace")):
        return Right(False, "this processor offers no virtualization: machines run in software")
    try:
        facts = os.stat(device)
    except OSError as exc:
        remedy = "Load kvm_intel or kvm_amd, or allow nested virtualization."
        return Right(True, f"{device}: {exc.strerror}, though the processor has vmx or svm", remedy)
    user = NOBODY if os.geteuid() == 0 else User(os.geteuid(), os.getegid(), "this user", "/")
    if _opens(device, user):
        return Right(False, f"{device} can be opened by {'everybody' if user is NOBODY else user.name}")
    mode = f"{device}: mode {stat.S_IMODE(facts.st_mode):04o}, group {_group(facts.st_gid)}"
    if members := _members(facts):
        return Right(False, f"{mode}: only {', '.join(members)} can open it; machines of others run in software")
    return Right(True, f"{mode}: {user.name} cannot open it, machines run in software, 5 to 20 times slower", REMEDY)


def _opens(device: Path, user: User) -> bool:
    def work() -> bytes:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
        return b""

    try:
        as_user(user, work, timeout=PATIENCE, what=f"open {device}")
    except BelljarError:
        return False
    return True


def _members(facts: os.stat_result) -> Sequence[str]:
    """The group's members, who have the right, when root asks. belljar's own account has no jobs."""
    if os.geteuid() != 0 or facts.st_mode & 0o060 != 0o060:
        return ()
    with suppress(KeyError):
        return [name for name in grp.getgrgid(facts.st_gid).gr_mem if name != "belljar"]
    return ()


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
