"""A clone that is larger than its template: what was plugged in while nobody looked is taken into use before the payload.

The kernel adds memory in a thread of its own, and brings up no processor by itself. The host says how much there is to be;
it hears when all of it is in use, and without that no payload is started.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress

from belljar.agent.guest.network import RESCAN
from belljar.agent.guest.system import Refused, kernel_events, libc, read_file, write_file, write_quietly

BLOCKS = "/sys/devices/system/memory"
TAKES_BLOCKS = BLOCKS + "/auto_online_blocks"
PROCESSORS = "/sys/devices/system/cpu"
# There for what the kernel can be given while it runs.
HOTPLUG = "/sys/firmware/acpi/hotplug/%s/enabled"
HELD = "/proc/sys/vm/nr_hugepages"
SHARED = "/dev/shm"
TRIES = 8  # to bring up a processor
EXT4_IOC_RESIZE_FS = 0x40086610


def abilities() -> list[str]:
    """For a clone of this guest: in what it can be another than its template."""
    there = {
        "cpus": os.path.exists(HOTPLUG % "processor"),
        "memory": os.path.exists(HOTPLUG % "memory") and read_file(TAKES_BLOCKS).strip() not in (b"", b"offline"),
        "less-memory": os.path.exists(HELD) and meminfo("Hugepagesize") > 0,
        "disk": root_device() is not None,
        "card": os.path.exists(RESCAN) and os.path.exists("/sys/bus/virtio/drivers/virtio_net"),
    }
    return sorted(name for name, is_there in there.items() if is_there)


def block_size() -> int:
    return int(read_file(BLOCKS + "/block_size_bytes").strip() or b"0", 16)


def blocks() -> list[str]:
    """The folders of all blocks of memory, the lowest first."""
    names = os.listdir(BLOCKS) if os.path.isdir(BLOCKS) else []
    numbers = sorted(int(name[6:]) for name in names if name[:6] == "memory" and name[6:].isdigit())
    return [f"{BLOCKS}/memory{number}" for number in numbers]


def root_device() -> str | None:
    """The folder of the whole disk that the root file system fills, where that is one that grows; None elsewhere."""
    device = os.stat("/").st_dev
    folder = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    if not os.path.exists(folder + "/size") or os.path.exists(folder + "/partition"):
        return None
    mounts = [line.split() for line in read_file("/proc/mounts").splitlines()]
    return folder if any(row[1:3] == [b"/", b"ext4"] for row in mounts) else None


def take_all(known: int, cpus: int, plugged: int, surplus: int, held: int, disk: int) -> int:
    """Wait until all that a clone has is in use; whoever started this child puts an end to it. *known*: how many blocks of memory its
    template had; *surplus*: bytes that are there and were not asked for; *held*: bytes that the template held back. Returns how many
    bytes are held back. Raises Refused."""
    count = known + plugged // (block_size() or 1)
    events = kernel_events()  # listen first, then look
    try:
        while not has_memory(count) or not has_cpus(cpus):
            events.recv(8192)
    finally:
        events.close()
    if disk:
        grow_root(disk)
    still_held = surplus if surplus == held else hold_back(surplus, held, known > 0)
    if plugged:
        grow_shared_memory((meminfo("MemTotal") - still_held) // 2)
    return still_held


def has_memory(count: int) -> bool:
    """Are there so many blocks, all in use?"""
    states = [read_file(folder + "/state").strip() for folder in blocks()]
    return len(states) >= count and b"offline" not in states


def has_cpus(count: int) -> bool:
    """Are there so many processors, all brought up?"""
    for name in os.listdir(PROCESSORS):
        path = f"{PROCESSORS}/{name}/online"
        is_down = name[:3] == "cpu" and name[3:].isdigit() and read_file(path).strip() == b"0"
        # A kernel gives a processor ten seconds for its first sign of life, which on a busy host it may miss.
        if is_down and not any(write_quietly(path, b"1") for _ in range(TRIES)):
            raise Refused("refused", f"the guest's kernel does not bring up its processor {name}")
    return len(os.sched_getaffinity(0)) >= count


def meminfo(name: str) -> int:
    """In bytes; 0 where the kernel does not count it."""
    for line in read_file("/proc/meminfo").decode("ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def hold_back(size: int, held: int, is_clone: bool) -> int:
    """Keep memory that nobody asked for from everybody, so the host never gives it: a clone's whole blocks go offline, the rest is in
    large pages that nobody uses; *held* bytes are kept so already. Returns how many bytes of what the guest still counts as its memory
    are so kept. Raises Refused."""
    page, block = meminfo("Hugepagesize"), block_size()
    for folder in blocks() if is_clone and block else ():  # a template's clones may get back what it holds
        if size - held >= block and write_quietly(folder + "/state", b"offline"):  # one may hold what cannot be moved
            size -= block
    pages = int(read_file(HELD)) - -(-held // page) + -(-size // page)
    write_file(HELD, b"%d" % pages, flags=0)
    if int(read_file(HELD)) != pages:
        message = f"the guest does not hold back just the {size >> 20} MiB of memory that were not asked for"
        raise Refused("refused", message)
    return size


def grow_root(size: int = 0) -> None:
    """The root file system is to fill its disk, of *size* bytes or as large as that is. No tool of the image is needed. Raises
    Refused."""
    there = int(read_file(f"{root_device()}/size").strip() or b"0") * 512
    if not there or there < size:
        raise Refused("refused", f"the guest's disk has {there} bytes, not {size}")
    fd = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, EXT4_IOC_RESIZE_FS, struct.pack("Q", (size or there) // os.fstatvfs(fd).f_bsize))
    except OSError as exc:
        raise Refused("refused", f"the guest's file system does not grow with its disk: {exc.strerror}") from exc
    finally:
        os.close(fd)


def grow_shared_memory(size: int) -> None:
    """Half of the memory, as at a boot: what is mounted keeps the size that it began with."""
    with suppress(OSError):  # an image may have another kind of file system there, or none
        flags = libc.MS_REMOUNT | os.statvfs(SHARED).f_flag & (libc.MS_NOSUID | libc.MS_NODEV)
        libc.mount(b"shm", SHARED.encode(), b"tmpfs", flags, b"size=%d" % size)


def limit_for(total: int, used: int, surplus: int) -> int:
    """What payloads may use: *used* is the kernel's and ours, *surplus* more than was asked for."""
    meant = total - surplus
    reserve = used + max(16 << 20, meant // 32)
    return max(meant - reserve, meant // 2)
