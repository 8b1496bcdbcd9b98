"""The checks of `belljar doctor`. A check changes nothing and takes little time; only `accelerator` may boot a tiny
guest, once per kernel, and `clone` runs a machine, whose template stays for the jobs."""

from __future__ import annotations

import grp
import os
import resource
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.errors import BelljarError, ImageUnknown
from belljar.findings import Finding, expect, fail, ok, warn
from belljar.host import commands, files
from belljar.host.privileges import User, as_user
from belljar.hypervisor import Accelerator, Boot
from belljar.hypervisor.devices import share_kind, share_names
from belljar.jobs import Runtime, size
from belljar.model import GIB, MIB, Start
from belljar.network import EgressMode, shortfalls

PATHS = ("run", "store", "scratch", "logs")
QEMU_OVERHEAD = 128 * MIB  # of a QEMU process beside the guest's memory
KVM = "/dev/kvm"
DEVICE, CPUINFO = Path(KVM), Path("/proc/cpuinfo")
NOBODY = User(65534, 65534, "nobody", "/nonexistent")  # in no group that a site may have given rights
PATIENCE = 10.0  # seconds for a try to open the device
REMEDY = (
    'Let everybody use it: a udev rule `KERNEL=="kvm", MODE="0666"` (EL has one), or put users into its group:'
    " `usermod --append --groups kvm USER`."
)
BUILT = "It is built on first use: `belljar run -- true`, or `belljar image build debian`."


def programs(runtime: Runtime) -> Finding:
    """the programs belljar calls are installed"""
    if missing := [entry for entry in commands.PROGRAMS if not commands.which(entry[0])]:
        text = "\n".join(f"{name} is missing ({use})" for name, _, use, _ in missing)
        return (fail if any(vital for *_, vital in missing) else warn)("programs", text, commands.remedy())
    lacking = ""
    for kind in map(share_kind, share_names()):  # one that is lacking is no mistake
        try:
            kind.check(runtime.settings.qemu)
        except BelljarError as exc:
            lacking += f"; no shares by {kind.name}: {exc.message}"
    return ok("programs", f"all there{lacking}")


def qemu(runtime: Runtime) -> Finding:
    """QEMU is new enough and has the devices machines are made of"""
    from belljar.hypervisor.qemu.abilities import DEVICES, TRIED, find, name_of

    binary = find(runtime.settings.qemu.binary)
    version, tried = name_of(binary).split()[3], [f"{major}.{minor}" for major, minor in TRIED]
    devices = commands.run([binary, "-device", "help"], timeout=20)
    needed, there = (*DEVICES, share_kind("").device), devices.out + devices.err
    lacking = [name for name in needed if f'name "{name}"'.encode() not in there]
    if b"user" not in commands.run([binary, "-M", "none", "-netdev", "help"], timeout=20).out:
        lacking.append("-netdev user")
    if lacking:
        remedy = "What needs these will be refused; install a full QEMU."
        return warn("qemu", f"{binary} {version} lacks {', '.join(lacking)}", remedy)
    is_tried = version.startswith(tuple(f"{release}." for release in tried))
    also = "" if is_tried else f" (belljar was tried with {', '.join(tried)})"
    return ok("qemu", f"{binary}, version {version}, with all devices{also}")


def accelerator(runtime: Runtime) -> Finding:
    """what runs the guests: the processor itself (kvm) or software (tcg)"""
    right = of_users()
    try:
        image = runtime.images.resolve(runtime.settings.image.default)
    except BelljarError as exc:
        return warn("accelerator", f"not tried: {exc.message} ({right.text})", _remedy(runtime, exc))
    boot = runtime.images.boot_files(image)
    chosen, why = runtime.hypervisor.accelerator(Boot(boot.kernel, boot.initrd, boot.append, boot.digest))
    if chosen is not Accelerator.KVM:
        slow = "Machines run in software: 5 to 20 times slower, otherwise the same."
        return warn("accelerator", f"tcg: {why}", f"{slow} {right.remedy}".strip())
    if not right.is_good:  # as root: jobs are other users'
        return warn("accelerator", f"kvm: {why}\nof users' jobs: {right.text}", right.remedy)
    return ok("accelerator", f"kvm: {why}")


