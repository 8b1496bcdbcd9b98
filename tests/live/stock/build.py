"""Stock images as a distributor makes them: a whole Debian with its own boot loader, systemd, cloud-init and sshd, and nothing
of belljar's. After Debian's own cloud images: GPT, root as partition 1, BIOS boot 14, EFI system partition 15; GRUB in
both, by the release's own packages; cloud kernel, its initial ramdisk by initramfs-tools; netplan and systemd-networkd, or
ifupdown in Debian 11.

`build` keeps what it made beside the tests' store, keyed by the recipe and by this file. Run as a program it builds what it
is told: `python -m tests.live.stock.build bookworm`. Root only, as all live tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.live.conftest import STORE

from belljar.host.locks import locked
from belljar.image.build import debian

CACHE = STORE.parent / f"{STORE.name}-stock"
MIB = 1 << 20
SECTOR = 512
DISK_SIZE = 3 << 30
# As Debian's: root is partition 1 and comes last, so that it can grow.
BIOS_AT, ESP_AT, ROOT_AT = 1 * MIB, 4 * MIB, 128 * MIB
BIOS_BOOT = uuid.UUID("21686148-6449-6e6f-744e-656564454649")
ESP = uuid.UUID("c12a7328-f81f-11d2-ba4b-00a0c93ec93b")
LINUX_X86_64_ROOT = uuid.UUID("4f68bce3-e8cd-4db1-96e7-fbcaf984b709")

ALWAYS = (
    "systemd-sysv", "udev", "dbus", "libpam-systemd", "kmod", "procps", "iproute2", "iputils-ping", "openssh-server",
    "sudo", "ca-certificates", "less", "linux-image-cloud-amd64", "initramfs-tools", "grub-pc-bin", "grub-common",
    "grub2-common", "grub-efi-amd64-bin", "grub-efi-amd64-signed", "shim-signed", "cron", "logrotate", "apt-utils",
)  # fmt: skip
CLOUD = ("cloud-init", "cloud-guest-utils", "python3", "unattended-upgrades", "apparmor", "bash-completion", "locales")
RELEASES = {
    "bullseye": ("ifupdown", "isc-dhcp-client", "resolvconf", "systemd-timesyncd"),
    "bookworm": ("netplan.io", "systemd-resolved", "systemd-timesyncd", "polkitd"),
    "trixie": ("netplan.io", "systemd-resolved", "systemd-timesyncd", "polkitd"),
}
FILE_SYSTEMS = {"ext4": ("e2fsprogs",), "xfs": ("xfsprogs", "e2fsprogs")}


@dataclass(frozen=True)
class Recipe:
    """One stock image. *bare*: without Python and cloud-init, so that only ssh leads into it."""

    suite: str
    file_system: str = "ext4"
    bare: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.suite}{'-bare' if self.bare else ''}{'' if self.file_system == 'ext4' else f'-{self.file_system}'}"
        )

    @property
    def packages(self) -> tuple[str, ...]:
        network = () if self.bare else RELEASES[self.suite]
        return (*ALWAYS, *(() if self.bare else CLOUD), *network, *FILE_SYSTEMS[self.file_system])

    @property
    def digest(self) -> str:
        mine = Path(__file__).read_bytes()
        return hashlib.sha256(repr(self).encode() + mine).hexdigest()[:16]

    def guid(self, what: str) -> uuid.UUID:
        """Random-looking, and the same at each build."""
        return uuid.uuid5(uuid.NAMESPACE_URL, f"stock:{self.name}:{what}")


def build(recipe: Recipe) -> Path:
    """The image as a compressed qcow2, made now where it is missing. Others who want the same one wait."""
    CACHE.mkdir(parents=True, exist_ok=True)
    done = CACHE / f"{recipe.name}-{recipe.digest}.qcow2"
    with locked(CACHE / f"{recipe.name}.lock", timeout=1800, what=f"build the stock image {recipe.name}"):
        if not done.exists():
            for old in CACHE.glob(f"{recipe.name}-{'?' * 16}.qcow2"):
                old.unlink()
            with tempfile.TemporaryDirectory(dir=CACHE, prefix=f"{recipe.name}-", ignore_cleanup_errors=True) as work:
                folder = Path(work)
                raw = make(recipe, folder)
                part = folder / "disk.qcow2"
                execute("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", str(raw), str(part))
                part.rename(done)
    return done


def build_all(recipes: list[Recipe]) -> list[Path]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, recipes))


def make(recipe: Recipe, folder: Path) -> Path:
    """The raw disk, in *folder*."""
    root, raw = folder / "root", folder / "disk.raw"
    install(recipe, folder / "root.tar")
    root.mkdir(mode=0o755)
    execute("tar", "-xf", str(folder / "root.tar"), "-C", str(root), "--numeric-owner", "-p", "--xattrs-include=*",
            "--exclude=./dev/*")  # fmt: skip
    (folder / "root.tar").unlink()
    configure(recipe, root)
    with open(raw, "wb") as file:
        file.truncate(DISK_SIZE)
    write_table(recipe, raw)
    put_bios_loader(recipe, root, folder, raw)
    put_uefi_loader(recipe, root, folder, raw)
    FILL[recipe.file_system](recipe, root, raw)
    shutil.rmtree(root)
    return raw


# -- the system ----------------------------------------------------------------------------------------------------------


def install(recipe: Recipe, tar: Path) -> None:
    """mmdebstrap, with the packages' own scripts: they make the initial ramdisk, enable services, write their settings."""
    env = {**os.environ, **debian.proxies(), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    env["TMPDIR"] = str(tar.parent)
    argv = [
        "mmdebstrap", "--mode=root", "--variant=important" if not recipe.bare else "--variant=minbase",
        "--architectures=amd64", f"--include={','.join(recipe.packages)}",
        '--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Retries "3"', "--dpkgopt=force-unsafe-io",
        "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*", recipe.suite, str(tar), *sources(recipe.suite),
    ]  # fmt: skip
    confined = ["unshare", "--mount", "--pid", "--kill-child", "--mount-proc", "--propagation=private", "--"]
    execute(*confined, *argv, env=env)


def sources(suite: str) -> list[str]:
    """Debian 11 as its last point release: mirrors keep it whole, and drop packages of its security archive one by one."""
    lines = debian.sources(suite, "")
    return lines[:1] if suite == "bullseye" else lines


def configure(recipe: Recipe, root: Path) -> None:
    """What a distributor's scripts do after the packages are in."""
    options = "rw,discard,errors=remount-ro" if recipe.file_system == "ext4" else "rw,discard"
    files = {
        "etc/fstab": f"PARTUUID={recipe.guid('root')} / {recipe.file_system} {options} 0 1\n"
        f"PARTUUID={recipe.guid('esp')} /boot/efi vfat defaults 0 0\n",
        "etc/hostname": "localhost\n",
        "etc/hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n",
        "etc/default/locale": "LANG=C.UTF-8\n",
        "etc/default/grub": 'GRUB_DEFAULT=0\nGRUB_TIMEOUT=0\nGRUB_DISTRIBUTOR=Debian\nGRUB_CMDLINE_LINUX_DEFAULT=""\n'
        'GRUB_CMDLINE_LINUX="console=tty0 console=ttyS0,115200 earlyprintk=ttyS0,115200 consoleblank=0"\n'
        'GRUB_TERMINAL="console serial"\n',
        "etc/machine-id": "" if recipe.suite == "bullseye" else "uninitialized\n",
        "boot/grub/grub.cfg": grub_menu(recipe, root),
    }
    if recipe.bare:
        files["etc/systemd/network/20-all.network"] = "[Match]\nName=en* eth*\n\n[Network]\nDHCP=yes\n"
        enable(root, "multi-user.target.wants", "systemd-networkd.service")
    elif recipe.suite == "bullseye":
        files["etc/network/interfaces"] = (
            "auto lo\niface lo inet loopback\n\nsource-directory /etc/network/interfaces.d\n"
        )
        files["etc/udev/rules.d/75-cloud-ifupdown.rules"] = HOTPLUG
    else:
        files["etc/netplan/90-default.yaml"] = NETPLAN
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
        (root / path).chmod(0o600 if "netplan" in path else 0o644)
    (root / "boot/efi").mkdir(exist_ok=True)
    for key in (*root.glob("etc/ssh/ssh_host_*"), root / "var/lib/dbus/machine-id", root / "etc/resolv.conf"):
        key.unlink(missing_ok=True)
    if recipe.suite != "bullseye" and not recipe.bare:
        (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    if recipe.bare:  # cloud-init makes the host keys where there is one
        (root / "etc/systemd/system/ssh-keys.service").write_text(HOST_KEYS)
        enable(root, "multi-user.target.wants", "ssh-keys.service", "/etc/systemd/system/ssh-keys.service")
    modules = root / "boot/grub/i386-pc"
    shutil.copytree(root / "usr/lib/grub/i386-pc", modules, dirs_exist_ok=True)


def enable(root: Path, target: str, unit: str, path: str = "") -> None:
    wants = root / "etc/systemd/system" / target
    wants.mkdir(exist_ok=True)
    link = wants / unit
    if not link.is_symlink():
        link.symlink_to(path or f"/lib/systemd/system/{unit}")


NETPLAN = """\
network:
    version: 2
    ethernets:
        all-en:
            match:
                name: en*
            dhcp4: true
            dhcp4-overrides:
                use-domains: true
            dhcp6: true
            dhcp6-overrides:
                use-domains: true
        all-eth:
            match:
                name: eth*
            dhcp4: true
            dhcp4-overrides:
                use-domains: true
            dhcp6: true
            dhcp6-overrides:
                use-domains: true
"""
HOTPLUG = 'SUBSYSTEM=="net", ACTION=="add", ENV{ID_NET_NAME_PATH}!="", RUN+="/bin/true"\n'
HOST_KEYS = """\
[Unit]
Description=Host keys of this machine
Before=ssh.service
ConditionPathExists=!/etc/ssh/ssh_host_ed25519_key

[Service]
Type=oneshot
ExecStart=/usr/bin/ssh-keygen -A

[Install]
WantedBy=multi-user.target
"""


# -- the boot loaders ----------------------------------------------------------------------------------------------------


def grub_menu(recipe: Recipe, root: Path) -> str:
    """What update-grub writes, without the parts for a screen. It cannot run here: it asks the kernel for the root's device."""
    (kernel,) = root.glob("boot/vmlinuz-*")
    version = kernel.name.removeprefix("vmlinuz-")
    words = "console=tty0 console=ttyS0,115200 earlyprintk=ttyS0,115200 consoleblank=0"
    return f"""\
set default=0
set timeout=0
insmod part_gpt
insmod {"ext2" if recipe.file_system == "ext4" else "xfs"}
serial --unit=0 --speed=115200
terminal_input console serial
terminal_output console serial
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux --class gnu --class os {{
    insmod gzio
    search --no-floppy --fs-uuid --set=root {recipe.guid("root-fs")}
    linux /boot/vmlinuz-{version} root=PARTUUID={recipe.guid("root")} ro {words}
    initrd /boot/initrd.img-{version}
}}
"""


def put_bios_loader(recipe: Recipe, root: Path, folder: Path, raw: Path) -> None:
    """boot.img in the first sector, core.img in the BIOS boot partition: what grub-install does, without a device."""
    modules = ["biosdisk", "part_gpt", "part_msdos", "ext2", "xfs", "search", "search_fs_uuid", "normal", "configfile"]
    load = folder / "load.cfg"
    load.write_text(f"search.fs_uuid {recipe.guid('root-fs')} root\nset prefix=($root)/boot/grub\n")
    library = root / "usr/lib/grub/i386-pc"
    execute("grub-mkimage", "-O", "i386-pc", "-d", str(library), "-c", str(load), "-p", "/boot/grub", "-o",
            str(folder / "core.img"), *modules)  # fmt: skip
    first, core = bytearray((library / "boot.img").read_bytes()), bytearray((folder / "core.img").read_bytes())
    at = BIOS_AT // SECTOR
    first[0x5C:0x64] = at.to_bytes(8, "little")  # where core.img begins
    first[0x66:0x68] = b"\x90\x90"  # trust the drive number the BIOS gives
    core[0x1F4:0x1FC] = (at + 1).to_bytes(8, "little")  # where its second sector lies
    assert len(core) <= ESP_AT - BIOS_AT
    with open(raw, "r+b") as file:
        file.write(first[:440])
        file.seek(BIOS_AT)
        file.write(core)


def put_uefi_loader(recipe: Recipe, root: Path, folder: Path, raw: Path) -> None:
    """The removable-media path: shim, then the release's signed GRUB, which looks for its menu in /EFI/debian."""
    menu = f"search.fs_uuid {recipe.guid('root-fs')} root\nset prefix=($root)/boot/grub\nconfigfile $prefix/grub.cfg\n"
    (folder / "grub.cfg").write_text(menu)
    where = f"{raw}@@{ESP_AT}"
    sectors = (ROOT_AT - ESP_AT) // SECTOR
    execute(
        "mformat", "-i", where, "-T", str(sectors), "-h", "255", "-s", "63", "-H", str(ESP_AT // SECTOR), "-F", "::"
    )
    execute("mmd", "-i", where, "::/EFI", "::/EFI/BOOT", "::/EFI/debian")
    places = {
        root / "usr/lib/shim/shimx64.efi.signed": "EFI/BOOT/BOOTX64.EFI",
        root / "usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed": "EFI/BOOT/grubx64.efi",
        folder / "grub.cfg": "EFI/debian/grub.cfg",
    }
    for source, target in places.items():
        execute("mcopy", "-i", where, str(source), f"::/{target}")


# -- the disk ------------------------------------------------------------------------------------------------------------


def write_table(recipe: Recipe, raw: Path) -> None:
    """A GPT with its copy at the end, and the protective MBR."""
    last = DISK_SIZE // SECTOR - 1
    rows = {
        1: (LINUX_X86_64_ROOT, recipe.guid("root"), ROOT_AT, DISK_SIZE - MIB),
        14: (BIOS_BOOT, recipe.guid("bios"), BIOS_AT, ESP_AT),
        15: (ESP, recipe.guid("esp"), ESP_AT, ROOT_AT),
    }
    table = bytearray(128 * 128)
    for number, (kind, guid, begin, end) in rows.items():
        entry = kind.bytes_le + guid.bytes_le
        entry += (begin // SECTOR).to_bytes(8, "little") + (end // SECTOR - 1).to_bytes(8, "little")
        table[(number - 1) * 128 : (number - 1) * 128 + len(entry)] = entry
    entries = bytes(table)

    def header(mine: int, other: int, table_at: int) -> bytes:
        def fill(checksum: int) -> bytes:
            return (
                b"EFI PART" + (0x10000).to_bytes(4, "little") + (92).to_bytes(4, "little")
                + checksum.to_bytes(4, "little") + bytes(4) + mine.to_bytes(8, "little") + other.to_bytes(8, "little")
                + (34).to_bytes(8, "little") + (last - 33).to_bytes(8, "little") + recipe.guid("disk").bytes_le
                + table_at.to_bytes(8, "little") + (128).to_bytes(4, "little") + (128).to_bytes(4, "little")
                + zlib.crc32(entries).to_bytes(4, "little")
            )  # fmt: skip

        return fill(zlib.crc32(fill(0)))

    with open(raw, "r+b") as file:
        file.seek(446)
        file.write(bytes((0, 0, 2, 0, 0xEE, 255, 255, 255)) + (1).to_bytes(4, "little") + last.to_bytes(4, "little"))
        for at, data in (
            (510, b"\x55\xaa"),
            (SECTOR, header(1, last, 2)),
            (2 * SECTOR, entries),
            ((last - 32) * SECTOR, entries),
            (last * SECTOR, header(last, 1, last - 32)),
        ):
            file.seek(at)
            file.write(data)


def fill_ext4(recipe: Recipe, root: Path, raw: Path) -> None:
    size = (DISK_SIZE - MIB - ROOT_AT) // 4096
    execute("mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-U", str(recipe.guid("root-fs")), "-d", str(root), "-E",
            f"offset={ROOT_AT},lazy_itable_init=1", str(raw), str(size))  # fmt: skip


def fill_xfs(recipe: Recipe, root: Path, raw: Path) -> None:
    """mkfs.xfs cannot be given a folder: it is mounted, in a mount namespace of its own."""
    size = DISK_SIZE - MIB - ROOT_AT
    script = """set -e
    loop=$(losetup --find --show --offset "$3" --sizelimit "$4" "$2")
    trap 'umount "$6" 2> /dev/null || :; losetup --detach "$loop"' EXIT
    mkfs.xfs -q -m "uuid=$5" "$loop"
    mkdir -p "$6"
    mount -t xfs "$loop" "$6"
    cp -a "$1/." "$6/"
    umount "$6"
    """
    words = [str(root), str(raw), str(ROOT_AT), str(size), str(recipe.guid("root-fs")), f"{raw.parent}/mounted"]
    execute("unshare", "--mount", "--propagation=private", "--", "sh", "-c", script, "fill", *words)


FILL = {"ext4": fill_ext4, "xfs": fill_xfs}


def execute(*argv: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(argv, capture_output=True, check=False, timeout=1800, env=env, stdin=subprocess.DEVNULL)
    last = done.stderr.decode(errors="replace")[-3000:]
    assert done.returncode == 0, f"{argv[0]} ended with {done.returncode}: {last}"


@contextmanager
def as_raw(image: Path, folder: Path) -> Iterator[Path]:
    """The same image as a raw file, gone afterwards."""
    raw = folder / f"{image.stem}.raw"
    execute("qemu-img", "convert", "-f", "qcow2", "-O", "raw", str(image), str(raw))
    try:
        yield raw
    finally:
        raw.unlink()


def recipe_of(name: str) -> Recipe:
    """`bookworm`, `trixie-xfs`, `bookworm-bare`."""
    suite, *traits = name.split("-")
    return Recipe(suite, "xfs" if "xfs" in traits else "ext4", "bare" in traits)


if __name__ == "__main__":
    for path in build_all([recipe_of(name) for name in sys.argv[1:] or RELEASES]):
        print(path)
