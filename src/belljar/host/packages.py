"""What this host lacks, and the one command of its distribution that installs it."""

from belljar.host import commands

MANAGERS = {
    "apt-get": "apt-get install --no-install-recommends", "dnf": "dnf install", "zypper": "zypper install",
    "apk": "apk add", "pacman": "pacman -S",
}  # fmt: skip
QEMU = ("qemu-system-x86", "qemu-kvm", "qemu-x86", "qemu-system-x86_64", "qemu-system-x86")
SQUASHFS = ("squashfs-tools-ng",) * 5  # sqfs2tar
TREES, BUSYBOX = "squashfs-tools", "busybox-static"
PROGRAMS = (  # beside QEMU: program, its package for each of these ("": it has none), what for, is nothing possible without it
    ("qemu-img", ("qemu-utils", "qemu-img", "qemu-tools", "qemu-img", "qemu-img"), "makes and checks disks", True),
    ("setpriv", ("util-linux",) * 3 + ("setpriv", "util-linux"), "starts QEMU as another user, when belljar runs as root", False),
    ("curl", ("curl",) * 5, "fetches images, user data and vacuum pipes from http(s) addresses", False),
    ("mmdebstrap", ("mmdebstrap", "", "", "", ""), "builds Debian images", False),
    ("newuidmap", ("uidmap", "shadow-utils", "shadow", "shadow-subids", "shadow"), "builds images without root", False),
    ("mkfs.ext4", ("e2fsprogs",) * 5, "builds images", False),
    ("mke2fs", ("e2fsprogs",) * 5, "makes scratch disks (`--scratch`)", False),
    ("mksquashfs", (TREES, TREES, "squashfs", TREES, TREES), "packs large folders of `--in`, which are copied slowly without it", False),
    ("skopeo", ("skopeo",) * 5, "fetches container images", False),
    ("umoci", ("umoci", "", "umoci", "umoci", ""), "unpacks container images", False),
    ("busybox", (BUSYBOX, "busybox", BUSYBOX, BUSYBOX, "busybox"), "makes the small initramfs of images", False),
)  # fmt: skip


def remedy(*more: tuple[str, ...]) -> str:
    """The command, as root, for all programs that are missing, QEMU among them, and *more* packages; "" where nothing is."""
    if not any(map(commands.which, ("qemu-system-x86_64", "qemu-kvm", "../libexec/qemu-kvm"))):
        more = (*more, QEMU)
    missing = [*more, *(packages for name, packages, *_ in PROGRAMS if not commands.which(name))]
    which = next((place for place, name in enumerate(MANAGERS) if commands.which(name)), 0)
    names = sorted({packages[which] for packages in missing} - {""})
    command = list(MANAGERS.values())[which]
    return f"{command} {' '.join(names)}{' (some are in EPEL)' if command.startswith('dnf') else ''}" if names else ""
