"""A guest the agent is brought to over its own ssh server: implements `Guest` as a conversation that begins with a delivery.

The delivery is one connection: a look around, then an archive with the agent, how it is started, and an interpreter where
the guest's own does not fit. From then on frames go by the virtio port, as in every guest, and ssh is left alone; a clone never
sees it. Where the guest has no driver for the port, the same frames go over the standard streams of a session (`Carrier`).
"""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from belljar.agent import bundle
from belljar.agent.wire import PORT
from belljar.errors import GuestRefused
from belljar.guest import Hello, Settings, SshKeys
from belljar.guest.conversation import Conversation
from belljar.guest.process import one_line
from belljar.guest.ssh_link import WINDOW, Dial, Link, Patience, Tell, library
from belljar.host.python.interpreter import Interpreter, archive_of, command
from belljar.host.threads import in_thread
from belljar.records import dataclass

FOLDER = "/usr/lib/belljar"  # in the guest; like everything below a fixed word of ours
INTERPRETER = f"{FOLDER}/python"
OWN_PYTHONS = "/usr/bin/python3 /usr/local/bin/python3 /usr/libexec/platform-python"
NEEDS = "ctypes, errno, fcntl, gc, os, resource, select, shutil, stat, struct, tarfile, tempfile, termios"

# What there is: a Python that can run the agent, systemd, our port. Each a line; the driver is loaded where that can be done.
PROBE = f"""\
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
for p in {OWN_PYTHONS}; do
    [ -x $p ] && v=$($p -I -S -c 'import sys, {NEEDS}; print("%d.%d" % sys.version_info[:2]); sys.exit(sys.version_info < (3, 6))' 2> /dev/null < /dev/null) &&
        echo "python $p $v" && break
done
[ -d /run/systemd/system ] && echo systemd yes
command -v gzip > /dev/null && echo gzip yes
ours() {{
    for n in /sys/class/virtio-ports/*/name; do
        [ -r "$n" ] && read -r v < "$n" && [ "$v" = {PORT} ] && return 0
    done
    return 1
}}
ours || modprobe virtio_console 2> /dev/null
tries=0
until ours || [ ! -d /sys/class/virtio-ports ] || [ $tries -gt 100 ]; do
    tries=$((tries + 1))
    sleep 0.1 2> /dev/null || sleep 1
done
ours && echo port yes
exit 0
"""
UNPACK = f"sh -c 'umask 022; rm -rf {FOLDER}; mkdir -p {FOLDER} && %star -x -p -f - -C {FOLDER} && sh {FOLDER}/start'"
STAY = f"sh {FOLDER}/stay"

START_BY_SYSTEMD = f"""\
mkdir -p /run/systemd/system && cp {FOLDER}/unit /run/systemd/system/belljar-agent.service || exit 1
systemctl --no-block start belljar-agent.service 2> /dev/null && exit 0
systemctl daemon-reload && systemctl --no-block start belljar-agent.service
"""
# A session of its own, so that it outlives ours; its complaints go to the console, as those of a service.
START = """\
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin out=/dev/null own=
export PATH
command -v setsid > /dev/null && own=setsid
( : > /dev/console ) 2> /dev/null && out=/dev/console
cd / && $own {agent} < /dev/null > $out 2>&1 &
"""
STAY_HERE = """\
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
cd / && exec {agent} --stdio
"""


@dataclass(frozen=True)
class Parcel:
    """What a guest is brought beside the agent."""

    unit: str  # the agent's systemd unit, as images have it that start the agent themselves
    interpreter: Callable[[], Interpreter]  # asked where the guest has none that fits


