"""The checks of `belljar doctor`. A check changes nothing and takes little time; only `accelerator` may boot a tiny
guest, once per kernel, and `clone` runs a machine, whose template stays for the jobs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.errors import BelljarError, HostError, ImageUnknown
from belljar.host import commands, files
from belljar.jobs import size
from belljar.model import GIB, MIB
from belljar.records import dataclass

if TYPE_CHECKING:
    from belljar.jobs import House
    from belljar.model import Outcome

DEVICES = (
    "virtio-blk-pci", "virtio-serial-pci", "virtserialport", "virtio-rng-pci", "virtio-net-pci", "virtio-9p-pci", "vmgenid",
)  # fmt: skip
QEMU_OVERHEAD = 128 * MIB  # of a QEMU process beside the guest's memory
QEMU = "qemu-system-x86_64"
PROGRAMS = (  # program, Debian's package, EL's ("": it has none), what for, is nothing possible without it
    (QEMU, "qemu-system-x86", "qemu-kvm", "runs the machines", True),
    ("qemu-img", "qemu-utils", "qemu-img", "makes and checks disks", True),
    ("setpriv", "util-linux", "util-linux", "starts QEMU as another user, when belljar runs as root", False),
    ("curl", "curl", "curl", "fetches images, user data and vacuum pipes from http(s) addresses", False),
    ("mmdebstrap", "mmdebstrap", "", "builds Debian images", False),
    ("mkfs.ext4", "e2fsprogs", "e2fsprogs", "builds images", False),
    ("mke2fs", "e2fsprogs", "e2fsprogs", "makes scratch disks (`--scratch`)", False),
    ("mksquashfs", "squashfs-tools", "squashfs-tools", "packs large folders of `--in`, which are copied slowly without it", False),
    ("busybox", "busybox-static", "busybox", "makes the small initramfs of images", False),
)  # fmt: skip
BUILT = "It is built on first use: `belljar run -- true`, or `belljar image build debian`."


class Grade(str, Enum):
    OK = "ok"
    WARN = "warn"  # machines run, but something is slow, tight or impossible
    FAIL = "fail"  # no machine runs


@dataclass(frozen=True)
class Finding:
    """What was seen, and what to do about it."""

    grade: Grade
    text: str
    remedy: str = ""


def ok(text: str) -> Finding:
    return Finding(Grade.OK, text)


def warn(text: str, remedy: str) -> Finding:
    return Finding(Grade.WARN, text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding(Grade.FAIL, text, remedy)


@dataclass(frozen=True)
class Check:
    """One question to the host."""

    name: str
    meaning: str
    look: Callable[[House], Finding]

    def examine(self, house: House) -> Finding:
        """Look. A check that breaks is a failed one."""
        try:
            return self.look(house)
        except BelljarError as exc:
            return fail(exc.message, "" if exc.hint == HostError.hint else exc.hint)  # that one is to ask us
        except Exception as exc:  # whatever this host does to one check, the others are made
            text = f"the check broke: {type(exc).__name__}: {exc}"
            return fail(text, "This is a defect of belljar or of the host.")


def programs(house: House) -> Finding:
    """the programs belljar calls are installed"""
    named = {QEMU} if house.settings.qemu.binary else set()  # no package makes this one right
    missing = [entry for entry in PROGRAMS if entry[0] not in named and not _program(house, entry[0])]
    if not missing:
        return ok("all there" + _without_virtiofs(house))
    text = "\n".join(f"{name} is missing ({use})" for name, _, _, use, _ in missing)
    grade = Grade.FAIL if any(vital for *_, vital in missing) else Grade.WARN
    if commands.which("apt-get") or not commands.which("dnf"):
        return Finding(grade, text, f"apt-get install --no-install-recommends {_words(one[1] for one in missing)}")
    return Finding(grade, text, f"dnf install {_words(one[2] for one in missing)} (some are in EPEL)")


def qemu(house: House) -> Finding:
    """QEMU is new enough and has the devices machines are made of"""
    import re

    from belljar.hypervisor.qemu.abilities import TRIED

    binary = _qemu(house)
    said = commands.run([binary, "--version"], timeout=20, check=False).out.decode(errors="replace")
    found = re.search(r"(?<=emulator )version (\d+)\.(\d+)(\.\d+)?", said)
    if found is None:
        return fail(f"{binary} does not tell its version", "Set `qemu.binary` to a QEMU for x86_64.")
    is_tried = (int(found[1]), int(found[2])) in TRIED
    tried = "" if is_tried else f" (belljar was tried with {', '.join(f'{one}.{two}' for one, two in TRIED)})"
    devices = commands.run([binary, "-device", "help"], timeout=20)
    lacking = [name for name in DEVICES if f'name "{name}"'.encode() not in devices.out + devices.err]
    if b"user" not in commands.run([binary, "-M", "none", "-netdev", "help"], timeout=20).out:
        lacking.append("-netdev user")
    if lacking:
        remedy = "What needs these will be refused; install a full QEMU."
        return warn(f"{binary} {found[0][8:]} lacks {', '.join(lacking)}", remedy)
    return ok(f"{binary}, {found[0]}, with all devices{tried}")


def accelerator(house: House) -> Finding:
    """what runs the guests: the processor itself (kvm) or software (tcg)"""
    from belljar.hypervisor import Accelerator, Boot
    from belljar.jobs.node import of_users

    try:
        image = house.images.resolve(house.settings.image.default)
    except BelljarError as exc:
        flags = Path("/proc/cpuinfo").read_text()
        hint = "has" if "vmx" in flags or "svm" in flags else "does not have"
        return warn(f"not tried: {exc.message} (the cpu {hint} vmx or svm)", _remedy(house, exc))
    boot = house.images.boot_files(image)
    chosen, why = house.hypervisor.accelerator(Boot(boot.kernel, boot.initrd, boot.append, boot.digest))
    right = of_users()
    if chosen is Accelerator.KVM:
        if right.is_lost:  # as root: jobs are other users'
            return warn(f"kvm: {why}\nof users' jobs: {right.text}", right.remedy)
        return ok(f"kvm: {why}")
    slow = "Machines run in software: 5 to 20 times slower, otherwise the same."
    return warn(f"tcg: {why}", f"{slow} {right.remedy}".strip())


def clone(house: House) -> Finding:
    """a job's machine is cloned from a booted guest in a moment"""
    from belljar.jobs.node import self_check
    from belljar.model import Start

    machine, image = house.settings.machine, house.settings.image.default
    if machine.start is Start.COLD or machine.hypervisor != "qemu":
        why = "`machine.start` is cold" if machine.start is Start.COLD else "by libvirt every machine boots"
        return ok(f"not used: {why}")
    try:
        house.images.resolve(image)
    except BelljarError as exc:
        return warn(f"not tried: {exc.message}", _remedy(house, exc))
    try:
        took = _start_time(self_check(house, image, Start.CLONE))
    except BelljarError as exc:
        # Where no machine can be started at all this fails, and so does the check.
        cold = _start_time(self_check(house, image, Start.COLD))
        text = f"no clone can be started: {exc.message}; every job boots its guest, which took {cold:.1f} s"
        return warn(text, exc.hint)
    return ok(f"a clone of {image} was ready in {took:.1f} s")


