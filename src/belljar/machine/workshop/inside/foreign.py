#!/usr/bin/python3
"""Works on an untrusted disk, as root of a machine that is discarded: mounts its file systems, does one task, unmounts.

Runs in a guest of belljar's default image; standard library, util-linux and tar. The disk is the one with the serial of
the task, which lies in a file, as JSON. What could not be done is the last line on stderr. Nothing of the foreign system
is ever executed, and its paths are followed in a chroot, so that its links lead nowhere else.
"""

import io
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

ROOT, OUT, IN = "/var/foreign/root", "/var/foreign/out", "/var/foreign/in"
TASK = "/var/foreign/task"
HARMLESS = "nodev,nosuid,noexec"
KINDS = {"ext2": "ext4", "ext3": "ext4", "ext4": "ext4", "xfs": "xfs", "btrfs": "btrfs", "vfat": "vfat"}
OPTIONS = {"xfs": ",nouuid"}
SUBVOLUMES = ("", "@", "root", "@rootfs")  # usual places of a root file system on btrfs
KEEP_APART = ("/", "/proc", "/sys", "/dev", "/run", "none", "swap")
TAGS = ("UUID", "LABEL", "PARTUUID", "PARTLABEL")
OF_PARTITIONS = {"PART_ENTRY_UUID": "PARTUUID", "PART_ENTRY_NAME": "PARTLABEL"}  # blkid's names, and those of fstab
SYSTEMS = ("etc/os-release", "usr/lib/os-release", "sbin/init", "usr/sbin/init", "usr/lib/systemd/systemd")
UNIT_LINK = "etc/systemd/system/multi-user.target.wants"
SELINUX = "security.selinux"
LABELS = {
    "agent": "system_u:object_r:bin_t:s0", "unit": "system_u:object_r:systemd_unit_file_t:s0",
}  # fmt: skip
OF_A_KERNEL = ("vmlinuz", "modules.dep", "modules.builtin")
LARGEST_FILE = 256 << 20


class Trouble(Exception):
    """What is reported to the host."""


def main() -> None:
    with open(TASK) as file:
        task = json.load(file)
    try:
        mount_all(device_of(task["disk"]))
        TASKS[task["do"]](task)
        if task["do"] in CHANGING:  # else copies may follow, and the machine's end unmounts it
            run("umount", "--recursive", ROOT)
    except (Trouble, ValueError) as trouble:  # a name with a zero byte, say
        sys.exit(f"{trouble}")
    except OSError as trouble:
        sys.exit(f"{trouble.filename or 'the disk'}: {trouble.strerror}")


# -- tasks -------------------------------------------------------------------------------------------------------------


def inject(task: dict[str, Any]) -> None:
    """Put the agent and its systemd unit where the foreign system's own init finds them."""
    with tarfile.open(f"{IN}/0/it") as archive, inside():
        install(task["agent"], archive, task["unit"], task["text"])


def install(folder: str, archive: tarfile.TarFile, unit: str, text: str) -> None:
    """In the foreign root: the agent with its interpreter, in place of an older one, and its unit."""
    if not any(os.path.exists(f"{folder}/systemd/systemd") for folder in ("/usr/lib", "/lib")):
        raise Trouble("the image has no systemd that could start the agent")
    shutil.rmtree(folder, ignore_errors=True)
    for member in archive:
        put(f"{folder}/{member.name}", archive.extractfile(member), "agent", member.mode)
    put(unit, io.BytesIO(text.encode()), "unit", 0o644)
    os.makedirs(f"/{UNIT_LINK}", exist_ok=True)
    link = f"/{UNIT_LINK}/{os.path.basename(unit)}"
    with suppress(FileNotFoundError):
        os.unlink(link)
    os.symlink(unit, link)


def put(path: str, content: Any, what: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "xb") as file:
        shutil.copyfileobj(content, file)
        os.fchmod(file.fileno(), mode)
    with suppress(OSError):  # only where others have such a label
        os.getxattr("/usr/lib", SELINUX)
        os.setxattr(path, SELINUX, LABELS[what].encode() + b"\0", follow_symlinks=False)


def expose(task: dict[str, Any]) -> None:
    """Show each path of the foreign system below OUT, by its number, for the copy that follows."""
    for number, path in enumerate(task["paths"]):
        source, target = ROOT + resolved(path), f"{OUT}/{number}/it"
        os.makedirs(os.path.dirname(target))
        if stat.S_ISDIR(os.lstat(source).st_mode):
            os.mkdir(target)
        else:
            open(target, "x").close()
        run("mount", "--bind", source, target)


