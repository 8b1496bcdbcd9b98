"""A disc in the place of a CernVM's: a kernel and busybox. It reads its user data from the metadata service and runs them.

The kernel is the default image's, as that has it; drivers and busybox are of its ramdisk. GRUB starts it (El Torito).
"""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

INIT = b"""#!/bin/sh
PATH=/bin
busybox mount -t devtmpfs dev /dev; busybox mount -t proc proc /proc; busybox mount -t sysfs sys /sys
for group in always net ext4; do
    [ -e /modules/$group ] && while read -r module; do insmod /modules/$module 2>/dev/null; done < /modules/$group
done
for module in crc16 mbcache jbd2 crc32c_generic ext4 failover net_failover virtio_net; do
    insmod /modules/$module.ko 2>/dev/null
done
export OURS=1
exec busybox sh -c '
alias b=busybox
b ifconfig lo up; b ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up; b route add default gw 10.0.2.2
put() { { b printf "PUT /joboutputs/$1 HTTP/1.0\\r\\nContent-Length: $(b wc -c < $2)\\r\\n\\r\\n"; b cat $2; } |
    b nc 169.254.169.253 80 | b head -n 1; }
if b wget -q -O /user-data http://169.254.169.254/latest/user-data; then . /user-data; else echo no user data; fi
b poweroff -f' > /dev/console 2>&1
"""


def make_disc(path: Path, kernel: Path, ramdisk: Path) -> None:
    """*kernel* is a bzImage; *ramdisk* the default image's own, which is taken apart for its drivers."""
    import pycdlib

    folder = path.parent / "disc"
    folder.mkdir()
    subprocess.run(["cpio", "-idm", "--quiet"], cwd=folder, input=ramdisk.read_bytes(), check=False, timeout=60)
    (folder / "init").unlink(missing_ok=True)
    (folder / "init").write_bytes(INIT)
    (folder / "init").chmod(0o755)
    names = b"\n".join(str(one.relative_to(folder)).encode() for one in sorted(folder.rglob("*")))
    packed = subprocess.run(
        ["cpio", "-o", "-H", "newc", "--quiet"], cwd=folder, input=names, capture_output=True, check=True, timeout=60
    ).stdout
    start = path.parent / "grub.cfg"
    start.write_text("ls\nset root=(cd)\nls (cd)/\nlinux /vmlinuz console=ttyS0 quiet panic=-1\ninitrd /initrd\nboot\n")
    loader = path.parent / "grub.img"
    subprocess.run(
        [
            "grub-mkimage",
            "-O",
            "i386-pc-eltorito",
            "-p",
            "/boot",
            "-c",
            start,
            "-o",
            loader,
            "biosdisk",
            "iso9660",
            "linux",
            "serial",
            "terminal",
            "echo",
            "ls",
        ],
        check=True,
        timeout=60,
    )
    disc = pycdlib.PyCdlib()
    disc.new(interchange_level=3, vol_ident="SMALL", rock_ridge="1.09")
    # GRUB 2.12 (Debian 13) leaves out the end of a kernel with which its file ends; then the guest resets at once.
    files = {"GRUB": loader.read_bytes(), "vmlinuz": kernel.read_bytes() + bytes(1 << 20), "initrd": packed}
    for name, data in files.items():
        disc.add_fp(io.BytesIO(data), len(data), f"/{name.upper()}.;1", rr_name=name)
    disc.add_eltorito("/GRUB.;1", boot_load_size=4, boot_info_table=True)
    disc.write(str(path))
    disc.close()