def clone(runtime: Runtime) -> Finding:
    """a job's machine is cloned from a booted guest in a moment"""
    from belljar.jobs.node import self_check

    machine, image = runtime.settings.machine, runtime.settings.image.default
    if machine.start is Start.COLD or machine.hypervisor != "qemu":
        return ok("clone", "not used: `machine.start` is cold, or machines run by libvirt, where each boots")
    try:
        runtime.images.resolve(image)
    except BelljarError as exc:
        return warn("clone", f"not tried: {exc.message}", _remedy(runtime, exc))

    def took(start: Start) -> float:
        phases = self_check(runtime, image, start).phases
        return sum(phases.get(name, 0.0) for name in ("start", "boot", "identify"))

    try:
        return ok("clone", f"a clone of {image} was ready in {took(Start.CLONE):.1f} s")
    except BelljarError as exc:
        # Where no machine can be started at all this fails, and so does the check.
        text = f"no clone can be started: {exc.message}; every job boots its guest, which took {took(Start.COLD):.1f} s"
        return warn("clone", text, exc.hint)


def folders(runtime: Runtime) -> Finding:
    """belljar's folders are safe from others"""
    wrong, paths = list[str](), {name: getattr(runtime.settings.paths, name) for name in PATHS}
    for name, path in paths.items():
        try:
            above = next(folder for folder in (path, *path.parents) if folder.exists())
            if not files.is_missing(path):
                files.check_ours(path)
            elif not os.access(above, os.W_OK):
                wrong.append(f"{name} {path} cannot be made: {above} cannot be written to")
        except (BelljarError, OSError) as exc:
            wrong.append(f"{name} {exc}")
    remedy = "Correct owner and mode (0700, yours), or set `paths.*` to folders of your own."
    good = ", ".join(f"{name} {path}" for name, path in paths.items())
    return expect("folders", not wrong, "\n".join(wrong) or good, remedy)


def node(runtime: Any) -> Finding:  # of which nothing but the settings is asked
    """jobs' users can enter the folder of this node (`paths.node`), and change nothing of others in it"""
    folder = runtime.settings.paths.node
    if folder is None:
        return ok("node", "not set: each job's machine lives in its user's own folders")
    mode = f"0711 {folder} (1777 for HTCondor)"
    try:
        status = os.lstat(folder)
    except OSError as exc:
        return fail("node", f"{folder}: {exc.strerror}", f"mkdir -m {mode}")
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0:
        return fail("node", f"{folder}: must be a folder that belongs to root", f"chown root {folder}")
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return fail("node", f"{folder}: everybody may put folders of others away", f"chmod {mode}")
    closed = closed_folders(folder)
    text = f"{folder}: users cannot pass {closed}" if closed else str(folder)
    return expect("node", not closed, text, f"chmod o+x {closed}")


def closed_folders(path: Path) -> str:
    """Those on the way, and the last, that do not let everybody through."""
    ways = [folder for folder in (*reversed(path.parents), path) if os.path.isdir(folder)]
    return " ".join(str(folder) for folder in ways if not os.stat(folder).st_mode & stat.S_IXOTH)


def space(runtime: Runtime) -> Finding:
    """there is room for images, disks and logs"""
    least = {"run": 16 * MIB, "store": 2 * GIB, "scratch": GIB, "logs": 64 * MIB}
    free = {name: files.free_bytes(getattr(runtime.settings.paths, name)) for name in PATHS}
    tight = [name for name in PATHS if free[name] < least[name]]
    text = ", ".join(f"{name} {size(free[name])}" for name in PATHS)
    if tight:
        remedy = f"Free space, or set {' and '.join(f'`paths.{name}`' for name in tight)} to a larger disk."
        return warn("space", f"little free space for {' and '.join(tight)}: {text}", remedy)
    return ok("space", f"free: {text}")


def images(runtime: Runtime) -> Finding:
    """the default image can be used, and no other one is damaged"""
    there = runtime.images.images()
    default = runtime.settings.image.default
    try:
        runtime.images.resolve(default)
    except BelljarError as exc:
        remedy, text = _remedy(runtime, exc), f"{len(there)} in the store; the default: {exc.message}"
        return warn("images", text, remedy) if remedy == BUILT else fail("images", text, remedy)
    wrong = [(image, why) for image in there if (why := runtime.images.complaint(image))]
    if wrong:
        remedies = [runtime.images.remedy(image) for image, _ in wrong]
        return warn("images", "\n".join(why for _, why in wrong), "\n".join(remedies))
    return ok("images", f"{len(there)} in the store, the default {default} among them")


def leftovers(runtime: Runtime) -> Finding:
    """nothing is left of machines whose supervisor died"""
    left = "\n".join(f"{undone.machine} {undone.what} {undone.path}".strip() for undone in runtime.reaper.leftovers())
    return warn("leftovers", left, "`belljar reap` clears them away.") if left else ok("leftovers", "none")