def archive(task: dict[str, Any]) -> None:
    """Write the paths, with owners and modes, as a tar archive to stdout."""
    words = [resolved(path).lstrip("/") or "." for path in task["paths"]]
    argv = ["tar", "--create", "--file=-", "--numeric-owner", "--sparse", f"--directory={ROOT}", "--", *words]
    done = subprocess.run(argv, stderr=subprocess.PIPE, check=False)
    if done.returncode > 1:  # 1: a file changed while it was read
        raise Trouble(done.stderr.decode(errors="replace").strip().splitlines()[-1])


def survey(task: dict[str, Any]) -> None:
    """Write the foreign root as a tar archive to stdout, thinned: the files that the task names, its kernels with the modules
    that the task names and the root itself needs, and of the names in the task those that are there (as FIFOs); where the
    root lies is said in survey.json. See `belljar.image.intake.survey`."""
    with open("/proc/self/mountinfo") as file:
        words = next(line.split() for line in file if line.split()[4] == ROOT)
    kind, source = words[words.index("-") + 1 :][:2]
    name = source.rpartition("/")[2]
    with open(f"/sys/class/block/{name}/partition") if name[-1].isdigit() else open(os.devnull) as file:
        number = int(file.read() or 0)
    place = {"number": number, "fstype": KINDS[kind], "subvolume": words[3].lstrip("/") if kind == "btrfs" else ""}
    with inside():
        write_thinned(json.dumps(place).encode(), task, {*task["modules"], KINDS[kind]})


def write_thinned(place: bytes, task: dict[str, Any], drivers: set[str]) -> None:
    """In the foreign root."""
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 18) as tar:
        head = tarfile.TarInfo("survey.json")
        head.size = len(place)
        tar.addfile(head, io.BytesIO(place))
        for path in task["names"]:
            add(tar, path, whole=False)
        kernels = [f"/boot/{name}" for name in listed("/boot") if name.startswith("vmlinuz-")]
        for folder in ("/usr/lib/modules", "/lib/modules"):
            for version in listed(folder) if os.path.realpath(folder) == folder else ():
                add(tar, f"{folder}/{version}", whole=False)
                names = (*OF_A_KERNEL, *modules(f"{folder}/{version}", drivers))
                kernels += [f"{folder}/{version}/{name}" for name in names]
        for path in (*task["files"], *kernels):
            add(tar, path, whole=True)


def listed(folder: str) -> list[str]:
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def modules(folder: str, names: set[str]) -> list[str]:
    """The modules of these names, and all that they need, as modules.dep has them."""
    paths: set[str] = set()
    with suppress(OSError), open(f"{folder}/modules.dep", errors="surrogateescape") as file:
        for line in file:
            path, _, needs = line.partition(":")
            if path.rpartition("/")[2].partition(".ko")[0].replace("-", "_") in names:
                paths |= {path, *needs.split()}
    return sorted(paths)