def _start_time(outcome: Outcome) -> float:
    return sum(outcome.phases.get(name, 0.0) for name in ("start", "boot", "identify"))


def folders(house: House) -> Finding:
    """belljar's folders are safe from others"""
    wrong = []
    for name, path in _paths(house):
        try:
            if not files.is_missing(path):
                files.check_ours(path)
            elif not os.access(_nearest(path), os.W_OK):
                wrong.append(f"{name} {path} cannot be made: {_nearest(path)} cannot be written to")
        except (BelljarError, OSError) as exc:
            wrong.append(f"{name} {exc}")
    if wrong:
        return fail("\n".join(wrong), "Correct owner and mode (0700, yours), or set `paths.*` to folders of your own.")
    return ok(", ".join(f"{name} {path}" for name, path in _paths(house)))


def node(house: House) -> Finding:
    """jobs' users can enter the folder of this node (`paths.node`), and change nothing of others in it"""
    return examine_node(house.settings.paths.node)


def examine_node(folder: Path | None) -> Finding:
    mode = f"0711 {folder} (1777 for HTCondor)"
    if folder is None:
        return ok("not set: each job's machine lives in its user's own folders")
    try:
        facts = os.lstat(folder)
        closed = [str(one) for one in (folder, *folder.parents) if not os.stat(one).st_mode & stat.S_IXOTH]
    except OSError as exc:
        return fail(f"{folder}: {exc.strerror}", f"mkdir -m {mode}")
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != 0:
        return fail(f"{folder}: must be a folder that belongs to root", f"chown root {folder}")
    if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        return fail(f"{folder}: everybody may put folders of others away", f"chmod {mode}")
    why = f"users cannot pass {', '.join(closed)}"
    return fail(f"{folder}: {why}", f"chmod o+x {' '.join(closed)}") if closed else ok(str(folder))


