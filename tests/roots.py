"""Roots of other Debian suites, and rooms to run things in them: for tests against daemons, QEMUs and Pythons that the host does not have.

    with Room(root("trixie", ["condor"]), net=True, host="bjcondor", binds={site.top: "/site"}) as room:
        room.run("condor_config_val", "DAEMON_LIST")
        room.run("id", user="nobody", check=False)

`root` makes a suite with mmdebstrap from the mirror that apt uses on this host, once per suite, packages and recipe;
it is kept in the state folder of the tests and never written to again. A `Room` is that root with a layer of its own to
write into, in namespaces of its own. It dies with the process that made it, by whatever that dies of: its first process
reads from a pipe that only we hold, its mounts are in its own namespace, and what it wrote is in memory (or in the folder
given as *upper*). As root only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from belljar.image.build import debian

STATE = Path(os.environ.get("BELLJAR_TEST_STATE", f"/var/tmp/belljar-test-{os.getuid()}"))
RECIPE = 1  # counts up when roots of the same suite and packages are made in another way
ALWAYS = ("mount", "procps", "ca-certificates")
WITHOUT_UPDATES = ("sid", "unstable", "experimental")
UNREAD = ("/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/doc/*")
LONGEST = 1800.0  # seconds a root may take
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Whatever a package wants to start at its installation is not started.
NO_SERVICES = 'printf "#!/bin/sh\\nexit 101\\n" > "$1/usr/sbin/policy-rc.d"; chmod 0755 "$1/usr/sbin/policy-rc.d"'

# $1 root, $2 folder for layers ("": in memory), $3 an empty folder, $4 host name, $5 a file system for /sys; then pairs of
# what is bound and where. All programs but umount are the host's; after the pivot only the root is there.
SETUP = """set -eu
root=$1 upper=$2 place=$3 host=$4 net=$5; shift 5
mount -t tmpfs -o mode=0755 room "$place"
mkdir "$place/root"
layers=${upper:-$place}
mkdir -p "$layers/upper" "$layers/work"
mount -t overlay -o "lowerdir=$root,upperdir=$layers/upper,workdir=$layers/work" room "$place/root"
cd "$place/root"
mount -t proc proc proc
mount -t sysfs sysfs sys
for one in /sys/fs/cgroup; do [ ! -d $one ] || mount --rbind $one .$one; done
mount -t tmpfs -o mode=1777 tmp tmp
mount -t tmpfs -o mode=0755 run run
mkdir -m 1777 run/lock
mount -t tmpfs -o mode=0755 dev dev
for one in null zero full random urandom tty kvm fuse vhost-net vhost-vsock $(cd /dev && echo loop*); do [ ! -e /dev/$one ] || cp -a /dev/$one dev/; done
mkdir dev/net dev/pts; mkdir -m 1777 dev/shm dev/mqueue
mknod -m 0666 dev/net/tun c 10 200
mount -t devpts -o newinstance,mode=0620,ptmxmode=0666,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 shm dev/shm
for one in ptmx=pts/ptmx fd=/proc/self/fd stdin=/proc/self/fd/0 stdout=/proc/self/fd/1 stderr=/proc/self/fd/2; do
    ln -s "${one#*=}" "dev/${one%%=*}"
