"""A disk that boots as on a real machine: SeaBIOS, a boot loader, its own kernel, its own init, belljar's agent as a service.

belljar puts nothing into such a disk, so it is made here as its owner would make it, with the agent that
`belljar image agent --print` gives and an init that does what docs/images.md asks for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.live.conftest import STORE, Belljar

from belljar.image import Settings, cpio
from belljar.image.look import Files, Partition
from belljar.image.store import Store

MIB = 1 << 20
BOOT_AT, ROOT_AT = MIB, 64 * MIB  # where the two partitions begin
SECTOR, BOOTABLE, FAT16, LINUX = 512, 0x80, 0x0E, 0x83
MASTER_BOOT_RECORD = Path("/usr/lib/syslinux/mbr/mbr.bin")

LOADER = """\
SERIAL 0 115200
DEFAULT linux
LABEL linux
  KERNEL vmlinuz
  INITRD initrd
  APPEND console=ttyS0 quiet panic=-1 mitigations=off started-by=syslinux
"""
RAMDISK_INIT = b"""\
#!/bin/sh
mount -t devtmpfs dev /dev
while read -r module; do insmod /modules/$module 2> /dev/null; done < /modules/always
mount -t ext4 /dev/vda2 /root
mount --move /dev /root/dev
exec switch_root /root /usr/sbin/init
"""
# What docs/images.md says an init other than systemd has to do.
INIT = """\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o mode=755 run /run
mkdir -p /dev/pts
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
while :; do /usr/bin/python3 -I -S /usr/lib/belljar/agent.py; done
"""
# Says `no agent` on the first serial port and halts.
LONELY = bytes.fromhex("31c0 8ed8 baf803 be157c ac 84c0 7403 ee ebf8 f4 ebfd") + b"no agent\n\0"


@pytest.fixture
def belljar(tmp_path: Path) -> Iterator[Belljar]:
    """The command with a store of its own, gone afterwards: nobody else boots these disks."""
    command = Belljar(tmp_path, store=tmp_path / "store")
    yield command
    command.close()
    shutil.rmtree(command.folder / "store", ignore_errors=True)


def test_a_disk_with_its_own_boot_loader_runs_jobs_cold_and_as_a_clone(belljar: Belljar, tmp_path: Path) -> None:
    disk = bootable_disk(tmp_path, agent=belljar("image", "agent", "--print").stdout)
    done = belljar("image", "import", str(disk), "--name", "appliance")
    disk.unlink()
    assert done.returncode == 0, done.stderr.decode()
    assert b"boots by firmware and needs the agent" in done.stderr
    assert belljar.json("image", "show", "appliance")["facts"]["boots_by"] == "firmware"

    for start in ("cold", "clone"):
        report = tmp_path / f"{start}.json"
        words = ["--image", "appliance", "--start", start, "--report", str(report)]
        done = belljar.run(*words, "--", "cat", "/proc/cmdline")
        assert done.returncode == 0, done.stderr.decode()
        assert b"started-by=syslinux" in done.stdout
        assert json.loads(report.read_bytes())["start"] == start
    done = belljar.run("--image", "appliance", "--start", "clone", "--", "sh", "-c", "echo $$ >&2; exit 7")
    assert done.returncode == 7
    assert belljar.leftovers() == []


def test_a_disk_without_the_agent_ends_at_the_boot_deadline_with_a_hint(belljar: Belljar, tmp_path: Path) -> None:
    disk = tmp_path / "lonely.raw"
    disk.write_bytes(LONELY.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - SECTOR))
    assert belljar("image", "import", str(disk), "--name", "lonely").returncode == 0
    words = ["--image", "lonely", "--memory", "128M"]
    for start, who in (("cold", "the guest's agent"), ("auto", "the guest's agent"), ("clone", "the template's agent")):
        asked = [*words, "--start", start, "--name", f"started-{start}"]
        done = belljar.run(*asked, "--", "true", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "3"})
        said = done.stderr.decode()
        assert done.returncode == 125, said
        assert f"waited 3 s for {who} to answer" in said
        assert start == "clone" or "belljar image agent --print" in said
        assert belljar.leftovers() == []
    assert b"no agent" in belljar("logs", "started-cold", "--console").stdout


def bootable_disk(folder: Path, agent: bytes) -> Path:
    """The default image's system behind a boot loader of its own: no belljar in the boot, and no kernel in the root."""
    image = Store(STORE, None, Settings()).resolve("debian12")
    assert image.initrd
    disk = folder / "disk.raw"
    with open(disk, "wb") as file:
        file.truncate(ROOT_AT + image.virtual_size)
    target = f"driver=raw,offset={ROOT_AT},size={image.virtual_size},file.driver=file,file.filename={disk}"
    execute("qemu-img", "convert", "-n", "-f", "qcow2", str(image.disk), "--target-image-opts", target)
    kernel = f"/boot/vmlinuz-{image.facts['release']}"
    parts = {
        "vmlinuz": Files(disk, Partition(2, ROOT_AT)).read(kernel),
        "initrd": image.initrd.read_bytes() + cpio.archive([cpio.file("init", RAMDISK_INIT, 0o755)]),
        "syslinux.cfg": LOADER.encode(),
        "init": INIT.encode(),
        "agent.py": agent,
    }
    for name, data in parts.items():
        (folder / name).write_bytes(data)
    (folder / "init").chmod(0o755)
    partition(disk, image.virtual_size)
    make_boot_partition(disk, [folder / name for name in ("vmlinuz", "initrd", "syslinux.cfg")])
    install(disk, folder, without=kernel)
    return disk


def partition(disk: Path, root_size: int) -> None:
    """Boot code and a table of two partitions."""
    rows = ((BOOTABLE, FAT16, BOOT_AT, ROOT_AT - BOOT_AT), (0, LINUX, ROOT_AT, root_size))
    with open(disk, "r+b") as file:
        file.write(MASTER_BOOT_RECORD.read_bytes()[:440])
        file.seek(446)
        for flag, kind, begin, size in rows:
            place = (begin // SECTOR).to_bytes(4, "little") + (size // SECTOR).to_bytes(4, "little")
            file.write(bytes((flag, 0, 0, 0, kind, 0, 0, 0)) + place)
        file.seek(510)
        file.write(b"\x55\xaa")


def make_boot_partition(disk: Path, files: list[Path]) -> None:
    where = f"{disk}@@{BOOT_AT}"
    sectors = (ROOT_AT - BOOT_AT) // SECTOR
    execute("mformat", "-i", where, "-T", str(sectors), "-h", "16", "-s", "63", "-H", str(BOOT_AT // SECTOR), "::")
    execute("mcopy", "-i", where, *map(str, files), "::")
    execute("syslinux", "--install", "--offset", str(BOOT_AT), str(disk))


def install(disk: Path, folder: Path, *, without: str) -> None:
    """The agent and an init that starts it; away with the kernel, which is on the other partition."""
    orders = folder / "orders"
    orders.write_text(
        f"rm {without}\nmkdir /usr/lib/belljar\n"
        f"cd /usr/lib/belljar\nwrite {folder}/agent.py agent.py\n"
        f"cd /usr/sbin\nwrite {folder}/init init\n"
    )
    execute("debugfs", "-w", "-f", str(orders), f"{disk}?offset={ROOT_AT}")


def execute(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, f"{argv[0]}: {done.stderr.decode(errors='replace')}"