def space(house: House) -> Finding:
    """there is room for images, disks and logs"""
    least = {"run": 16 * MIB, "store": 2 * GIB, "scratch": GIB, "logs": 64 * MIB}
    free = {name: files.free_bytes(path) for name, path in _paths(house)}
    tight = [name for name, needed in least.items() if free[name] < needed]
    text = ", ".join(f"{name} {size(free[name])}" for name in least)
    if tight:
        remedy = f"Free space, or set {' and '.join(f'`paths.{name}`' for name in tight)} to a larger disk."
        return warn(f"little free space for {' and '.join(tight)}: {text}", remedy)
    return ok(f"free: {text}")


def images(house: House) -> Finding:
    """the default image can be used, and no other one is damaged"""
    there = house.images.images()
    default = house.settings.image.default
    try:
        house.images.resolve(default)
    except BelljarError as exc:
        remedy, text = _remedy(house, exc), f"{len(there)} in the store; the default: {exc.message}"
        return warn(text, remedy) if remedy == BUILT else fail(text, remedy)
    wrong = [(image, why) for image in there if (why := house.images.complaint(image))]
    if wrong:
        remedies = [house.images.remedy(image.disk.parent, image.called) for image, _ in wrong]
        return warn("\n".join(why for _, why in wrong), "\n".join(remedies))
    return ok(f"{len(there)} in the store, the default {default} among them")


def leftovers(house: House) -> Finding:
    """nothing is left of machines whose supervisor died"""
    left = "\n".join(f"{one.machine} {one.what} {one.path}".strip() for one in house.machines.leftovers())
    return warn(left, "`belljar reap` clears them away.") if left else ok("none")


def namespaces(house: House) -> Finding:
    """this user can build images"""
    if os.geteuid() == 0:
        return ok("not needed by root")
    if not commands.which("unshare") or commands.run(["unshare", "-Ur", "true"], timeout=10, check=False).code:
        remedy = "Let root build images for all (`belljar image build debian` as root), or allow user namespaces."
        return warn("user namespaces are not allowed: this user cannot build images", remedy)
    if not (_has_range("/etc/subuid") and _has_range("/etc/subgid") and commands.which("newuidmap")):
        remedy = "apt-get install uidmap; usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER"
        return warn("no range of subordinate uids and gids: this user cannot build images", remedy)
    return ok("allowed, with a range of subordinate ids")


def memory(house: House) -> Finding:
    """there is room for machines of default size"""
    from belljar.machine.life.claim import room_now

    room, one = room_now(house.folders, house.settings.host), house.settings.machine.memory + QEMU_OVERHEAD
    count = room.memory // one
    each = size(house.settings.machine.memory)
    text = f"{size(room.memory)} left on {room.bound}: room for {count} machines of {each}"
    if room.machines:
        text += f"; {room.machines} machines have reserved {size(room.memory_reserved)} and {room.cpus_taken} cpus"
    if not count:
        return warn(text, "Ask for less by --memory or `machine.memory`, or for more from the batch system.")
    return ok(text)


