"""The guest that the agent runs in: its identity, control groups and users. Its mounts are in mounts.py."""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
import struct
import time
from _collections_abc import Callable
from contextlib import suppress

from belljar.agent.guest.accounts import Account, add_to_files
from belljar.agent.guest.cgroups import Box, Cgroup, Family
from belljar.agent.guest.devices import await_devices
from belljar.agent.guest.growth import TAKES_BLOCKS, abilities, blocks, grow_root, limit_for, meminfo, take_all
from belljar.agent.guest.mounts import LongCall, Mounts, checked_target, mount_packed
from belljar.agent.guest.network import SSH, configure_card, host_keys_since, leave_network, renew_host_keys
from belljar.agent.guest.system import Refused, libc, load_filesystem, now, read_file, say, write_file, write_quietly
from belljar.agent.wire import MIB, Patience, Words

RUN = "/run/belljar"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
CGROUPS = "/sys/fs/cgroup"
BEFORE_SERVICES = b"1000"  # the weight of payloads; a service of the guest's has 100
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
# Files that every payload gets; see `features` of the machine room.
FEATURES = {
    "machinefeatures": ("total_cpu",),
    "jobfeatures": ("allocated_cpu", "grace_secs_job", "job_id", "jobstart_secs", "max_rss_bytes"),
}
# The names of a guest that waits for its own.
NOBODY = [b"belljar-000000000000", b"0" * 32, b"0" * 32, b"", b"", b"", b"", b"00" * 64]
# Read into the page cache of a template, so that a clone finds them in memory.
WARM = (
    "sh dash bash env true false cat ls id echo sleep date uname hostname pwd mkdir rm cp mv ln touch chmod head tail wc"
    " grep sed awk sort tar gzip dd mktemp basename dirname python3 nproc df free ps tee tr cut seq test"
).split(" ")
# Looked into before, so that a payload's way to what is there, or a new name, is not read from the disk.
PLACES = "/tmp /home /root /var/tmp /mnt /usr/local/bin /usr/local/sbin /usr/sbin /sbin /dev/shm".split(" ")
SPARES, SPARE_PLACES = b"/var/lib/belljar/spare", 8


