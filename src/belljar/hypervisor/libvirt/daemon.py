"""libvirt's daemon as a process of this host: who it is, whether it grew too large, and its restart by the site's command.

One restart at a time on a host: whoever comes second finds a daemon that answers, and leaves it alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

from belljar.errors import BelljarError, CommandFailed, CommandMissing
from belljar.host import commands
from belljar.host.files import private_folder
from belljar.host.locks import Lock, locked
from belljar.host.processes import start_time
from belljar.hypervisor import LibvirtSettings
from belljar.hypervisor.libvirt.link import Link, Overdue, bounded, open_link
from belljar.model import MIB
from belljar.records import dataclass

# With socket activation the one who listened is the service manager; the daemon then tells its pid in a file.
PID_FILES = ("/run/virtqemud.pid", "/run/libvirtd.pid")
NAMES = ("libvirtd", "virtqemud")
UNDER = '"$@" </dev/null; exit $?'  # a shell's words; it stays, as the program's parent
PAUSES = (0.1, 0.3, 1.0, 3.0)  # seconds between tries to reach a daemon that was restarted
OVERDUE, LONGEST_WORDS = 128 + 9, 64 << 10  # timeout(1) ends by the signal it was told to send


@dataclass(frozen=True)
class Identity:
    """One life of the daemon."""

    pid: int
    started: int | None


def identity(link: Link) -> Identity | None:
    """Who answers on this connection; None where that cannot be told. A session's daemon is never the system's."""
    for pid in (link.pid, *_from_files()):
        with suppress(OSError):
            is_listeners = os.stat(f"/proc/{pid}").st_uid == os.stat(f"/proc/{link.pid}").st_uid
            if is_listeners and Path(f"/proc/{pid}/comm").read_text().strip() in NAMES:
                return Identity(pid, start_time(pid))
    return None


def _from_files() -> list[int]:
    found = []
    for path in PID_FILES:
        with suppress(OSError, ValueError):
            found.append(int(Path(path).read_text()[:20]))
    return found


def resident(pid: int) -> int:
    """Bytes of memory the process has; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def run_under(lock: Lock, argv: Sequence[str], timeout: float) -> None:
    """Run a program to its end or its deadline. It goes on when we end, and then keeps the lock as long: its parents have
    that, a shell as its stdin. What the program leaves running has none of it. Raises CommandMissing, CommandFailed."""
    import subprocess

    program, shell = commands.which(argv[0]) if "/" not in argv[0] else argv[0], commands.which("sh")
    limit = commands.which("timeout")
    if program is None or not os.access(program, os.X_OK) or shell is None or limit is None:
        raise CommandMissing(f"{argv[0] if shell and limit else 'sh, timeout'}: no such program on this host")
    begin, words = (
        time.monotonic(),
        [shell, "-c", UNDER, shell, limit, "--signal=KILL", f"{timeout:f}", program, *argv[1:]],
    )
    with TemporaryFile() as said:  # no pipe: a daemon that the program starts may have it for ever
        code = subprocess.Popen(
            words, stdin=lock.descriptor, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True
        ).wait()
        said.seek(0)
        lines = said.read(LONGEST_WORDS).decode(errors="replace").strip().splitlines()
    if code == OVERDUE and time.monotonic() - begin >= timeout:
        raise CommandFailed(f"{argv[0]}: not finished after {timeout:.0f} s, killed")
    if code:
        raise CommandFailed(f"{argv[0]}: exit {code}: {lines[-1] if lines else 'no message'}")


class Daemon:
    """The daemon behind a URI."""

    def __init__(self, uri: str, settings: LibvirtSettings, store: Path) -> None:
        self._uri, self._settings, self._store = uri, settings, store

    def connect(self) -> Link:
        return open_link(self._uri, self._settings.timeout)

    def too_large(self, who: Identity | None) -> str:
        """Why its memory is a fault; "" when it is none."""
        limit = self._settings.memory_limit
        used = resident(who.pid) if who is not None and limit else 0
        return f"it uses {used // MIB} MiB of memory, more than the limit of {limit // MIB} MiB" if used > limit else ""

    def restart(self, was: Identity | None = None) -> str:
        """Have a daemon that answers and is not too large, whether it is who it *was* or not; what was done, in words. Never
        raises."""
        longest = 2 * (self._settings.restart_timeout + self._settings.timeout)
        try:
            return bounded(lambda: self._restart_alone(was), longest)
        except Overdue:
            return f"it was not restarted within {longest:g} s"
        except (BelljarError, OSError) as error:
            return f"it could not be restarted: {error}"

    def _restart_alone(self, was: Identity | None) -> str:
        if not self._settings.restart_command:
            return self._who_is_well(was) or "no `libvirt.restart_command` is set"
        lock = private_folder(self._store / "libvirt") / "restart.lock"
        with locked(lock, timeout=self._settings.restart_timeout, what="restart libvirt's daemon") as held:
            if words := self._who_is_well(was):
                return words
            run_under(held, self._settings.restart_command, self._settings.restart_timeout)
            self._meet()
        return "it was restarted"

    def _meet(self) -> None:
        """Have the new one answer. It may not listen yet, and the old one's socket may not be gone yet: nothing tells when."""
        for pause in PAUSES:
            with suppress(BelljarError):
                return self.connect().abandon()
            time.sleep(pause)
        self.connect().abandon()

    def _who_is_well(self, was: Identity | None) -> str:
        """Who answers and is not too large, in words; "" where nobody does."""
        try:
            link = self.connect()
        except BelljarError:
            return ""
        who = identity(link)
        link.abandon()
        if self.too_large(who):
            return ""
        if who is None or was is None:
            return "one answers by now"
        return (
            f"the same one (pid {who.pid}) answers others"
            if who == was
            else f"another one (pid {who.pid}) answers by now"
        )