done
[ -z "$net" ] || ip link set lo up
[ -n "$net" ] || cp --remove-destination -L /etc/resolv.conf etc/resolv.conf
[ -z "$host" ] || { hostname "$host"; echo "$host" > etc/hostname; }
printf '127.0.0.1 localhost\\n%s' "${host:+127.0.1.1 $host.lab $host
}" > etc/hosts
while [ $# -gt 0 ]; do
    if [ -d "$1" ]; then mkdir -p ".$2"; else mkdir -p ".${2%/*}"; : >> ".$2"; fi
    mount --rbind "$1" ".$2"
    shift 2
done
pivot_root . .
umount -l .
echo up
while read -r _; do :; done
"""

Done = subprocess.CompletedProcess[bytes]


def root(suite: str, packages: Sequence[str] = ()) -> Path:
    """The folder of a root of *suite* with *packages*, made where it is missing: minutes. Two who ask at once make one."""
    return _made(suite, sorted({*packages, *ALWAYS}), "apt")


def files(suite: str, packages: Sequence[str]) -> Path:
    """The files of *packages* and of what they depend on, and nothing else: seconds. For programs that are run from outside."""
    return _made(suite, sorted(packages), "extract")


def _made(suite: str, packages: Sequence[str], variant: str) -> Path:
    words = [suite, *packages, str(RECIPE), *[variant] * (variant != "apt")]
    roots = folder_for_all(STATE / "roots")
    made = roots / f"{suite}-{hashlib.sha256(' '.join(words).encode()).hexdigest()[:16]}"
    with alone(roots / f"{made.name}.lock"):
        if not made.is_dir():
            draft = made.with_suffix(".draft")
            shutil.rmtree(draft, ignore_errors=True)
            _debootstrap(suite, packages, variant, draft)
            draft.rename(made)
    return made


def _debootstrap(suite: str, packages: Sequence[str], variant: str, folder: Path) -> None:
    """In namespaces of its own: when it is killed, its processes and mounts are gone with it."""
    # A mirror may stand at a date: what is out of date is still signed.
    apart = ["unshare", "--mount", "--propagation=private", "--pid", "--kill-child", "--mount-proc", "--"]
    words = ["mmdebstrap", f"--variant={variant}", "--format=directory", f"--include={','.join(packages)}",
             "--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"', '--aptopt=Acquire::Retries "3"',
             '--aptopt=Acquire::Check-Valid-Until "false"',
             *(f"--dpkgopt=path-exclude={path}" for path in UNREAD)]  # fmt: skip
    words += [f"--customize-hook={NO_SERVICES}"] * (variant == "apt")
    lines = debian.sources(suite, "")[: 1 if suite in WITHOUT_UPDATES else None]
    argv = ["setpriv", "--pdeathsig=KILL", "--", *apart, *words, suite, str(folder), *lines]
    env = {**os.environ, **debian.proxies(), "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=LONGEST, check=False, cwd="/"
    )
    if done.returncode:
        raise AssertionError(f"no root of {suite}: mmdebstrap ended with {done.returncode}\n{_last(done.stderr)}")


def _last(text: bytes) -> str:
    return "\n".join(text.decode(errors="replace").splitlines()[-30:])


def folder_for_all(path: Path) -> Path:
    """Made; everybody may go through, for daemons of other users."""
    path.mkdir(parents=True, exist_ok=True)
    for one in (path.parent, path):
        one.chmod(0o755)
    return path


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """The file stays: an unlinked lock is two."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Room:
    """A root that is lived in. *net*: a network of its own, loopback only; without, the host's. *host*: its host name.
    *binds*: what of the host is seen in there, and where. *upper*: an empty folder for what is written, instead of memory.

    `run` and `start` give commands a bare environment and the root's own users. `pid` is its first process: its
    namespaces are what `nsenter -t` wants, `path` a file of the room as the host sees it."""

    def __init__(
        self,
        root: Path,
        *,
        net: bool = False,
        host: str = "",
        binds: Mapping[Path | str, str] | None = None,
        upper: Path | None = None,
    ) -> None:
        pairs = [str(word) for pair in (binds or {}).items() for word in pair]
        apart = ["--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--ipc"]
        apart += ["--net"] * net + ["--uts"] * bool(host)
        place = folder_for_all(STATE / "rooms")
        words = [str(root), str(upper or ""), str(place), host, "own" if net else "", *pairs]
        self._holder = subprocess.Popen(
            ["unshare", *apart, "--", "bash", "-c", SETUP, "room", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment({}), cwd="/",
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"up\n":
            raise AssertionError(f"no room in {root}: its setup ended with {self._holder.wait()}")
        (child,) = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(child)
        self._entry = ["nsenter", "-t", child, "-m", "-p", "-i", *["-n"] * net, *["-u"] * bool(host)]

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def argv(self, *words: str, user: str = "", cwd: str = "/") -> list[str]:
        """How the host runs a command in there. It dies with who started it; daemons that it leaves go on until `close`."""
        who = [f"--reuid={user}", f"--regid={self.group(user)}", "--init-groups"] if user else []
        return [*self._entry, "--", "setpriv", "--pdeathsig=KILL", *who, "--", "env", "-C", cwd, "--", *words]

    def run(
        self, *words: str, user: str = "", cwd: str = "/", check: bool = True, timeout: float = 120.0,
        stdin: bytes = b"", **env: str,
    ) -> Done:  # fmt: skip
        """To its end, as root or a user of the root."""
        argv = self.argv(*words, user=user, cwd=cwd)
        done = subprocess.run(
            argv, env=_environment(env), input=stdin, capture_output=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{words}: exit {done.returncode}\n{_last(done.stdout)}\n{_last(done.stderr)}")
        return done

    def start(
        self, *words: str, user: str = "", cwd: str = "/", env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[bytes]:
        """In the background; *options* are Popen's."""
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.Popen(self.argv(*words, user=user, cwd=cwd), env=_environment(env or {}), **options)

    def group(self, user: str) -> str:
        """The number of a user's first group, as the root has it."""
        lines = self.path("/etc/passwd").read_text().splitlines()
        return next(words[3] for words in (line.split(":") for line in lines) if words[0] == user)

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.pid}/root{inside}")

    def close(self) -> None:
        """Everything in there is killed, every mount gone, when this returns. Closing twice is as once."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(timeout=30)
        self._holder.stdout.close()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {"PATH": PATH, "LANG": "C.UTF-8", "HOME": "/root", **more}
