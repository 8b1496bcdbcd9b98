"""A private network for the machines of one group: each machine has a port (a socket), and the sockets lie in one folder.

    networks/<uid>-<group>/lock    held for a moment by a process that joins or sweeps
    networks/<uid>-<group>/<n>     the socket of machine n; 1 to 254

A machine's number is in its MAC address and in its IP address, so that a frame's destination names the socket it goes to.
There is no central switch: each supervisor sends the frames of its own guest, and only with that guest's source address. A
dead machine is a socket without a listener. A frame that finds a full queue is lost, as on any network.

A group may have parts on several hosts, named GROUP+NUMBER: then a process of the same user carries frames between them, and
stands in for the machines of the other parts. Over the connections that it is given goes

    frame      u8 number of the machine it is for, u16 length (big-endian), Ethernet frame
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from ipaddress import IPv4Interface, IPv4Network
from pathlib import Path

from belljar.errors import BadOption, BadSetting, NetworkFailed
from belljar.host.files import private_folder, short_path
from belljar.host.locks import locked
from belljar.host.outbox import Outbox
from belljar.host.quick_imports import sha256
from belljar.network import Intend, Joined, Link, Settings
from belljar.records import replace

GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}(\+[0-9]{1,4})?")
LOCK, LOCK_PATIENCE, TRIES = "lock", 10.0, 20
MOST = 254
SMALLEST, LARGEST = 14, 9018  # bytes of an Ethernet frame
# Frames in one turn of the loop; frames that wait behind the some ten that the kernel queues, beyond which they are lost.
BURST, WAITING = 64, 512
QUEUE = 1 << 20
HEAD = struct.Struct(">BH")
CHUNK, FULL = 1 << 17, 1 << 20  # bytes read at once; bytes that wait for a connection, beyond which frames are lost
Hear = Callable[[int, bytes], None]  # a machine's number, and a frame to it


def join_group(settings: Settings, folder: Path, link: Link, name: str, uid: int, intend: Intend) -> Port:
    """A port in the group of this user, named GROUP or GROUP@ADDRESS. Raises BadOption, BadSetting, NetworkFailed."""
    group, at, address = name.partition("@")
    usual = subnet(settings.isolated_net)
    net, wish = _seat(address, usual) if at else (usual, 0)
    for _ in range(TRIES):
        place = private_folder(place_of(folder, uid, group))
        with suppress(FileNotFoundError):  # the last machine of the group removed the folder just now
            with locked(place / LOCK, timeout=LOCK_PATIENCE, what="join an isolated group"):
                remove_dead(place)
                numbers = (wish,) if wish else range(1, MOST + 1)
                number = next((number for number in numbers if not (place / str(number)).exists()), None)
                if number is None:
                    why = f"a machine has the address {net[wish]}" if wish else f"it has {MOST} machines"
                    raise NetworkFailed(f"the group {group}: {why} already", hint="Use another.")
                intend("port", place / str(number))
                mac = prefix(place.name) + bytes([number])
                return Port(replace(link, mac=mac.hex(":"), address=f"{net[number]}/{net.prefixlen}"), place, mac)
    raise NetworkFailed(f"the folder of the group {group} was removed again and again", hint="Try again.")


def place_of(folder: Path, uid: int, group: str) -> Path:
    if not GROUP.fullmatch(group):
        raise BadOption(f"--network isolated:{group}: a group's name has at most 32 of A-Z, a-z, 0-9 and ._-")
    return folder / f"{uid}-{group}"


def _seat(text: str, usual: IPv4Network) -> tuple[IPv4Network, int]:
    """The network of an ADDRESS[/PREFIX], and the machine's number in it."""
    with suppress(ValueError):
        seat = IPv4Interface(text if "/" in text else f"{text}/{usual.prefixlen}")
        number = int(seat.ip) - int(seat.network.network_address)
        if 1 <= number <= MOST and seat.network.prefixlen <= 24 and ("/" in text or seat.network == usual):
            return seat.network, number
    raise BadOption(
        f"{text[:40]!r} is no address of an isolated group: one of the first {MOST} of {usual}, or ADDRESS/PREFIX",
        hint="`network.isolated_net` is the network of isolated groups.",
    )