def limits(house: House) -> Finding:
    """resource limits leave room for QEMU"""
    import resource

    needed = house.settings.machine.memory + 512 * MIB
    least = {"AS": needed, "FSIZE": 4 * GIB, "NOFILE": 256, "NPROC": 64, "CPU": 60, "DATA": needed}
    low = []
    for name, enough in least.items():
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        if soft != resource.RLIM_INFINITY and soft < enough:
            low.append(f"RLIMIT_{name} is {soft}, a machine of default size wants {enough}")
    if low:
        return warn("\n".join(low), "Raise them with `ulimit`, or in the batch system's request (h_vmem, vmem, ...).")
    return ok("wide enough for a machine of default size")


def libvirt(house: House) -> Finding:
    """libvirt's daemon answers, where machines are run by it"""
    from belljar.hypervisor.libvirt.driver import LibvirtHypervisor

    hypervisor = house.hypervisor
    if not isinstance(hypervisor, LibvirtHypervisor):
        return ok("not used: `machine.hypervisor` is qemu")
    return ok(hypervisor.examine())


def network(house: House) -> Finding:
    """what machines with a user network send can be guarded"""
    from belljar.hypervisor.qemu import guard
    from belljar.hypervisor.qemu.process.launch import confined
    from belljar.network import EgressMode, shortfalls

    if house.settings.network.egress is EgressMode.OPEN:
        return warn("machines with a user network reach whatever this host reaches, its loopback too",
            'Set `network.egress = "guarded"` and name in `network.allow` what they need.')  # fmt: skip
    nobody = (65534, 65534) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    why = guard.prove(lambda argv: confined(argv, nobody))
    if why:
        return warn(f"`--network user` is refused: {why}", 'Set `network.egress = "open"` if that may be.')
    for text in shortfalls(house.settings.network, is_root=os.geteuid() == 0):
        return warn(text, "Run such machines as root with nftables, or settle it in the settings.")
    return ok("what machines send can be guarded")


# In the order they are shown; the first line of each one's docstring says what it means.
CHECKS = tuple(
    Check(look.__name__, (look.__doc__ or "").strip(), look)
    for look in (
        programs, qemu, accelerator, clone, folders, node, space, images, leftovers, namespaces, memory, limits,
        network, libvirt,
    )
)  # fmt: skip


def _qemu(house: House) -> str:
    from belljar.hypervisor.qemu.abilities import find

    return find(house.settings.qemu.binary)


def _remedy(house: House, missing: BelljarError) -> str:
    """Where the default image cannot be had."""
    is_built = house.settings.image.default == "debian12" and isinstance(missing, ImageUnknown)
    return BUILT if is_built else missing.hint


def _words(names: Iterable[str]) -> str:
    return " ".join(sorted(set(names) - {""}))


def _program(house: House, name: str) -> bool:
    try:
        return bool(_qemu(house) if name == QEMU else commands.which(name))
    except BelljarError:
        return False


def _without_virtiofs(house: House) -> str:
    """Why `--share virtiofs:` is refused here. Not every system has a package that mends it, and 9p serves most images."""
    from belljar.hypervisor import find_virtiofsd

    try:
        find_virtiofsd(house.settings.qemu)
    except BelljarError as exc:
        return f"; no shares by virtiofs: {exc.message}"
    return ""


def _paths(house: House) -> Iterator[tuple[str, Path]]:
    paths = house.settings.paths
    yield from (("run", paths.run), ("store", paths.store), ("scratch", paths.scratch), ("logs", paths.logs))


def _nearest(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _has_range(file: str) -> bool:
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
        return any(line.split(":")[0] in (user, str(os.getuid())) for line in Path(file).read_text().splitlines())
    except (OSError, KeyError):
        return False