def add(tar: tarfile.TarFile, path: str, *, whole: bool) -> None:
    """Add what is at *path*, if anything: a link as it is, a file with its bytes if *whole*, all else by name. A path through a
    link to its folder is left out: the file has another path."""
    entry, data = tarfile.TarInfo(path.lstrip("/")), b""
    if os.path.realpath(os.path.dirname(path)) != os.path.dirname(path):
        return
    try:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        elif whole and stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST_FILE:
            with open(path, "rb") as file:
                data = file.read()
        else:
            entry.type = tarfile.FIFOTYPE
    except OSError:
        return
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def insert(task: dict[str, Any]) -> None:
    """Copy what lies below IN, by its number, to its place in the foreign system."""
    for number, item in enumerate(task["items"]):
        argv = ["tar", "--create", "--file=-", "--sparse", "--hard-dereference", f"--directory={IN}/{number}", "it"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as packing, inside():
            assert packing.stdout is not None
            unpack(packing.stdout, item)


def unpack(stream: IO[bytes], item: dict[str, Any]) -> None:
    """In the foreign root: the file or folder of the stream, in its place, with the owner and mode of the task."""
    target = item["target"]
    if target.endswith("/") or (os.path.isdir(target) and not os.path.islink(target)):
        target = f"{target.rstrip('/')}/{item['name']}"
    os.makedirs(os.path.dirname(target) or "/", exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        tar.extraction_filter = lambda member, folder: member  # the stream is the host's
        tar.extractall("/", members=placed(tar, target, item), numeric_owner=True)


def placed(tar: tarfile.TarFile, target: str, item: dict[str, Any]) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        member.name = target.lstrip("/") + member.name.removeprefix("it")
        member.uid, member.gid = item["owner"]
        if item["mode"] is not None:
            member.mode = item["mode"]
            if member.isdir():  # whoever may read it may enter it
                member.mode |= (member.mode & 0o444) >> 2
        if not member.isdir():
            with suppress(FileNotFoundError):
                os.unlink(f"/{member.name}")
        yield member


TASKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "inject": inject, "expose": expose, "archive": archive, "insert": insert, "survey": survey,
}  # fmt: skip
CHANGING = ("inject", "insert")


# -- the foreign root --------------------------------------------------------------------------------------------------


@contextmanager
def inside() -> Iterator[None]:
    """With the foreign root as our own; root finds the way back by the folder that it has open."""
    own = os.open("/", os.O_RDONLY)
    os.chroot(ROOT)
    os.chdir("/")
    try:
        yield
    finally:
        os.fchdir(own)
        os.chroot(".")
        os.close(own)


def resolved(path: str) -> str:
    """Where this path leads in the foreign system, links followed there; absolute."""
    with inside():
        os.lstat(target := os.path.realpath(os.path.join("/", path)))
        return target


# -- mounting ----------------------------------------------------------------------------------------------------------


def device_of(serial: str) -> str:
    for name in os.listdir("/sys/block"):
        with suppress(OSError), open(f"/sys/block/{name}/serial") as file:
            if file.read().strip() == serial:
                return name
    raise Trouble("the disk did not arrive in the machine")


def mount_all(disk: str) -> None:
    """The foreign system at ROOT, with those of its file systems that its own table names."""
    for folder in (ROOT, OUT):
        os.makedirs(folder, exist_ok=True)
    parts = [name for name in os.listdir(f"/sys/block/{disk}") if name.startswith(disk)]
    devices = [f"/dev/{name}" for name in sorted(parts or [disk], key=lambda name: (len(name), name))]
    places = {device: tags for device in devices if (tags := identify(device))}
    mount_root(places)
    mount_others(places)


def identify(device: str) -> dict[str, str]:
    """What blkid says of it; empty where it is not a file system that we know."""
    done = run("blkid", "--probe", "--output", "export", device, check=False)
    tags = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    tags |= {ours: tags[key] for key, ours in OF_PARTITIONS.items() if key in tags}
    return tags if tags.get("TYPE") in KINDS else {}


def mount_root(places: dict[str, dict[str, str]]) -> None:
    seen = []
    for device, tags in places.items():
        for subvolume in SUBVOLUMES if tags["TYPE"] == "btrfs" else ("",):
            if why := mount(device, tags["TYPE"], ROOT, f",subvol={subvolume}" if subvolume else ""):
                seen.append(f"{device}: {why}")
                continue
            if any(os.path.lexists(f"{ROOT}/{name}") for name in SYSTEMS):
                return
            run("umount", ROOT)
    raise Trouble(f"no root file system was found on the disk{'; ' if seen else ''}{'; '.join(seen)[:300]}")


def mount_others(places: dict[str, dict[str, str]]) -> None:
    """/boot, /var and the like, as the foreign /etc/fstab has them. Those that cannot be mounted are left out."""
    with suppress(OSError, ValueError):
        for source, target, flags in table():
            for device, tags in places.items():
                if named(source, device, tags):
                    options = [option for option in flags.split(",") if option.startswith("subvol")]
                    mount(device, tags["TYPE"], ROOT + target, "".join(f",{option}" for option in options))


def table() -> list[tuple[str, str, str]]:
    """Source, real path in the foreign root and options of each entry of its /etc/fstab."""
    with inside(), open("/etc/fstab", errors="replace") as file:
        rows = [line.split() for line in file.read(1 << 15).splitlines() if not line.startswith("#")]
        others = [row for row in rows if len(row) > 2 and row[1] not in KEEP_APART and row[1].startswith("/")]
        return [(row[0], os.path.realpath(row[1]), row[3] if len(row) > 3 else "") for row in others]


def named(source: str, device: str, tags: dict[str, str]) -> bool:
    tag, _, value = source.partition("=")
    if tag in TAGS:
        return bool(value) and tags.get(tag, "").lower() == value.strip('"').lower()
    number = device.lstrip("/devabcghijklmnopqrstuwxyz")
    return source.startswith("/dev/") and bool(number) and source.rstrip("0123456789") + number == source


def mount(device: str, kind: str, target: str, more: str) -> str:
    """Why it could not be mounted; empty when it was."""
    run("modprobe", "-q", KINDS[kind], check=False)
    options = f"{HARMLESS}{OPTIONS.get(kind, '')}{more}"
    done = run("mount", "-t", KINDS[kind], "-o", options, device, target, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it cannot be mounted"])[-1]


def run(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    null = subprocess.DEVNULL
    done = subprocess.run(argv, stdin=null, capture_output=True, text=True, errors="replace", check=False)
    if check and done.returncode:
        raise Trouble((done.stderr.strip().splitlines() or [f"{argv[0]} failed"])[-1])
    return done


if __name__ == "__main__":
    main()