def subnet(text: str) -> IPv4Network:
    with suppress(ValueError):
        if (net := IPv4Network(text)).prefixlen <= 24:
            return net
    want = f"a network such as 10.98.0.0/24, with room for {MOST} machines"
    raise BadSetting(f"network.isolated_net = {text!r}: {want}")


def prefix(name: str) -> bytes:
    """The first five octets of the MAC addresses of a group, of all its parts: locally administered, unicast."""
    return b"\x52" + sha256(name.partition("+")[0].encode()).digest()[:4]


class Ends:
    """The sockets of a group, as one process has them: its own, which it hears, and the others', which it sends to."""

    def __init__(self, folder: Path) -> None:
        self._path = folder
        # A socket's path has at most 108 bytes; through the folder's descriptor any folder will do.
        self._folder = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.own: dict[int, socket.socket] = {}
        self._outlets: dict[int, Outbox] = {}  # connections to other machines, by number

    def bind(self, number: int) -> None:
        self.own[number] = _datagrams()
        self.own[number].bind(self._at(number))

    def listen(self, hear: Hear) -> None:
        """To all that were bound. From now on there is an event loop; before, any thread will do."""
        self._loop = asyncio.get_running_loop()
        for number, end in self.own.items():
            self._loop.add_reader(end, self._heard, number, end, hear)

    def send(self, number: int, frame: bytes) -> None:
        """To the machine of this number: over the open connection, else over a new one. Dropped where there is no such machine."""
        for _ in range(2):
            outlet = self._outlets.get(number) or self._connect(number)
            if outlet is None:
                return
            try:
                outlet.send(frame)
                return
            except OSError:
                self._outlets.pop(number).close()

    def others(self) -> list[int]:
        names = os.listdir(f"/proc/self/fd/{self._folder}")
        return [int(name) for name in names if name.isdecimal() and int(name) not in self.own]

    def close(self) -> None:
        if self._folder < 0:
            return
        for number, end in self.own.items():
            if self._loop is not None:
                self._loop.remove_reader(end)
            with suppress(FileNotFoundError):
                os.unlink(self._path / str(number))
            end.close()
        for outlet in self._outlets.values():
            outlet.close()
        os.close(self._folder)
        self._folder = -1
        with suppress(OSError, NetworkFailed):
            sweep(self._path)

    def _heard(self, number: int, end: socket.socket, hear: Hear) -> None:
        for frame in _frames(end):
            hear(number, frame)

    def _connect(self, number: int) -> Outbox | None:
        end = _datagrams()
        try:
            end.connect(self._at(number))
        except OSError:
            end.close()
            return None
        self._outlets[number] = Outbox(end, end.send, WAITING)
        return self._outlets[number]

    def _at(self, number: int) -> str:
        return f"/proc/self/fd/{self._folder}/{number}"


