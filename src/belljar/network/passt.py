"""A user network carried by passt instead of by QEMU itself. https://passt.top

Where the site guards its machines, passt has a guard of its own (passt_guard.py), and QEMU one that lets it go nowhere. The
host's loopback is closed to the guest in any case.
"""

from __future__ import annotations

import os
import socket
import subprocess
from contextlib import suppress
from dataclasses import replace

from belljar.errors import CommandMissing, NetworkFailed
from belljar.host.commands import which
from belljar.host.egress import Egress, Rule
from belljar.host.traffic import Traffic
from belljar.network import Link

END = 5.0  # seconds passt may take to end when its connection has
NOWHERE = Egress(deny=(Rule(0, 0),))  # for QEMU, which has no business in a network that passt carries


def join_passt(link: Link, egress: Egress | None) -> Passt:
    """Start one for one machine, under guard unless *egress* is None. Raises CommandMissing, NetworkFailed, NoGuard."""
    program, setpriv = which("passt"), which("setpriv")
    if program is None or setpriv is None:
        raise CommandMissing(
            f"{'passt' if program is None else 'setpriv'}: no such program on this host",
            hint='Install it, or set `network.user_backend = "slirp"`.',
        )
    ours, theirs = socket.socketpair()
    argv = command_line([setpriv, "--pdeathsig=KILL", "--", program], theirs.fileno(), link)
    try:
        if egress is None:
            return Passt(link, ours, _start(argv, theirs.fileno()))
        traffic = Traffic()
        process = _start_guarded(argv, theirs.fileno(), egress, traffic)
        return Passt(replace(link, egress=NOWHERE), ours, process, traffic)
    except OSError as exc:
        ours.close()
        raise NetworkFailed(f"{program}: cannot be started: {exc.strerror}") from exc
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


def _start(argv: list[str], line: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, pass_fds=[line], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        close_fds=True, cwd="/", env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def _start_guarded(argv: list[str], line: int, egress: Egress, traffic: Traffic) -> subprocess.Popen[bytes]:
    from belljar.network.passt_guard import PasstGuard

    started: list[subprocess.Popen[bytes]] = []

    def start() -> int:
        started.append(_start(argv, line))
        return started[0].pid

    PasstGuard(egress, traffic.tell).spawn(start, line)
    return started[0]


def command_line(program: list[str], fd: int, link: Link) -> list[str]:
    """In the foreground, for one connection, with the addresses QEMU's own user network has; no port is forwarded."""
    address, _, width = link.address.partition("/")
    words = ["--foreground", "--quiet", "--one-off", "--ipv4-only", "--no-map-gw", "--fd", str(fd)]
    words += ["--address", address, "--netmask", width, "--gateway", link.gateway, "--dns-forward", link.dns]
    words += ["--tcp-ports", "none", "--udp-ports", "none"]
    return [*program, *words, *(["--runas", "nobody"] if os.geteuid() == 0 else [])]


class Passt:
    """A running passt. It ends with its connection, with us, and with `close`."""

    def __init__(
        self, link: Link, line: socket.socket, process: subprocess.Popen[bytes], traffic: Traffic | None = None
    ) -> None:
        self.link, self.traffic = replace(link, fd=line.fileno()), traffic
        self._line, self._process = line, process

    def close(self) -> None:
        if self.traffic is not None:
            self.traffic.end()
        self._line.close()
        if self._process.poll() is None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END)