def memory(runtime: Runtime) -> Finding:
    """there is room for machines of default size"""
    from belljar.machine.life.claim import room_now

    room, each = room_now(runtime.folders, runtime.settings.host), runtime.settings.machine.memory
    count = room.memory // (each + QEMU_OVERHEAD)
    text = f"{size(room.memory)} left on {room.bound}: room for {count} machines of {size(each)}"
    if room.machines:
        text += f"; {room.machines} machines have reserved {size(room.memory_reserved)} and {room.cpus_taken} cpus"
    remedy = "Ask for less by --memory or `machine.memory`, or for more from the batch system."
    return ok("memory", text) if count else warn("memory", text, remedy)


def limits(runtime: Runtime) -> Finding:
    """resource limits leave room for QEMU"""
    needed = runtime.settings.machine.memory + 512 * MIB
    least = {"AS": needed, "FSIZE": 4 * GIB, "NOFILE": 256, "NPROC": 64, "CPU": 60, "DATA": needed}
    soft = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in least}  # -1: no limit
    wants = "a machine of default size wants"
    low = [f"RLIMIT_{name} is {soft[name]}, {wants} {need}" for name, need in least.items() if -1 < soft[name] < need]
    remedy = "Raise them with `ulimit`, or in the batch system's request (h_vmem, vmem, ...)."
    return warn("limits", "\n".join(low), remedy) if low else ok("limits", "wide enough for a machine of default size")


def libvirt(runtime: Runtime) -> Finding:
    """libvirt's daemon answers, where machines are run by it"""
    from belljar.hypervisor.libvirt.driver import LibvirtHypervisor

    if isinstance(runtime.hypervisor, LibvirtHypervisor):
        return ok("libvirt", runtime.hypervisor.examine())
    return ok("libvirt", "not used: `machine.hypervisor` is qemu")


def network(runtime: Runtime) -> Finding:
    """what machines with a user network send can be guarded"""
    from belljar.hypervisor.qemu import guard
    from belljar.hypervisor.qemu.process.launch import confined

    if runtime.settings.network.egress is EgressMode.OPEN:
        return warn("network", "machines with a user network reach whatever this host reaches, its loopback too",
            'Set `network.egress = "guarded"` and name in `network.allow` what they need.')  # fmt: skip
    nobody = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    if why := guard.prove(lambda argv: confined(argv, nobody)):
        return warn("network", f"`--network user` is refused: {why}", 'Set `network.egress = "open"` if that may be.')
    for text in shortfalls(runtime.settings.network, is_root=os.geteuid() == 0):
        return warn("network", text, "Run such machines as root with nftables, or settle it in the settings.")
    return ok("network", "what machines send can be guarded")


def of_users(device: Path = DEVICE, cpuinfo: Path = CPUINFO) -> Finding:
    """Tried as a user without groups where we are root, else as who we are. Fails where the host has KVM, and its users do
    not."""
    from belljar.hypervisor.qemu.proof import has_native_flag

    if not has_native_flag(cpuinfo.read_text(errors="replace")):
        return ok(KVM, "this processor offers no virtualization: machines run in software")
    try:
        status = os.stat(device)
    except OSError as exc:
        remedy = "Load kvm_intel or kvm_amd, or allow nested virtualization."
        return fail(KVM, f"{device}: {exc.strerror}, though the processor has vmx or svm", remedy)
    user = NOBODY if os.geteuid() == 0 else User(os.geteuid(), os.getegid(), "this user", "/")
    with suppress(BelljarError):
        as_user(user, lambda: b"%d" % os.open(device, os.O_RDWR), timeout=PATIENCE, what=f"open {device}")
        return ok(KVM, f"{device} can be opened by {'everybody' if user is NOBODY else user.name}")
    try:
        group = grp.getgrgid(status.st_gid)
        name, members = group.gr_name, [name for name in group.gr_mem if name != "belljar"]  # whose account has no jobs
    except KeyError:
        name, members = str(status.st_gid), []
    mode = f"{device}: mode {stat.S_IMODE(status.st_mode):04o}, group {name}"
    if members and user is NOBODY and status.st_mode & 0o060 == 0o060:
        return ok(KVM, f"{mode}: only {', '.join(members)} can open it; machines of others run in software")
    return fail(KVM, f"{mode}: {user.name} cannot open it, machines run in software, 5 to 20 times slower", REMEDY)


CHECKS = (  # in the order they are shown; each is called as its function
    programs, qemu, accelerator, clone, folders, node, space, images, leftovers, memory, limits, network, libvirt,
)  # fmt: skip


def _remedy(runtime: Runtime, missing: BelljarError) -> str:
    """Where the default image cannot be made or fetched."""
    is_built = runtime.settings.image.default == "debian12" and isinstance(missing, ImageUnknown)
    return BUILT if is_built else missing.hint
