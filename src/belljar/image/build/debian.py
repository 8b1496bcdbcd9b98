"""Build a Debian image with mmdebstrap: a small system, the generic kernel, python3, and the agent's start in its ramdisk.

As root, or as an ordinary user in a user namespace. Packages come from the mirror of the settings, else from Debian's own.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

from belljar.errors import HostError, ImageError, ImageUnknown, NoSpace, NoStore, OverLimit
from belljar.host import commands
from belljar.host.files import free_bytes
from belljar.image import USUAL, Image
from belljar.image.intake import intake, sandbox
from belljar.image.progress import Progress, shown
from belljar.image.store.store import Store, check_name
from belljar.model import GIB, MIB
from belljar.records import dataclass

SUITES = {"bullseye": "debian11", "bookworm": "debian12", "trixie": "debian13"}
DISK_SIZE = 8 * GIB
SMALLEST_DISK, LARGEST_DISK = 1 * GIB, 4096 * GIB
SPACE_NEEDED = 2 * GIB
PACKAGES = ("linux-image-amd64", "python3", "ca-certificates", "busybox-static", "e2fsprogs", "procps")
LAST_LINES = 15
PATIENCE, GRACE = 3600.0, 20.0  # seconds until a step of a build gets TERM, and then KILL
DEFAULT = "http://deb.debian.org/debian"
APT_TIMEOUT = 30.0
PROXY = re.compile(r'^Acquire::(https?)::Proxy "([^"]+)";$', re.MULTILINE)
NO_USERS = "Build as root: without root it takes the package uidmap, and a line for you in /etc/subuid and /etc/subgid."
FAILED = f"Correct --packages, or check the network and `image.mirror`. {NO_USERS}"

# Left out of the image; licences stay.
UNREAD = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/lintian/*")
READ = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")
# Drivers for devices of virtual machines, and for virtual devices that a guest makes itself. In dpkg's patterns a star
# stands for slashes, too: `net/*.ko` would bring the drivers of all network cards.
NETWORKS = (
    "bareudp", "bonding", "dummy", "geneve", "ifb", "ipvlan", "macsec", "macvlan", "macvtap", "net_failover", "netconsole", "nlmon",
    "tap", "team", "tun", "veth", "virtio_net", "vrf", "vsockmon", "vxlan", "wireguard",
)  # fmt: skip
DRIVERS = (
    *(f"net/{name}*" for name in NETWORKS),
    "ata", "block", "cdrom", "char/hw_random", "char/virtio_console*", "crypto/virtio", "firmware", "hid/hid.ko*",
    "hid/hid-generic*", "input/evdev*", "input/serio", "input/keyboard/atkbd*", "md", "misc/pvpanic", "nvdimm", "nvme/host",
    "nvme/common", "ptp", "rtc", "scsi/scsi_*.ko*", "scsi/sd_mod*", "scsi/sg.ko*", "scsi/sr_mod*", "scsi/virtio_scsi*",
    "tty", "vdpa", "vhost", "virt", "virtio", "watchdog/softdog*", "watchdog/i6300esb*",
)  # fmt: skip

# Runs in the new system before it is packed; $1 is its root. A machine gets its identity when it starts, not here.
CLEAN = """set -e
: > "$1/etc/machine-id"
rm -f "$1/var/lib/dbus/machine-id" "$1/var/lib/systemd/random-seed" "$1"/etc/ssh/ssh_host_*_key* "$1/etc/hostname"
rm -f "$1/etc/resolv.conf"
printf '127.0.0.1\\tlocalhost\\n' > "$1/etc/hosts"
[ -e "$1/usr/sbin/poweroff" ] && exit  # a package brought its own
cat > "$1/usr/sbin/shutdown" <<'END'
#!/bin/sh
case "${0##*/} $*" in
    *+[1-9]* | *:*) echo "$0: not at a later time" >&2; exit 1 ;;
    reboot* | *' -r'*) exec busybox reboot -f ;;
