"""A disk that boots as on a real machine: SeaBIOS, a boot loader, its own kernel, its own init, belljar's agent as a service.

belljar puts nothing into such a disk, so it is made here as its owner would make it, with the agent that
`belljar image agent --tar` gives and an init that does what docs/jobs/images.md asks for.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.live.conftest import STORE, Belljar

from belljar.host.python.interpreter import command
from belljar.image import AGENT_PATH, Image, Settings
from belljar.image.boot import cpio
from belljar.image.build import debian as build
from belljar.image.build.debian import Recipe
from belljar.image.store.store import Store

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
exec switch_root /root /sbin/init
"""
# What docs/jobs/images.md says an init other than systemd has to do.
INIT = """\
#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o mode=755 run /run
mkdir -p /dev/pts
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
while :; do {command} {folder}/agent.pyc; done
"""
UNIT = "belljar-agent.service"
# Says `no agent` on the first serial port and halts.
LONELY = bytes.fromhex("31c0 8ed8 baf803 be157c ac 84c0 7403 ee ebf8 f4 ebfd") + b"no agent\n\0"


def install_agent(belljar: Belljar, folder: Path) -> str:
    """Orders for debugfs that do what docs/jobs/images.md says: unpack the agent at its place."""
    with tarfile.open(fileobj=io.BytesIO(belljar("image", "agent", "--tar").stdout)) as archive:
        archive.extractall(folder / "agent")
    orders = [f"mkdir {AGENT_PATH}"]
    for path in sorted((folder / "agent").rglob("*")):
        inside = f"{AGENT_PATH}/{path.relative_to(folder / 'agent')}"
        orders.append(f"mkdir {inside}" if path.is_dir() else f"write {path} {inside}")
    return "".join(f"{order}\n" for order in orders)


@pytest.fixture
def belljar(tmp_path: Path) -> Iterator[Belljar]:
    """The command with a store of its own, gone afterwards: nobody else boots these disks."""
    command = Belljar(tmp_path, store=tmp_path / "store")
    command.env["BELLJAR_PATHS_SITE_STORE"] = str(STORE)
    yield command
    command.close()
    shutil.rmtree(command.folder / "store", ignore_errors=True)


@pytest.mark.slow  # a minute of a boot loader
def test_a_disk_with_its_own_boot_loader_runs_jobs_cold_and_as_a_clone(belljar: Belljar, tmp_path: Path) -> None:
    image = Store(STORE, None, Settings()).resolve("debian12")
    (tmp_path / "init").write_text(INIT.format(command=command(AGENT_PATH), folder=AGENT_PATH))
    (tmp_path / "init").chmod(0o755)
    disk = bootable_disk(image, tmp_path, f"{install_agent(belljar, tmp_path)}cd /usr/sbin\nwrite init init\n")
    import_as_appliance(belljar, disk)
    for start in ("cold", "clone"):
        outcome, said = run_appliance(belljar, start, "cat", "/proc/cmdline")
        assert (outcome["start"], outcome["exit_code"]) == (start, 0), outcome
        assert "started-by=syslinux" in said
    outcome, _ = run_appliance(belljar, "clone", "sh", "-c", "exit 7")
    assert outcome["exit_code"] == 7
    assert belljar.leftovers() == []


@pytest.mark.slow
def test_a_disk_with_systemd_and_the_unit_runs_jobs_when_it_is_up(belljar: Belljar, tmp_path: Path) -> None:
    packages = ("systemd", "systemd-sysv", "udev", "dbus")
    image = build.build(Store(tmp_path / "built", None, Settings()), Recipe("bookworm", "systemd", packages))
    (tmp_path / UNIT).write_bytes(belljar("image", "agent", "--unit").stdout)
    enable = f"cd multi-user.target.wants\nsymlink {UNIT} /etc/systemd/system/{UNIT}\n"
    install = install_agent(belljar, tmp_path)
    disk = bootable_disk(image, tmp_path, f"{install}cd /etc/systemd/system\nwrite {UNIT} {UNIT}\n{enable}")
    shutil.rmtree(tmp_path / "built")
    import_as_appliance(belljar, disk)
    for start in ("cold", "clone"):
        outcome, said = run_appliance(belljar, start, "systemctl", "is-active", "multi-user.target", UNIT)
        assert (outcome["start"], outcome["exit_code"]) == (start, 0), outcome
        assert said.split() == ["active", "active"]


