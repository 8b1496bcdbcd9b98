"""Images as QEMU sees them: from its start to the agent's first word, and every way in which that goes wrong.

QEMU is started here as plainly as can be; how belljar starts it is tested elsewhere.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar

from belljar.agent import bundle
from belljar.agent.wire import greeting, welcome
from belljar.host import commands
from belljar.image import Image, Settings
from belljar.image.build import debian as build
from belljar.image.build.debian import Recipe
from belljar.image.store.qcow2 import Overlays
from belljar.image.store.store import Store

SECONDS = 120.0
MIB = 1 << 20


class Guest:
    """A QEMU with the agent's channel and the console at our ends of two socketpairs."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, console: socket.socket) -> None:
        self.process, self.channel, self.console = process, channel, console
        self.said = b""
        self.deadline = time.monotonic() + SECONDS

    def hear(self) -> None:
        """Greet the agent; returns when it has answered as it must."""
        nonce = os.urandom(16)
        self.channel.sendall(greeting(nonce))
        heard = b""
        while welcome(nonce) not in heard:
            self._wait(self.channel)
            part = self.channel.recv(65536)
            assert part, f"QEMU ended; the console said {self._rest()!r}"
            heard += part

    def words(self) -> str:
        """All the console says until QEMU ends."""
        while part := self._receive():
            self.said += part
        assert self.process.wait(SECONDS) == 0
        return self.said.decode(errors="replace").replace("\r", "")

    def _receive(self) -> bytes:
        self._wait(self.console)
        return self.console.recv(65536)

    def _wait(self, end: socket.socket) -> None:
        ready, _, _ = select.select([end], [], [], max(0.0, self.deadline - time.monotonic()))
        assert ready, f"nothing came within {SECONDS:.0f} s; the console said {self._rest()!r}"

    def _rest(self) -> bytes:
        while select.select([self.console], [], [], 0)[0] and (part := self.console.recv(65536)):
            self.said += part
        return self.said[-2000:]


@contextmanager
def booted(
    store: Store, image: Image, folder: Path, *, words: str = "", memory: int = 512, disk: int | None = None
) -> Iterator[Guest]:
    boot, overlay = store.boot_files(image), folder / f"overlay-{time.monotonic_ns()}.qcow2"
    Overlays(store.settings).create(overlay, image, disk)
    ends = [*socket.socketpair(), *socket.socketpair()]
    argv = [
        "qemu-system-x86_64", "-M", "q35,sata=off,usb=off,smbus=off", "-accel", "tcg", "-cpu", "Nehalem", "-m", str(memory),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-drive", f"if=none,id=disk,file={overlay},format=qcow2,cache=unsafe", "-device", "virtio-blk-pci,drive=disk",
        "-device", "virtio-serial-pci", "-device", "virtio-rng-pci",
        "-chardev", f"socket,id=agent,fd={ends[1].fileno()}", "-device", "virtserialport,chardev=agent,name=org.belljar.agent",
        "-chardev", f"socket,id=console,fd={ends[3].fileno()}", "-serial", "chardev:console",
    ]  # fmt: skip
    if boot.kernel:
        argv += ["-kernel", str(boot.kernel), "-initrd", str(boot.initrd), "-append", f"{boot.append} {words}".strip()]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=[ends[1].fileno(), ends[3].fileno()])
    for end in (ends[1], ends[3]):
        end.close()
    try:
        yield Guest(process, ends[0], ends[2])
    finally:
        process.kill()
        process.wait()
        for end in (ends[0], ends[2]):
            end.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of the test's own, before the shared one with the default image."""
    return Store(tmp_path / "store", STORE, Settings(reserve=0))


@pytest.fixture
def image(store: Store) -> Image:
    return store.resolve("debian12")


def test_the_default_image_boots_to_its_agent(store: Store, image: Image, tmp_path: Path) -> None:
    with booted(store, image, tmp_path) as guest:
        guest.hear()


def test_the_probe_says_so_and_powers_off_before_it_touches_the_disk(
    store: Store, image: Image, tmp_path: Path
) -> None:
    with booted(store, image, tmp_path, words="belljar.probe", memory=128) as guest:
        said = guest.words()
    assert "belljar-probe-ok" in said and "ext4" not in said.lower()


def test_a_root_that_is_not_there_is_named_and_the_guest_ends(store: Store, image: Image, tmp_path: Path) -> None:
    with booted(store, image, tmp_path, words="belljar.fstype=xfs") as guest:
        assert "belljar: cannot mount /dev/vda as xfs" in guest.words()


def test_a_panic_ends_the_guest_at_once(store: Store, image: Image, tmp_path: Path) -> None:
    with booted(store, image, tmp_path, words="rdinit=/bin/nothing init=/bin/nothing root=none") as guest:
        assert "Kernel panic" in guest.words()


