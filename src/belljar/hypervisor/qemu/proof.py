"""Does KVM work? Found out by booting a tiny guest under a deadline, because /dev/kvm can lie; then remembered.

It opens, reports its version and makes vCPUs on hosts where a stock kernel burns a processor for ever under it. So the
very kernel that jobs use is started with `belljar.probe` on its command line: the image's initrd then says
`belljar-probe-ok` on the console and powers off. A kernel that panics because it has no root has booted, too. For an image
whose kernel we do not have, QEMU's own firmware is the guest: it greets on the console.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer

from belljar.errors import HostError
from belljar.host.files import read_json, write_whole
from belljar.host.quick_imports import sha256
from belljar.hypervisor.qemu.process.complaints import last_line
from belljar.hypervisor.qemu.process.launch import ENVIRONMENT
from belljar.model import dumps
from belljar.records import dataclass

DEVICE = Path("/dev/kvm")
SIGNS = (b"belljar-probe-ok", b"VFS: Unable to mount root", b"No working init found", b"SeaBIOS (version")
WORD = "belljar.probe"
LARGEST_CONSOLE = 1 << 20
NEGATIVE_LASTS = 86400.0  # seconds: a host may be repaired


@dataclass(frozen=True)
class Proof:
    works: bool
    why: str
    was_tried: bool = True  # False: no guest was started, which says nothing of KVM


def obstacle(device: Path = DEVICE) -> str:
    """Why KVM cannot even be tried; empty when it can."""
    if not device.exists():
        return f"{device} does not exist"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} may not be used by uid {os.geteuid()}"
    return ""


def has_native_flag(cpuinfo: str) -> bool:
    """vmx (Intel) or svm (AMD) among the processor's flags."""
    return not {"vmx", "svm"}.isdisjoint(_flags(cpuinfo))


def first_processor() -> str:
    """Its part of /proc/cpuinfo: the kernel measures each processor that it tells of, and a host may have hundreds."""
    with open("/proc/cpuinfo", "rb", buffering=0) as file:
        return file.read(1 << 13).decode(errors="replace")


def cpu_flags(cpuinfo: str) -> str:
    """A digest of the processor's flags."""
    return sha256(" ".join(sorted(_flags(cpuinfo))).encode()).hexdigest()[:16]


def _flags(cpuinfo: str) -> list[str]:
    line = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return line.partition(":")[2].split()


def memory_name(kernel_digest: str, qemu: str, host_kernel: str, flags: str) -> str:
    """The name under which the answer for this kernel, QEMU and host is remembered."""
    return "kvm-" + sha256("\0".join((kernel_digest, qemu, host_kernel, flags)).encode()).hexdigest()[:20]


def recall(memory: Path, now: float) -> Proof | None:
    """The remembered answer, unless it was `no` and is older than a day."""
    try:
        answer = read_json(memory, 1 << 16)
        proof, then = Proof(answer["works"] is True, str(answer["why"])), float(answer["when"])
    except (OSError, ValueError, KeyError, TypeError, HostError):
        return None
    return proof if proof.works or 0 <= now - then < NEGATIVE_LASTS else None


def remember(memory: Path, proof: Proof, now: float) -> None:
    write_whole(memory, dumps({"works": proof.works, "why": proof.why, "when": now}))


def prove(argv: Sequence[str], fds: Sequence[int], *, timeout: float) -> Proof:
    """Run the tiny guest, whose console is its output. Blocks for up to *timeout*; its QEMU is gone afterwards."""
    started, seen, pipe = time.monotonic(), b"", subprocess.PIPE
    try:
        # In a session of its own: what a terminal or a batch system sends to ours would look like its failure.
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=ENVIRONMENT, pass_fds=fds, start_new_session=True
        )  # fmt: skip
    except OSError as exc:
        return Proof(False, f"the tiny guest could not be started: {exc.strerror}", was_tried=False)
    end = Timer(timeout, child.kill)
    with child:
        assert child.stdout is not None and child.stderr is not None
        try:
            end.start()
            while not has_booted(seen) and (data := os.read(child.stdout.fileno(), LARGEST_CONSOLE - len(seen))):
                seen += data
        finally:
            end.cancel()
            child.kill()
        complaint = last_line(child.stderr.read(1 << 16).decode(errors="replace"))
    took = time.monotonic() - started
    if has_booted(seen):
        return Proof(True, f"a guest with this kernel booted under KVM in {took:.1f} s")
    if took >= timeout:
        return Proof(False, f"{DEVICE} opens, but a guest did not boot under it within {timeout:g} s")
    return Proof(False, f"a guest did not boot under KVM: {complaint or 'it ended without a word'}")


def has_booted(console: bytes) -> bool:
    """Does it show a sign of a kernel that runs?"""
    return any(sign in console for sign in SIGNS)
