"""Run a program to its end, with a deadline and no shell; and the command that installs those which this host lacks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

from belljar.errors import CommandFailed, CommandMissing
from belljar.hints import TYPE_CHECKING
from belljar.records import dataclass, replace

if TYPE_CHECKING:
    import subprocess

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
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


def bare_environment() -> dict[str, str]:
    """For programs that are to be told nothing by whoever started us, but who and where we are."""
    own = {name: value for name in ("HOME", "USER", "LOGNAME", "TZ") if (value := os.environ.get(name))}
    return {**own, "LC_ALL": "C", "PATH": SEARCH_PATH}


@dataclass(frozen=True)
class Finished:
    """A program's end."""

    argv: tuple[str, ...]
    code: int  # negative: killed by this signal
    out: bytes
    err: bytes


def which(name: str) -> str | None:
    """The program's path, looked for in PATH and then in the system's usual folders (hooks often have an empty PATH)."""
    for folder in (*os.environ.get("PATH", "").split(":"), *SEARCH_PATH.split(":")):
        candidate = os.path.join(folder, name)
        if folder and os.access(candidate, os.X_OK) and os.path.isfile(candidate):
            return candidate
    return None


def path_of(name: str, hint: str | None = None) -> str:
    """The program's path. Raises CommandMissing."""
    if path := which(name):
        return path
    raise CommandMissing(f"{name}: no such program on this host", hint=hint)


def program(setting: str, names: Iterable[str], *, key: str, missing: str, hint: str) -> str:
    """The program of the setting *key*, or the first of these names and paths that can be run. Raises CommandMissing."""
    for name in [setting] if setting else names:
        if path := which(name) if "/" not in name else name if os.access(name, os.X_OK) else None:
            return path
    if setting:
        raise CommandMissing(f"{setting}: no such program", hint=f"Correct `{key}` in the settings.")
    raise CommandMissing(f"{missing}: no such program on this host", hint=hint)


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    stdin: bytes = b"",
    check: bool = True,
    env: Mapping[str, str] | None = None,
    bound: bool = False,
) -> Finished:
    """Run to the end. Raises CommandMissing, CommandFailed with the line that tells the cause. *bound*: it dies with us in any case."""
    # Into memory: some programs do not wait until a pipe has taken all that they print.
    with open(os.memfd_create("printed"), "rb") as printed:
        finished = _ended(_spawn(argv, env, bound, printed.fileno()), argv, stdin, timeout)
        printed.seek(0)
        return _checked(replace(finished, out=printed.read()), check)


async def printed(argv: Sequence[str], *, timeout: float) -> bytes:
    """What it prints, beside the event loop. Raises CommandMissing, CommandFailed."""
    return (await run_beside(argv, timeout=timeout)).out


async def run_beside(argv: Sequence[str], *, timeout: float, check: bool = True) -> Finished:
    """`run`, beside the event loop. Cancelled, the program is killed, and not waited for: the kernel may hold it."""
    import subprocess

    from belljar.host.threads import in_thread

    child = _spawn(argv, None, False, subprocess.PIPE)
    try:
        return _checked(await in_thread(lambda: _ended(child, argv, b"", timeout)), check)
    finally:
        child.kill()


def _ended(child: subprocess.Popen[bytes], argv: Sequence[str], stdin: bytes, timeout: float) -> Finished:
    from subprocess import TimeoutExpired

    with child:
        try:
            out, err = child.communicate(stdin, timeout)
        except TimeoutExpired as exc:
            raise CommandFailed(f"{argv[0]}: not finished after {timeout:.0f} s, killed") from exc
        finally:
            child.kill()
    return Finished(tuple(argv), child.returncode, out, err)


def _spawn(argv: Sequence[str], env: Mapping[str, str] | None, bound: bool, out: int) -> subprocess.Popen[bytes]:
    import subprocess

    program = argv[0] if "/" in argv[0] else path_of(argv[0])
    before = [setpriv, "--pdeathsig=KILL"] if bound and (setpriv := which("setpriv")) else []
    try:
        return subprocess.Popen(
            [*before, program, *argv[1:]],
            stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE, env=env,
        )  # fmt: skip
    except FileNotFoundError as exc:
        raise CommandMissing(f"{argv[0]}: no such program on this host") from exc
    except OSError as exc:  # no process or memory is left, or its words are too long
        raise CommandFailed(f"{argv[0]}: not started: {exc.strerror}") from exc


def _checked(finished: Finished, check: bool) -> Finished:
    if check and finished.code:
        printed = finished.err.decode(errors="replace").strip().splitlines()
        lines = [line for line in printed if not line.startswith("hint: ")]  # ours stands below the cause
        causes = [line for line in lines if line.lower().startswith(("denied:", "error:"))] or lines or ["no message"]
        raise CommandFailed(f"{finished.argv[0]}: exit {finished.code}: {causes[-1]}")
    return finished


def remedy(*more: tuple[str, ...]) -> str:
    """The command, as root, for all programs that are missing, QEMU among them, and *more* packages; "" where nothing is."""
    if not any(map(which, ("qemu-system-x86_64", "qemu-kvm", "../libexec/qemu-kvm"))):
        more = (*more, QEMU)
    missing = [*more, *(packages for name, packages, *_ in PROGRAMS if not which(name))]
    manager = next((place for place, name in enumerate(MANAGERS) if which(name)), 0)
    names = sorted({packages[manager] for packages in missing} - {""})
    command = list(MANAGERS.values())[manager]
    return f"{command} {' '.join(names)}{' (some are in EPEL)' if command.startswith('dnf') else ''}" if names else ""