esac
exec busybox poweroff -f
END
chmod 755 "$1/usr/sbin/shutdown"
for name in halt poweroff reboot; do ln -s shutdown "$1/usr/sbin/$name"; done
"""
# Root builds in namespaces of its own: when a build is killed, its processes and mounts are gone with it.
AS_ROOT = ("unshare", "--mount", "--propagation=private", "--pid", "--kill-child", "--mount-proc", "--")


@dataclass(frozen=True)
class Recipe:
    suite: str
    name: str = ""  # empty: debian11, debian12, debian13
    packages: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # shell commands, run as root in the new system
    disk_size: int = DISK_SIZE

    @property
    def called(self) -> str:
        return self.name or SUITES[self.suite]


def build(store: Store, recipe: Recipe, *, only_if_missing: bool = False) -> Image:
    """Build the image and give it its name. One build of a name at a time: others wait for it. Raises BadOption, OverLimit."""
    check_name(recipe.called)
    if not SMALLEST_DISK <= recipe.disk_size <= LARGEST_DISK:
        sizes = f"from {SMALLEST_DISK // GIB} GiB to {LARGEST_DISK // GIB} GiB"
        raise OverLimit(f"--disk: a disk of {recipe.disk_size // MIB} MiB: {sizes}", hint="Ask for another size.")
    with shown() as progress, intake.alone(store, recipe.called, f"build the image {recipe.called}", progress):
        if only_if_missing:
            with suppress(ImageUnknown):
                return store.resolve(recipe.called)
        with intake.draft(store, recipe.called) as folder:
            log = store.work_folder("logs") / f"build-{recipe.called}.log"
            progress.step(f"Building {recipe.called} (Debian {recipe.suite}), the log is {log}")
            _debootstrap(store, recipe, folder, log, progress)
            properties = {"suite": recipe.suite, "added": list(recipe.packages)}
            origin = intake.Origin(f"build debian {recipe.suite}", recipe.called, facts=properties)
            return intake.take(store, folder, origin, progress)


def usual(store: Store) -> Image:
    """The usual image, as it is here, from a source of the site's, or built now. Raises NoStore inside a batch job."""
    with suppress(ImageUnknown):
        return store.resolve(USUAL)
    if store.settings.sources:
        from belljar.image.site.sync import pull

        with suppress(ImageUnknown):
            return pull(store, USUAL)
    if store.is_of_job:
        hint = f"Its site has to `belljar image build debian --name {USUAL}` or `belljar image sync`, as root."
        raise NoStore(f"image {USUAL}: this node has none, and none is built inside a batch job", hint=hint)
    return build(store, Recipe("bookworm", USUAL), only_if_missing=True)


def _debootstrap(store: Store, recipe: Recipe, folder: Path, log: Path, progress: Progress) -> None:
    """Run mmdebstrap and mke2fs: in *folder* are then the disk, an ext4 file system without partitions, and the archive that it was
    made of. That is all of the root, and not a stranger's: no machine has to look into it."""
    # mmdebstrap unpacks some 600 MB: on the store's disk, for /tmp is often memory; as another user, who cannot write there,
    # in a user namespace.
    workshop = folder if os.geteuid() == 0 else Path(os.environ.get("TMPDIR", "/var/tmp"))
    for place in (store.folder, workshop):
        if (free := free_bytes(place)) < SPACE_NEEDED:
            raise NoSpace(f"{place}: {free // MIB} MiB free, a build needs {SPACE_NEEDED // MIB} MiB")
    packed = folder / intake.ARCHIVE
    packed.touch(0o600)
    _run(command_line(recipe, packed, sources(recipe.suite, store.settings.mirror)), log, workshop)
    progress.step("Making its file system")
    (folder / "tree").mkdir()
    # Devices are left out: the guest's /dev is the kernel's. A file's capabilities mean something else inside of a user namespace.
    capabilities = ("--xattrs", "--xattrs-include=security.capability") if os.geteuid() == 0 else ()
    argv = ["tar", "--extract", f"--file={packed}", "--directory=tree", "--numeric-owner", "--preserve-permissions"]
    argv += ["--exclude=./dev/*", *capabilities]
    sandbox.run_in(folder, argv, sandbox.CONVERSION, recipe.disk_size, with_owners=True)
    sandbox.make_ext4(folder, folder / intake.RAW, recipe.disk_size, "-i", "32768")