def test_a_disk_without_the_agent_ends_at_the_boot_deadline_with_a_hint(belljar: Belljar, tmp_path: Path) -> None:
    disk = tmp_path / "lonely.raw"
    disk.write_bytes(LONELY.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - SECTOR))
    assert belljar("image", "import", str(disk), "--name", "lonely").returncode == 0
    words = ["--image", "lonely", "--memory", "128M"]
    for start in ("cold", "auto", "clone"):
        asked = [*words, "--start", start, "--name", f"started-{start}"]
        done = belljar.run(*asked, "--", "true", env={"BELLJAR_QEMU_BOOT_TIMEOUT": "3"})
        said = done.stderr.decode()
        assert done.returncode == 125, said
        assert "agent to answer" in said and "context none" in said
        assert start == "clone" or "belljar image agent --tar" in said
        assert belljar.leftovers() == []
    assert b"no agent" in belljar("logs", "started-cold", "--console").stdout


def test_a_disk_that_nothing_can_be_booted_from_is_found_out_at_once(belljar: Belljar, tmp_path: Path) -> None:
    """One with a partition table alone hung in the BIOS until the boot's deadline."""
    disk = tmp_path / "data.raw"
    disk.write_bytes(bytes(510) + b"\x55\xaa" + b"data".ljust(MIB - SECTOR, b"\0"))
    assert belljar("image", "import", str(disk), "--name", "data").returncode == 0
    done = belljar.run("--image", "data", "--memory", "128M", "--", "true", timeout=30)
    assert done.returncode == 125
    assert "image data: nothing to start in its disk" in done.stderr.decode()
    assert belljar.leftovers() == []


def import_as_appliance(belljar: Belljar, disk: Path) -> None:
    done = belljar("image", "import", str(disk), "--name", "appliance")
    disk.unlink()
    assert done.returncode == 0, done.stderr.decode()
    assert b"image appliance: it boots by firmware" in done.stderr
    assert belljar.json("image", "show", "appliance")["facts"]["boots_by"] == "firmware"


def run_appliance(belljar: Belljar, start: str, *argv: str) -> tuple[dict[str, Any], str]:
    """The outcome of a job, and what it said."""
    report = belljar.folder / "report.json"
    done = belljar.run("--image", "appliance", "--start", start, "--report", str(report), "--", *argv)
    return json.loads(report.read_bytes()), done.stdout.decode()


def bootable_disk(image: Image, folder: Path, orders: str) -> Path:
    """The image's system behind a boot loader of its own: no belljar in the boot, and no kernel in the root. *orders* tell
    debugfs what to install from the files in *folder*."""
    assert image.initrd
    disk = folder / "disk.raw"
    with open(disk, "wb") as file:
        file.truncate(ROOT_AT + image.virtual_size)
    target = f"driver=raw,offset={ROOT_AT},size={image.virtual_size},file.driver=file,file.filename={disk}"
    execute("qemu-img", "convert", "-n", "-f", "qcow2", str(image.disk), "--target-image-opts", target)
    kernel = f"/boot/vmlinuz-{image.facts['release']}"
    boot = {
        "vmlinuz": execute("debugfs", "-R", f"cat {kernel}", f"{disk}?offset={ROOT_AT}"),
        "initrd": image.initrd.read_bytes() + cpio.archive([cpio.file("init", RAMDISK_INIT, 0o755)]),
        "syslinux.cfg": LOADER.encode(),
    }
    for name, data in boot.items():
        (folder / name).write_bytes(data)
    partition(disk, image.virtual_size)
    make_boot_partition(disk, [folder / name for name in boot])
    (folder / "orders").write_text(f"rm {kernel}\n{orders}")
    execute("debugfs", "-w", "-f", "orders", f"{disk}?offset={ROOT_AT}", cwd=folder)
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


def execute(*argv: str, cwd: Path | None = None) -> bytes:
    done = subprocess.run(argv, capture_output=True, check=False, timeout=120, cwd=cwd)
    assert done.returncode == 0, f"{argv[0]}: {done.stderr.decode(errors='replace')}"
    return done.stdout
