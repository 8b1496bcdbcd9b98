"""Images with a shell, an ssh server and nothing else: no Python, no perl, no cloud-init, no systemd. The user land is
busybox; the server is Debian's OpenSSH or dropbear; nothing of belljar's is in them. Some lack even more, or have what is no use.

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
PACKAGES = ("linux-image-amd64", "linux-image-cloud-amd64", "busybox-static", "openssh-server", "dropbear-bin", "musl")
OLDER, OLD_PYTHON = "bullseye", "python2.7-minimal"
SIZE = "600M"
SERVERS = {"openssh": "usr/sbin/sshd", "dropbear": "usr/sbin/dropbear"}
# Debian's kernel for clouds has neither 9p nor a driver for vmgenid; the other one has both.
KINDS = {
    "openssh": ("openssh", "-amd64"),
    "dropbear": ("dropbear", "-amd64"),
    "cloud": ("openssh", "-cloud-amd64"),
    "portless": ("dropbear", "-amd64"),  # its kernel has no driver for belljar's port
    "python2": ("dropbear", "-amd64"),  # Python 2.7, and a python3 that calls itself 3.4
    "musl": ("", "-amd64"),  # no C library but musl, and no server
}
NOT_FOR_MACHINES = (
    "gpu", "media", "wireless", "ethernet", "sound", "staging", "infiniband", "iio", "usb", "hid", "input", "mtd", "isdn",
    "hwmon", "leds", "i2c", "mfd", "video", "bluetooth", "can", "comedi", "power", "watchdog", "platform", "firmware",
)  # fmt: skip
INITTAB = """\
::sysinit:/etc/rc
::respawn:{server}
"""
COMMANDS = {"openssh": "/usr/sbin/sshd -D -e", "dropbear": "/usr/sbin/dropbear -F -E -s", "": "/bin/sleep 100000"}
OLD_PYTHON3 = """\
#!/bin/sh
echo 3.4
exit 1
"""
RC = """\
#!/bin/sh
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/sshd /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
hostname -F /etc/hostname
"""
FILES = {
    "etc/rc": RC,
    "etc/hostname": "lean\n",
    "etc/hosts": "127.0.0.1\tlocalhost\n",
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nsshd:x:100:65534::/run/sshd:/bin/false\n",
    "etc/shadow": "root:*:20000::::::\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\n",
    "etc/os-release": 'ID=lean\nPRETTY_NAME="Lean"\n',
    "etc/ssh/sshd_config": "PermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n",
    "etc/dropbear/.empty": "",
}


def build(kind: str) -> Path:
    """The image with this server, as a qcow2: a file system without a partition table. Made now where it is missing."""
    CACHE.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    done = CACHE / f"lean-{kind}-{digest}.qcow2"
    with locked(CACHE / "lean.lock", timeout=1800, what="build the lean images"):
        if not done.exists():
            with tempfile.TemporaryDirectory(dir=CACHE, prefix="lean-") as work:
                _make(Path(work), digest)
    return done


def _make(folder: Path, digest: str) -> None:
    """All of them: what is downloaded for one is enough for the others."""
    env = {**os.environ, **debian.proxies(), "LC_ALL": "C.UTF-8", "TMPDIR": str(folder)}
    execute("mmdebstrap", "--mode=root", "--variant=extract", "--architectures=amd64", f"--include={','.join(PACKAGES)}",
            '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=path-exclude=/usr/share/*", SUITE,
            str(folder / "root.tar"), *sources(SUITE)[:1], env=env)  # fmt: skip
    (folder / "all").mkdir()
    execute("tar", "-xf", str(folder / "root.tar"), "-C", str(folder / "all"), "--exclude=./dev/*")
    execute("mmdebstrap", "--mode=root", "--variant=extract", "--architectures=amd64", f"--include={OLD_PYTHON}",
            '--aptopt=APT::Install-Recommends "false"', "--dpkgopt=path-exclude=/usr/share/*", OLDER,
            str(folder / "old.tar"), *sources(OLDER)[:1], env=env)  # fmt: skip
    (folder / "old").mkdir()
    execute("tar", "-xf", str(folder / "old.tar"), "-C", str(folder / "old"), "--exclude=./dev/*")
    for kind in KINDS:
        root, raw = folder / kind, folder / f"{kind}.raw"
        _choose(folder / "all", root, kind)
        if kind == "python2":
            shutil.copy(folder / "old/usr/bin/python2.7", folder / "all/usr/bin")
            _with_libraries(folder / "all", root, "usr/bin/python2.7")
            shutil.copytree(folder / "old/usr/lib/python2.7", root / "usr/lib/python2.7", symlinks=True)
            (root / "usr/bin/python3").write_text(OLD_PYTHON3)
            (root / "usr/bin/python3").chmod(0o755)
        with open(raw, "wb"):
            execute("mke2fs", "-q", "-F", "-t", "ext4", "-d", str(root), str(raw), SIZE)
        part = folder / f"{kind}.qcow2"
        execute("qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", str(raw), str(part))
        part.rename(CACHE / f"lean-{kind}-{digest}.qcow2")


def _choose(every: Path, root: Path, kind: str) -> None:
    server, flavour = KINDS[kind]
    (kernel,) = (
        one
        for one in every.glob("boot/vmlinuz-*")
        if one.name.endswith(flavour) and ("cloud" in flavour or "cloud" not in one.name)
    )
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
    if kind == "portless":
        (root / modules / "kernel/drivers/char/virtio_console.ko").unlink()
        execute("depmod", "-b", str(root), release)
    if server:
        _with_libraries(every, root, SERVERS[server])
    if kind == "musl":
        shutil.copytree(every / "lib/x86_64-linux-musl", root / "lib/x86_64-linux-musl")
        (root / "lib/ld-musl-x86_64.so.1").symlink_to("x86_64-linux-musl/libc.so")
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "etc/inittab").write_text(INITTAB.format(server=COMMANDS[server]))
    (root / "etc/rc").chmod(0o755)
    (root / "etc/shadow").chmod(0o600)


def _with_libraries(every: Path, root: Path, program: str) -> None:
    loader = "/lib64/ld-linux-x86-64.so.2"
    said = subprocess.run(["chroot", every, loader, "--list", f"/{program}"], capture_output=True, check=True).stdout
    wanted = [word for word in said.decode().split() if word.startswith("/")]
    for path in {f"/{program}", loader, *wanted}:
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(every / path.lstrip("/"), target)


def lean(belljar: Belljar, kind: str) -> str:
    """Point *belljar* at a store that has the lean image with this server; returns the image's name."""
    disk, name = build(kind), f"lean-{kind}"
    store = CACHE / "stores" / disk.stem
    store.mkdir(mode=0o755, parents=True, exist_ok=True)
    belljar.env["BELLJAR_PATHS_STORE"] = str(store)
    belljar.env["BELLJAR_PATHS_SITE_STORE"] = str(STORE)
    with locked(CACHE / f"{store.name}.lock", timeout=600, what=f"import the image {name}"):
        if belljar("image", "show", name).returncode:
            done = belljar("image", "import", str(disk), "--name", name)
            assert done.returncode == 0, done.stderr.decode()
    return name