def command_line(recipe: Recipe, packed: Path, sources: list[str]) -> list[str]:
    """mmdebstrap's arguments. Commands and sources are single words; no shell sees them but the guest's own."""
    excluded = [f"path-exclude={path}" for path in UNREAD] + [f"path-include={path}" for path in READ]
    for root in ("/lib/modules/*/kernel", "/usr/lib/modules/*/kernel"):
        excluded += [f"path-exclude={root}/sound/*", f"path-exclude={root}/drivers/*"]
        excluded += [f"path-include={root}/drivers/{driver}{'' if '*' in driver else '/*'}" for driver in DRIVERS]
    apt = ('APT::Install-Recommends "false"', 'Acquire::Retries "3"', 'Acquire::Languages "none"')
    hooks = (*(f'chroot "$1" /bin/sh -ec {shlex.quote(command)}' for command in recipe.commands), CLEAN)
    words = ["mmdebstrap", "--mode=root" if os.geteuid() == 0 else "--mode=unshare", "--variant=minbase"]
    words += ["--architectures=amd64", f"--include={','.join(dict.fromkeys((*PACKAGES, *recipe.packages)))}"]
    words += [f"--dpkgopt={option}" for option in excluded] + [f"--aptopt={option}" for option in apt]
    words += [f"--customize-hook={hook}" for hook in hooks]
    return [*words, "--format=tar", recipe.suite, str(packed), *sources]


def _run(argv: list[str], log: Path, workshop: Path) -> None:
    """Run it, with its output in the log. Raises ImageError with the last lines."""
    hint = f"Where there is no mmdebstrap, import an image. As root: {commands.remedy()}"
    program = commands.path_of(argv[0], hint)
    # A container may forbid namespaces even to root.
    is_root = os.geteuid() == 0
    can_isolate = is_root and not commands.run([*AS_ROOT, "true"], timeout=APT_TIMEOUT, check=False).code
    # TERM first, so that mmdebstrap removes its mounts and folders: in a user namespace it made those itself.
    ended = ["setpriv", "--pdeathsig=TERM", "timeout", f"--kill-after={GRACE}", str(PATIENCE)]
    with open(log, "wb") as file, subprocess.Popen(
        [*ended, *(AS_ROOT if can_isolate else ()), program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
        env=_environment(workshop), start_new_session=True, cwd="/",
    ) as process:  # fmt: skip
        try:
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        lines = "\n  ".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise ImageError(f"{argv[0]} ended with {process.returncode}; the whole log is {log}:\n  {lines}", hint=FAILED)


def _environment(workshop: Path) -> dict[str, str]:
    # INITRD=No: the image needs no initial ramdisk of Debian's; it takes long to make and is never used.
    env = {**os.environ, **proxies(), "INITRD": "No", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    env["TMPDIR"] = str(workshop)
    env["PATH"] = f"{env.get('PATH', '')}:{commands.SEARCH_PATH}"
    return env


def sources(suite: str, mirror: str) -> list[str]:
    """The lines of sources.list. A mirror is believed to have its security archive beside it when its address ends in debian."""
    main = mirror.rstrip("/") or DEFAULT
    security = f"{main if main.endswith('/debian') else DEFAULT}-security"
    lines = [f"deb {main} {suite} main"]
    if suite != "bullseye":  # its point updates moved into the suite itself when its support ended
        lines.append(f"deb {main} {suite}-updates main")
    return [*lines, f"deb {security} {suite}-security main"]


def proxies() -> dict[str, str]:
    """The proxies apt on this host is told to use, as the variables that mmdebstrap's apt obeys; the environment's own
    come first."""
    with suppress(HostError):
        text = commands.run(["apt-config", "dump"], timeout=APT_TIMEOUT).out.decode("utf-8", "replace")
        names = {f"{scheme}_proxy": url for scheme, url in PROXY.findall(text) if url != "DIRECT"}
        return {name: url for name, url in names.items() if name not in os.environ}
    return {}