WITNESS = """\
import os, sys
runs = "/run/belljar/runs"
count = os.path.getsize(runs) if os.path.exists(runs) else 0
with open(runs, "a") as file:
    file.write("x")
def tell(name, value):
    print("witness %s=%s" % (name, value), flush=True)
if count:
    os._exit(7)
mounts = {line.split()[1]: line.split()[2] for line in open("/proc/mounts")}
for path in ("/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/sys/fs/cgroup"):
    tell(path, mounts.get(path))
tell("parent", os.getppid())
tell("init", open("/proc/1/cmdline").read().replace("\\0", " ").strip())
tell("machine-id", os.path.getsize("/etc/machine-id"))
tell("loopback", int(open("/sys/class/net/lo/flags").read(), 16) & 1)
tell("cards", sorted(os.listdir("/sys/class/net")))
import socket
socket.create_server(("127.0.0.1", 0))
tell("fd", os.path.realpath("/dev/fd") == os.path.realpath("/proc/self/fd"))
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.read(read, 1)  # our parent is gone by now: process 1 is the new one
        os._exit(0)
    os._exit(0)
os.wait()
orphans = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > os.getpid()]
pidfd = os.pidfd_open(max(orphans))
os.write(write, b"x")
import select
poller = select.poll()
poller.register(pidfd, select.POLLIN)
poller.poll(10000)
while os.path.exists("/proc/%d" % max(orphans)):
    os.sched_yield()
tell("orphan", "reaped")
os._exit(3)
"""


def test_what_an_agent_finds_and_what_becomes_of_a_guest_whose_agent_dies(
    store: Store, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text(WITNESS)
    monkeypatch.setattr(bundle, "PARTS", (str(tmp_path / "agent.py"),))
    with booted(store, image, tmp_path) as guest:
        said = guest.words()
    told = dict(
        line.removeprefix("witness ").split("=", 1) for line in said.splitlines() if line.startswith("witness ")
    )
    assert told == {
        "/": "ext4", "/proc": "proc", "/sys": "sysfs", "/dev": "devtmpfs", "/dev/pts": "devpts", "/dev/shm": "tmpfs",
        "/run": "tmpfs", "/sys/fs/cgroup": "cgroup2", "parent": "1", "init": "/bin/sh /run/belljar/init", "machine-id": "0",
        "loopback": "1", "cards": "['lo']", "fd": "True", "orphan": "reaped",
    }  # fmt: skip
    assert "the agent ended with code 3, starting it again (1)" in said
    assert "the agent ended with code 7, starting it again (5)" in said
    assert "the agent does not stay up" in said


def test_a_larger_disk_has_a_larger_file_system_and_an_agent_that_is_done_powers_the_guest_off(
    store: Store, image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent.py").write_text("import os\nprint('size', os.statvfs('/').f_blocks * 4096, flush=True)")
    monkeypatch.setattr(bundle, "PARTS", (str(tmp_path / "agent.py"),))
    with booted(store, image, tmp_path, disk=40 << 30) as guest:
        said = guest.words()
    size = int(next(line for line in said.splitlines() if line.startswith("size ")).split()[1])
    assert 38 << 30 < size < 40 << 30, said


def test_a_disk_with_partitions_from_elsewhere_boots_to_the_agent(
    store: Store, image: Image, belljar: Belljar, tmp_path: Path
) -> None:
    disk = tmp_path / "disk.raw"
    with open(disk, "wb") as file:
        file.truncate(MIB + image.virtual_size)
    behind_the_table = f"driver=raw,offset={MIB},size={image.virtual_size},file.driver=file,file.filename={disk}"
    argv = ["qemu-img", "convert", "-n", "-f", "qcow2", str(image.disk), "--target-image-opts", behind_the_table]
    commands.run(argv, timeout=60)
    with open(disk, "r+b") as file:
        file.seek(446 + 16)  # the second entry, of type Linux, beginning at 1 MiB
        file.write(bytes((0, 0, 0, 0, 0x83, 0, 0, 0)) + (2048).to_bytes(4, "little") + (1 << 24).to_bytes(4, "little"))
        file.seek(510)
        file.write(b"\x55\xaa")
    own = {"BELLJAR_PATHS_STORE": str(tmp_path / "store"), "BELLJAR_PATHS_SITE_STORE": str(STORE)}
    done = belljar("image", "import", str(disk), "--name", "mine", env=own)
    assert done.returncode == 0, done.stderr.decode()
    mine = store.resolve("mine")
    disk.unlink()
    assert "belljar.root=/dev/vda2" in mine.append
    with booted(store, mine, tmp_path) as guest:
        guest.hear()


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "name"), [("bullseye", "Linux 11"), ("trixie", "Linux 13")])
def test_the_other_releases_build_and_boot(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suite: str, name: str
) -> None:
    image = build.build(store, Recipe(suite, packages=("file",), commands=("echo made by hand > /etc/motd",)))
    assert "file" in image.facts["added"]
    with booted(store, image, tmp_path) as guest:
        guest.hear()
    (tmp_path / "agent.py").write_text("print(open('/etc/os-release').read(), flush=True)")
    monkeypatch.setattr(bundle, "PARTS", (str(tmp_path / "agent.py"),))
    with booted(store, image, tmp_path) as guest:
        assert name in guest.words()
