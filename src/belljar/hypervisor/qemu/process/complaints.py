"""What QEMU, or setpriv before it, says on stderr, as our errors.

Each row was met: by a test that provokes it, or in a log. The last line counts; the unknown is DomainDied with QEMU's own words.
"""

from __future__ import annotations

import re
import resource

from belljar import errors
from belljar.host.threads import MORE_THREADS
from belljar.hypervisor.devices import Complaint, complaints
from belljar.hypervisor.qemu.process.launch import ended

NO_KVM = 'Set `qemu.accelerator = "auto"`; `belljar doctor` shows what was tried.'
MORE_ADDRESSES = "Raise the limit on address space (`ulimit -v`): QEMU wants the guest's memory and half a GiB."

COMPLAINTS: tuple[Complaint, ...] = (
    (r"jit buffer|dynamic translator buffer|Unable to allocate|loading shared libraries.*(failed to map|cannot allocate)",
     errors.NoMemory, MORE_ADDRESSES),
    (r"[Cc]annot allocate memory|failed to allocate memory|out of memory|allocate .* bytes of guest RAM", errors.NoMemory, None),
    (r"error while loading shared libraries", errors.HostError, "Reinstall QEMU: one of its libraries is missing."),
    (r"ram size .*(too|exceeds|limit)|maximum memory|phys-bits too low|at most .* RAM|memory size .* too large|not enough .* address space", errors.OverLimit, None),
    (r"Invalid SMP CPUs|maximum number of CPUs|max CPUs supported", errors.OverLimit, None),
    (r"[Cc]ould not access KVM|failed to initialize kvm|KVM is not|kvm_init|failed to set MSR|invalid accelerator", errors.HostError, NO_KVM),
    (r"No space left on device", errors.NoSpace, None),
    (r"qemu_thread_create: Resource temporarily", errors.HostError, MORE_THREADS),
    (r"Failed to get .*lock|Is another process using the image", errors.HostError, "Another QEMU uses this machine's disk; `belljar reap` ends what is left over."),
    (r"not in qcow2 format|qcow2: .*(corrupt|Invalid|too large|unsupported)|Could not read qcow2 header|Image is corrupt|L1 table|refcount table", errors.ImageCorrupt, None),
    (r"could not load kernel|kernel file|error reading initrd|could not open kernel|invalid kernel header", errors.ImageCorrupt, "The image's kernel or initrd is damaged: `belljar image verify`."),
    (r"error while loading state|load of migration failed|Missing section footer|Unknown savevm section|Length mismatch|Unknown ramblock", errors.TemplateError, None),
    (r"unable to find CPU model", errors.HostError, "Correct `qemu.cpu` in the settings: `qemu-system-x86_64 -cpu help` lists what there is."),
    (r"is not a valid device model name|unsupported machine type|Invalid parameter|invalid option|Property .* not found", errors.HostError, "This QEMU lacks something belljar uses; see `belljar doctor`."),
    (r"seccomp|sandbox", errors.HostError, "This QEMU was built without its seccomp sandbox; install your distribution's full QEMU."),
    (r"setpriv: .*(set[gu]id|setres[gu]id|setgroups)", errors.NotPermitted, "Correct `qemu.user` in the settings."),
    (r"setpriv: failed to execute", errors.CommandMissing, "Correct `qemu.binary`, or install QEMU."),
    (r"Permission denied", errors.NotPermitted, "QEMU's user may not read or write this; see `qemu.user` and `belljar doctor`."),
)  # fmt: skip

NAME = r"^\S*(qemu-system-\w+|qemu-kvm): "


def explain(words: str, status: int | None, doing: str) -> errors.BelljarError:
    """The error for a QEMU that ended while *doing*, from its last words and its wait status."""
    line = last_line(words)
    for pattern, kind, hint in (*complaints(), *COMPLAINTS) if line else ():
        if re.search(pattern, line):
            if kind is errors.NoMemory and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
                hint = MORE_ADDRESSES
            return kind(f"QEMU ended while {doing}: {line}", hint=hint)
    return errors.DomainDied(f"QEMU ended while {doing}: {line or ended(status)}")


def last_line(words: str) -> str:
    """The line that says why, of a sane length: the last one that begins with QEMU's name, or else the last one."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    if not lines:
        return ""
    named = [line for line in lines if re.match(NAME, line)]
    return re.sub(NAME, "", (named or lines)[-1])[:300]