class Port(Joined):
    """One machine's port. It forwards frames while the event loop in which it was made runs."""

    def __init__(self, link: Link, folder: Path, mac: bytes) -> None:
        self._mac, self._prefix, self._number = mac, mac[:5], mac[5]
        self._ends = Ends(folder)
        self._ends.bind(self._number)
        self._guest, self._theirs = map(_datagrams, socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
        super().__init__(replace(link, fd=self._theirs.fileno()))
        self._loop = asyncio.get_running_loop()
        self._inlet = Outbox(self._guest, self._guest.send, WAITING)
        self._loop.add_reader(self._guest, self._from_guest)
        self._ends.listen(self._to_guest)

    def close(self) -> None:
        if self._theirs.fileno() < 0:
            return
        self._loop.remove_reader(self._guest)
        self._inlet.close()
        self._theirs.close()
        self._ends.close()

    def _from_guest(self) -> None:
        for frame in _frames(self._guest):
            if frame[6:12] != self._mac:
                continue  # a guest may use its own source address only
            if frame[0] & 1:
                for number in self._ends.others():
                    self._ends.send(number, frame)
            elif frame[:5] == self._prefix and frame[5] != self._number:
                self._ends.send(frame[5], frame)

    def _to_guest(self, number: int, frame: bytes) -> None:
        with suppress(OSError):  # QEMU is gone
            self._inlet.send(frame)


def sweep(folder: Path) -> None:
    """Remove the sockets of dead machines, and the folder when nobody is left."""
    with (
        suppress(FileNotFoundError, NotADirectoryError),
        locked(folder / LOCK, timeout=LOCK_PATIENCE, what="sweep an isolated group"),
    ):
        if not remove_dead(folder):
            with suppress(OSError):
                os.unlink(folder / LOCK)
                os.rmdir(folder)


def remove_dead(folder: Path) -> int:
    """Remove sockets without a listener, which refuse connections. Returns how many are left."""
    alive = 0
    with short_path(folder) as here:
        for name in filter(str.isdecimal, os.listdir(folder)):
            alive += 1
            with _datagrams() as probe, suppress(FileNotFoundError):
                if probe.connect_ex(f"{here}/{name}") == errno.ECONNREFUSED:
                    alive -= 1
                    os.unlink(folder / name)
    return alive


def _datagrams(end: socket.socket | None = None) -> socket.socket:
    end = end or socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, QUEUE)
    return end


def _frames(end: socket.socket) -> Iterator[bytes]:
    """Those that have come, as many as are read in one turn of the loop."""
    with suppress(OSError):
        for _ in range(BURST):
            frame = end.recv(LARGEST + 1)
            if SMALLEST <= len(frame) <= LARGEST:
                yield frame


class Part:
    """A host's part: a socket stands in for each machine of the others. Made in any thread, used in an event loop."""

    def __init__(self, folder: Path, group: str, numbers: Iterable[int]) -> None:
        """Raises BadOption, NetworkFailed. A number that a machine of this part has is left to it."""
        place = private_folder(place_of(folder, os.geteuid(), group))
        self._prefix, self._ends = prefix(place.name), Ends(place)
        self._wires: dict[int, Wire] = {}  # by the number of the machine
        with locked(place / LOCK, timeout=LOCK_PATIENCE, what="stand in for machines of other hosts"):
            remove_dead(place)
            for number in set(numbers) - set(self._ends.others()):
                self._ends.bind(number)

    def listen(self) -> None:
        self._ends.listen(self._carry)

    async def carry(self, numbers: Iterable[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Frames to and from these machines, until the connection ends. Raises OSError, EOFError."""
        senders, wire, buffer = frozenset(numbers), Wire(writer), bytearray()
        self._wires.update(dict.fromkeys(senders, wire))
        try:
            while True:
                while len(buffer) >= HEAD.size:
                    number, length = HEAD.unpack_from(buffer)
                    if len(buffer) < (end := HEAD.size + length):
                        break
                    self._deliver(number, bytes(buffer[HEAD.size : end]), senders)
                    del buffer[:end]
                data = await reader.read(CHUNK)
                if not data:
                    raise EOFError("the connection was closed")
                buffer += data
        finally:
            self._wires = {number: other for number, other in self._wires.items() if other is not wire}

    def close(self) -> None:
        self._ends.close()

    def _carry(self, number: int, frame: bytes) -> None:
        if (wire := self._wires.get(number)) is not None:
            wire.put(number, frame)

    def _deliver(self, number: int, frame: bytes, senders: frozenset[int]) -> None:
        """To a machine of this part, from one of those: anything else is dropped."""
        is_theirs = SMALLEST <= len(frame) <= LARGEST and frame[6:11] == self._prefix and frame[11] in senders
        if is_theirs and 1 <= number <= MOST and number not in self._ends.own:
            self._ends.send(number, frame)


class Wire:
    """A connection that takes frames: those of one turn of the loop go out together."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._waiting = writer, bytearray()

    def put(self, number: int, frame: bytes) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting += HEAD.pack(number, len(frame)) + frame

    def _flush(self) -> None:
        if self._writer.transport.get_write_buffer_size() < FULL:
            self._writer.write(self._waiting)
        self._waiting = bytearray()
