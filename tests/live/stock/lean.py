"""An image with a shell and nothing else: no Python, no perl, no cloud-init, no systemd, no C library but musl. The user land is
busybox; nothing of belljar's is in it.

Kept beside the stock images, keyed by this file. Root only, as all live tests.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.live.conftest import STORE, Belljar
from tests.live.stock.build import CACHE, execute, sources

from belljar.host.locks import locked
from belljar.image.build import debian

SUITE = "bookworm"
PACKAGES = ("linux-image-amd64", "busybox-static", "musl")
SIZE = "600M"
NOT_FOR_MACHINES = (
    "gpu", "media", "wireless", "ethernet", "sound", "staging", "infiniband", "iio", "usb", "hid", "input", "mtd", "isdn",
    "hwmon", "leds", "i2c", "mfd", "video", "bluetooth", "can", "comedi", "power", "watchdog", "platform", "firmware",
)  # fmt: skip
INITTAB = """\
::sysinit:/etc/rc
::respawn:/bin/sleep 100000
"""
RC = """\
#!/bin/sh
mount -t tmpfs -o mode=755 run /run
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
hostname -F /etc/hostname
"""
FILES = {
    "etc/rc": RC,
    "etc/hostname": "lean\n",
    "etc/hosts": "127.0.0.1\tlocalhost\n",
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/shadow": "root:*:20000::::::\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n",
    "etc/os-release": 'ID=lean\nPRETTY_NAME="Lean"\n',
    "etc/inittab": INITTAB,
}


def build() -> Path:
    """The image as a qcow2: a file system without a partition table. Made now where it is missing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    done = CACHE / f"lean-musl-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}.qcow2"
    with locked(CACHE / "lean.lock", timeout=1800, what="build the lean image"):
        if not done.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="lean-") as work:
                _make(Path(work), done)
    return done


def _make(folder: Path, done: Path) -> None:
    env = {**os.environ, **debian.proxies(), "LC_ALL": "C.UTF-8", "TMPDIR": str(folder)}
    execute("mmdebstrap", "--mode=root", "--variant=extract", "--architectures=amd64", f"--include={','.join(PACKAGES)}",
            '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=path-exclude=/usr/share/*", SUITE,
            str(folder / "root.tar"), *sources(SUITE)[:1], env=env)  # fmt: skip
    (folder / "all").mkdir()
    execute("tar", "-xf", str(folder / "root.tar"), "-C", str(folder / "all"), "--exclude=./dev/*")
    root, raw, part = folder / "root", folder / "raw", folder / "qcow2"
    _choose(folder / "all", root)
    with open(raw, "wb"):
        execute("mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(raw), SIZE)
    execute("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", str(raw), str(part))
    part.rename(done)


def _choose(every: Path, root: Path) -> None:
    (kernel,) = every.glob("boot/vmlinuz-*")
    release = kernel.name.removeprefix("vmlinuz-")
    for name in (
        "bin",
        "sbin",
        "usr/bin",
        "usr/sbin",
        "dev",
        "proc",
        "sys",
        "run",
        "tmp",
        "root",
        "boot",
        "lib/modules",
    ):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "root").chmod(0o700)
    shutil.copy(every / "bin/busybox", root / "bin/busybox")
    for applet in subprocess.run([every / "bin/busybox", "--list"], capture_output=True, check=True).stdout.split():
        if applet != b"busybox":
            (root / "bin" / applet.decode()).symlink_to("busybox")
    (root / "sbin/init").symlink_to("../bin/busybox")
    shutil.copy(kernel, root / "boot")
    modules = f"lib/modules/{release}"
    shutil.copytree(every / modules, root / modules, ignore=shutil.ignore_patterns(*NOT_FOR_MACHINES))
    execute("depmod", "-b", str(root), release)
    shutil.copytree(every / "lib/x86_64-linux-musl", root / "lib/x86_64-linux-musl")
    (root / "lib/ld-musl-x86_64.so.1").symlink_to("x86_64-linux-musl/libc.so")
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "etc/rc").chmod(0o755)
    (root / "etc/shadow").chmod(0o600)


def lean(belljar: Belljar) -> str:
    """Point *belljar* at a store that has the lean image; returns the image's name."""
    disk, name = build(), "lean-musl"
    store = CACHE / "stores" / disk.stem
    store.mkdir(mode=0o755, parents=True, exist_ok=True)
    belljar.env["BELLJAR_PATHS_STORE"] = str(store)
    belljar.env["BELLJAR_PATHS_SITE_STORE"] = str(STORE)
    with locked(CACHE / f"{store.name}.lock", timeout=600, what=f"import the image {name}"):
        if belljar("image", "show", name).returncode:
            done = belljar("image", "import", str(disk), "--name", name)
            assert done.returncode == 0, done.stderr.decode()
    return name
