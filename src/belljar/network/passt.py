"""A user network carried by passt instead of by QEMU itself: quicker, and without a guard. https://passt.top

What it cannot have: a guard that is not slower than what passt is for (docs/decisions/0012-the-guard.md), so a site that
guards its machines cannot use it. The host's loopback is closed to the guest in any case.
"""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace

from belljar.errors import CommandMissing, NetworkFailed
from belljar.host.commands import which
from belljar.network import Link

END = 5.0  # seconds passt may take to end when its connection has


def join_passt(link: Link) -> Passt:
    """Start one for one machine. Raises CommandMissing, NetworkFailed."""
    program, setpriv = which("passt"), which("setpriv")
    if program is None or setpriv is None:
        raise CommandMissing(
            f"{'passt' if program is None else 'setpriv'}: no such program on this host",
            hint='Install it, or set `network.user_backend = "slirp"`.',
        )
    ours, theirs = socket.socketpair()
    argv = command_line([setpriv, "--pdeathsig=KILL", "--", program], theirs.fileno(), link)
    try:
        process = subprocess.Popen(
            argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, close_fds=True, cwd="/", env={"PATH": "/usr/bin:/bin"},
        )  # fmt: skip
    except OSError as exc:
        ours.close()
        raise NetworkFailed(f"{program}: cannot be started: {exc.strerror}") from exc
    finally:
        theirs.close()
    return Passt(link, ours, process)


def command_line(program: list[str], fd: int, link: Link) -> list[str]:
    """In the foreground, for one connection, with the addresses QEMU's own user network has; no port is forwarded."""
    address, _, width = link.address.partition("/")
    words = ["--foreground", "--quiet", "--one-off", "--ipv4-only", "--no-map-gw", "--fd", str(fd)]
    words += ["--address", address, "--netmask", width, "--gateway", link.gateway, "--dns-forward", link.dns]
    words += ["--tcp-ports", "none", "--udp-ports", "none"]
    return [*program, *words, *(["--runas", "nobody"] if os.geteuid() == 0 else [])]


class Passt:
    """A running passt. It ends with its connection, with us, and with `close`."""

    def __init__(self, link: Link, line: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.link = replace(link, fd=line.fileno())
        self._line, self._process = line, process

    def close(self) -> None:
        self._line.close()
        if self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END)