class SshGuest(Conversation):
    """One guest. *is_draft*: it is to become a template, so its conversation must go by the port."""

    def __init__(
        self,
        channel: socket.socket,
        dial: Dial,
        keys: SshKeys,
        parcel: Parcel,
        settings: Settings,
        tell: Tell,
        *,
        is_draft: bool = False,
        patience: Patience | None = None,
    ) -> None:
        super().__init__(channel, settings)
        self._link = Link(dial, keys, tell, settings.heartbeat, patience or Patience())
        self._parcel, self._tell, self._is_draft = parcel, tell, is_draft
        self._carrier: Carrier | None = None
        self._is_delivered = False

    async def greet(self) -> Hello:
        if not self._is_delivered:
            await self._deliver()
            self._is_delivered = True
        return await super().greet()

    def close(self) -> None:
        super().close()
        if self._carrier is not None:
            self._carrier.close()
        self._link.close()

    async def _deliver(self) -> None:
        """The agent runs in the guest when this returns, or will as soon as the guest's init has done the rest."""
        found = facts_of(await self._link.open(PROBE))
        has_port = "port" in found
        if self._is_draft and not has_port:
            raise GuestRefused(
                "the guest has no driver for belljar's port (virtio_console): its conversation goes over ssh, which no clone takes along",
                hint="Add `--start cold`, or put the kernel module `virtio_console` into the image.",
            )
        archive = await in_thread(lambda: self._archive(found, has_port=has_port))
        if "gzip" in found:  # an emulated guest unpacks it sooner than it deciphers what it would have to
            archive = await in_thread(lambda: gzip.compress(archive, 6))
        code, _, err = await self._link.run(UNPACK % ("gzip -d -c | " if "gzip" in found else ""), archive)
        if code:
            why = one_line(err.decode(errors="replace").strip())[:300] or f"exit code {code}"
            raise GuestRefused(f"the guest could not take the agent: {why}")
        self._tell(f"agent delivered, with {found.get('python') or 'an interpreter'}")
        if has_port:
            return await self._link.leave()
        self._tell("no driver for the port: the conversation goes over ssh")
        self._carrier = await Carrier.begin(self._link)
        self._connection = self._carrier.ours

    def _archive(self, found: dict[str, str], *, has_port: bool) -> bytes:
        """What is unpacked in the guest, as a tar archive."""
        path, _, version = found.get("python", "").partition(" ")
        python = f"{path} -I -S" if path else command(INTERPRETER)
        files = [("agent.py", bundle.source(), 0o644)]
        leaf = "agent.py"
        if not path or version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            leaf = "agent.pyc"
            files.append((leaf, bundle.compiled(), 0o644))
        agent = f"{python} {FOLDER}/{leaf}"
        if not has_port:
            files += [("start", b"exit 0\n", 0o644), ("stay", STAY_HERE.format(agent=agent).encode(), 0o644)]
        elif "systemd" in found:
            files += [("start", START_BY_SYSTEMD.encode(), 0o644), ("unit", unit_for(self._parcel.unit, agent), 0o644)]
        else:
            files.append(("start", START.format(agent=agent).encode(), 0o644))
        if not path:
            files += [(f"python/{name}", data, mode) for name, data, mode in self._parcel.interpreter().files()]
        return archive_of(files)


class Carrier:
    """Frames over the standard streams of an ssh session: one end of a socket pair is the conversation's."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._tasks = [asyncio.ensure_future(self._outwards()), asyncio.ensure_future(self._inwards())]

    @classmethod
    async def begin(cls, link: Link) -> Carrier:
        """Start the agent in a session of its own, which ends with it. Raises AgentLost, GuestRefused."""
        return cls(await link.process(STAY, stderr=asyncio.subprocess.DEVNULL))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._process.channel.abort()
        for end in (self.ours, self._theirs):
            end.close()

    async def _outwards(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError, library().Error):
            while data := await loop.sock_recv(self._theirs, WINDOW):
                self._process.stdin.write(data)
                await self._process.stdin.drain()

    async def _inwards(self) -> None:
        """Its end is the conversation's, which then says that the guest is lost."""
        loop = asyncio.get_running_loop()
        with suppress(OSError, library().Error):
            while data := await self._process.stdout.read(WINDOW):
                await loop.sock_sendall(self._theirs, data)
        with suppress(OSError):
            self._theirs.shutdown(socket.SHUT_RDWR)


def unit_for(unit: str, agent: str) -> bytes:
    """The agent's unit for this guest: started by these words, and not before cloud-init is done."""
    lines = [f"ExecStart={agent}" if line.startswith("ExecStart=") else line for line in unit.splitlines()]
    return "\n".join([*lines, ""]).replace("After=", "After=cloud-final.service ", 1).encode()


def facts_of(said: bytes) -> dict[str, str]:
    """Lines of a word and its value, each fit to be shown; what was said first counts."""
    found: dict[str, str] = {}
    for line in said.decode("utf-8", "replace").splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(one_line(name), one_line(value.strip()))
    return found