class Guest(Mounts):
    """A real guest: the agent is root and alone. A test may play it on its own host."""

    hold_socket = RUN + "/hold.sock"  # where programs say that they are ready to be held
    quiet = 0.3  # seconds between the last thing that settling does and its answer

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.names: dict[str, int] = {}
        self.kept: dict[bytes, int] = {}
        self.sizes: dict[str, int] = {}
        self.hosts = b""
        self.random = -1
        self.address = ""  # of the card
        self.host_keys: list[str] = []
        self.jobs = RUN + "/job"
        self.cgroup = ""
        self.used = 0  # bytes of memory that the kernel and we have at the boot
        self.blocks = 0  # of memory, in the template
        self.held = 0  # bytes of memory that were not asked for
        self.spare: Cgroup | None = None
        self.spare_places: list[bytes] = []
        self.folders = 0
        self.calls |= {
            b"identify": self.identify, b"set_clock": self.set_clock, b"await_devices": await_devices, b"grow": self.grow,
            b"mount_packed": self.mount_packed, b"renew_keys": self.renew_keys,
        }  # fmt: skip

    def prepare(self) -> None:
        """Once per boot, before the first conversation."""
        for path in (RUN, self.jobs):
            os.makedirs(path, 0o711, exist_ok=True)
        if os.statvfs(RUN).f_flag & os.ST_NOEXEC:
            self.jobs = "/var/lib/belljar/job"
            os.makedirs(self.jobs, 0o711, exist_ok=True)
        if os.path.exists(RUN + "/busybox"):  # a container's root, where `/init` has no tool to do it
            try:
                grow_root()
            except Refused as exc:
                say(exc.message)
        write_file("/proc/self/oom_score_adj", b"-1000")
        self.random = os.open("/dev/urandom", os.O_RDWR | os.O_CLOEXEC)
        self.cgroup = self._make_cgroup()

    def _make_cgroup(self) -> str:
        """A control group for all payloads, with a reserve of memory for the kernel and us; "" without cgroup2. It comes before the
        guest's services, which a clone's new name and clock wake."""
        folder = CGROUPS + "/belljar"
        if not os.path.exists(CGROUPS + "/cgroup.controllers"):
            libc.adopt_orphans()
            return ""
        os.makedirs(folder, 0o755, exist_ok=True)
        write_quietly(folder + "/cgroup.kill", b"1")  # what an agent that died has left
        for path in (CGROUPS, folder):
            for controller in (b"+memory", b"+pids"):
                write_quietly(path + "/cgroup.subtree_control", controller)
        total = meminfo("MemTotal")
        self.used = total - meminfo("MemAvailable")
        write_quietly(folder + "/memory.max", b"%d" % limit_for(total, self.used, 0))
        write_quietly(folder + "/cpu.weight", BEFORE_SERVICES)
        return folder

    def growth(self) -> bytes:
        return " ".join(abilities()).encode("ascii")

    def grow(self, words: Words) -> LongCall:
        """Take all into use that this clone was given, then answer with the processors and the memory there are."""
        cpus, plugged, surplus, disk = words.number(), words.number(), words.number(), words.number()
        known, held, self.held = self.blocks, self.held, surplus

        def work() -> bytes:
            still_held, total = take_all(known, cpus, plugged, surplus, held, disk), meminfo("MemTotal")
            if self.cgroup and (plugged or surplus != held):
                most = limit_for(total, self.used + plugged // 64, still_held)
                write_file(self.cgroup + "/memory.max", b"%d" % most, flags=0)
            return b"%d\0%d" % (len(os.sched_getaffinity(0)), total)

        return Patience.GROW, work

    def identify(self, words: Words) -> bytes:
        """Become who the host says; answer what the kernel then says."""
        if not self.names:
            self._keep_names_in_memory()
        name, machine_id, nonce = words.next(), words.next(), words.next()
        mac, address, gateway, dns = words.text(), words.text(), words.text(), words.next()
        self._stir(bytes.fromhex(words.text()))
        time.clock_settime(time.CLOCK_REALTIME, words.number() / 1e6)
        _socket.sethostname(name.decode())
        self._put("hostname", name + b"\n")
        self._put("hosts", self.hosts + b"127.0.1.1 " + name + b"\n")
        self._put("machine-id", machine_id + b"\n")
        self._put("nonce", nonce + b"\n")
        parts = (nonce[:8], nonce[8:12], nonce[12:16], nonce[16:20], nonce[20:])
        self._put("boot_id", b"-".join(parts) + b"\n")
        if mac:
            mac, self.address = configure_card(mac, address, gateway), address
        if mac and dns:
            if os.path.islink("/etc/resolv.conf"):
                os.unlink("/etc/resolv.conf")
            write_file("/etc/resolv.conf", b"nameserver " + dns + b"\n")
        sample = os.getrandom(32).hex()
        proof = (os.uname().nodename, self._get("machine-id"), self._get("boot_id").replace("-", ""), mac, sample)
        return "\0".join(proof).encode("ascii", "replace") + b"\0" + now()

    def _keep_names_in_memory(self) -> None:
        """The files that name the guest move to memory, and stay open: a clone then renames itself by a few writes. The
        nonce becomes the boot's id for everyone who asks the kernel: our file is mounted over the kernel's."""
        lines = [line for line in read_file("/etc/hosts").splitlines(True) if not line.startswith(b"127.0.1.1")]
        if not any(b"localhost" in line for line in lines):
            lines = [b"127.0.0.1 localhost\n", b"::1 localhost ip6-localhost ip6-loopback\n"]
        self.hosts = b"".join(lines)
        for leaf in ("hostname", "hosts", "machine-id", "nonce", "boot_id"):
            path = f"{RUN}/{leaf}"
            write_file(path, b"", 0o644 if leaf[:4] == "host" else 0o444)
            self.names[leaf] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if leaf in ("hostname", "hosts", "machine-id"):
                if os.path.ismount(f"/etc/{leaf}"):  # systemd's machine-id, until it has written it to the disk
                    libc.unmount(f"/etc/{leaf}".encode())
                os.symlink(path, f"/etc/{leaf}.belljar")
                os.rename(f"/etc/{leaf}.belljar", f"/etc/{leaf}")
        libc.mount(f"{RUN}/boot_id".encode(), BOOT_ID.encode(), b"none", libc.MS_BIND, b"")

    def _keep_features(self) -> None:
        """Likewise the payloads' features, as empty, open files: a clone's first file takes long."""
        for folder, leaves in FEATURES.items():
            if os.path.lexists("/etc/" + folder):
                continue
            os.mkdir(f"{RUN}/{folder}", 0o755)
            os.symlink(f"{RUN}/{folder}", "/etc/" + folder)
            for leaf in leaves:
                path = f"/etc/{folder}/{leaf}"
                write_file(path, b"", 0o644)
                self.kept[path.encode()] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def _keep_places(self) -> None:
        """Likewise folders, for a working directory that the guest does not have."""
        for number in range(len(self.spare_places), SPARE_PLACES):
            path = b"%s/%d" % (SPARES, number)
            try:
                os.makedirs(path, 0o755)
            except OSError:
                return  # nothing can be written there
            self.spare_places.append(path)

    def _put(self, leaf: str, text: bytes) -> None:
        os.pwrite(self.names[leaf], text, 0)
        if self.sizes.get(leaf) != len(text):
            os.ftruncate(self.names[leaf], len(text))
            self.sizes[leaf] = len(text)

    def _get(self, leaf: str) -> str:
        return os.pread(self.names[leaf], 64, 0).decode("ascii", "replace").strip()

    def _stir(self, entropy: bytes) -> None:
        """Fresh entropy into the kernel's pool, and from there into its generator at once."""
        fcntl.ioctl(self.random, RNDADDENTROPY, struct.pack("ii", len(entropy) * 8, len(entropy)) + entropy)
        try:
            fcntl.ioctl(self.random, RNDRESEEDCRNG)
        except OSError as exc:
            if exc.errno not in (errno.EINVAL, errno.ENOTTY):  # older than Linux 4.14
                raise

    def set_clock(self, words: Words) -> bytes:
        """Take the time over, or step *by* so much. In microseconds, as all times on the wire."""
        how, amount = words.next(), words.number() / 1e6
        time.clock_settime(time.CLOCK_REALTIME, time.time() + amount if how == b"by" else amount)
        return now()

    def renew_keys(self, words: Words) -> LongCall:
        """Give the ssh server keys that no other clone has. Making keys takes a while."""
        old, self.host_keys = self.host_keys, []
        return Patience.KEYS, lambda: renew_host_keys(old, SSH)

    def mount_packed(self, words: Words) -> LongCall:
        """Lay a packed folder at its place, as the user for a while."""
        name, device, inside, cwd = words.next(), words.next(), words.next(), words.next()
        account = Account(words)
        self.add_account(account)
        cwd = cwd or account.home_path
        self.make_place(cwd, account)
        target = os.path.join(cwd, inside)
        return Patience.PACKED, lambda: mount_packed(name, device, checked_target(target), account)

    def add_account(self, account: Account) -> None:
        if account.key in self.known or account.is_plain_root():
            return
        add_to_files(account)
        home = account.home
        if home.startswith("/") and not os.path.exists(home):
            os.makedirs(os.path.dirname(home), exist_ok=True)
            os.mkdir(home, 0o700)
            os.chown(home, account.uid, account.gid)
        self.known.add(account.key)

    def make_place(self, path: bytes, account: Account) -> None:
        """The working directory, with those above it, the payload's own where they are missing: outside it is there."""
        missing = []
        while path.startswith(b"/") and not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        with suppress(OSError, ValueError):  # entering it says what is wrong
            for folder in reversed(missing):
                if not self._place_spare(folder) or account.uid or account.gid:
                    os.chown(folder, account.uid, account.gid)

    def _place_spare(self, path: bytes) -> bool:
        """A new folder there, by another name of one that was made before where that can be: its room on the disk is found then. False
        where it may have another owner than root."""
        if self.spare_places:
            try:
                os.rename(self.spare_places.pop(), path)
                return True
            except OSError:
                self.spare_places = []  # that is another file system
        os.mkdir(path, 0o755)
        return False

    def new_folder(self, account: Account) -> bytes:
        self.folders += 1
        folder = f"{self.jobs}/{os.getpid()}.{self.folders}".encode()
        os.mkdir(folder, 0o700)
        self.give(folder, account)
        return folder

    def box(self) -> Box:
        if not self.cgroup:
            return Family()
        ready, self.spare = self.spare or Cgroup(self.cgroup), None
        return ready

    def after_payload(self) -> None:
        """Beside the hot path: the next payload's box."""
        if self.cgroup and self.spare is None:
            self.spare = Cgroup(self.cgroup)

    def give(self, what: int | bytes, account: Account, group: int | None = None) -> None:
        """Make a pipe, a terminal or a folder the user's own, so that /dev/stdout and /dev/tty can be opened by name."""
        if account.uid:
            os.chown(what, account.uid, account.gid if group is None else group)

    def leave_agent(self) -> None:
        """In the child: as easy prey for the OOM killer as anybody."""
        write_file("/proc/self/oom_score_adj", b"0", flags=0)

    def become(self, account: Account) -> None:
        """In the child: from the agent to the user."""
        os.setgroups(account.group_ids)
        os.setresgid(account.gid, account.gid, account.gid)
        os.setresuid(account.uid, account.uid, account.uid)

    def warm(self, fork: Callable[[], None]) -> None:
        """Go once through what every clone will do, so that a template has it ready; *fork* makes the next process."""
        import resource
        import tarfile
        import termios

        assert tarfile and resource and termios
        for name in WARM:
            for folder in ("/usr/bin/", "/bin/"):
                if read_file(folder + name, 4 * MIB):
                    break
        for folder in PLACES:
            os.path.lexists(folder + "/.belljar")
        find_room()
        self._keep_places()
        os.spawnv(os.P_WAIT, "/bin/sh", ["sh", "-c", "true; env true; exit 0"])
        load_filesystem("squashfs")
        load_filesystem("overlay")
        # The kernel takes new memory into use by itself, for anything: what never goes again need not be movable.
        write_quietly(TAKES_BLOCKS, b"online")
        self.blocks = len(blocks())
        self.host_keys = host_keys_since(time.time() - time.monotonic(), SSH)
        self.after_payload()
        self._keep_features()
        if self.address:
            leave_network(self.address)
            write_file("/etc/resolv.conf", b"")
        self.identify(Words([*NOBODY, now()]))
        if self.cgroup:
            fork()
            # Once more: what the fork has left shared is copied now, not by each clone.
            self.identify(Words([*NOBODY, now()]))


def find_room() -> None:
    """Make folders and remove them: what the disk tells of free room, all over it, is in memory then. A clone would read it for its
    first folder, such as the payload's working directory."""
    for place in ("", "/home"):
        paths = [f"{place}/.belljar-{number}" for number in range(16)]
        with suppress(OSError):  # nothing can be written there
            for path in paths:
                os.mkdir(path, 0o700)
            for path in paths:
                os.rmdir(path)
