"""UDP in an event loop: what arrives is taken in batches, a flood gets a share of the loop's time."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Final

from belljar.errors import HostError
from belljar.host.outbox import Outbox
from belljar.host.threads import in_thread

Address = tuple[Any, ...]  # as the socket module has it: host, port, and more for IPv6
Take = Callable[[bytes, Address], object]
EVERYWHERE: Final = ("0.0.0.0", "::")
BATCH: Final = 64  # datagrams that are taken before others in the loop have their turn
TURN: Final = 0.003  # seconds after which they have it anyway
BUFFER: Final = 1 << 20  # bytes the kernel is asked to keep for us, each way; what is kept longer is answered late
WAITING: Final = 4096  # datagrams that may wait to be sent
NAME_LASTS: Final = 600.0  # seconds until a name is looked up again
LOOKED_UP: Final = 16  # names at a time
BEYOND_LIMIT: Final = {socket.SO_RCVBUF: 33, socket.SO_SNDBUF: 32}  # SO_RCVBUFFORCE, SO_SNDBUFFORCE: for root alone


class Datagrams:
    """*take* gets each datagram, cut after *longest* bytes, and must not raise. A flood gets *share* of a processor."""

    def __init__(self, sock: socket.socket, take: Take, *, longest: int, share: float = 0.25) -> None:
        self._socket, self._take, self._longest, self._share = sock, take, longest, share
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(sock, sock.sendto, WAITING)
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    @property
    def address(self) -> Address:
        """Where it receives."""
        address: Address = self._socket.getsockname()
        return address

    def send(self, data: bytes, address: Address) -> bool:
        """Now, or as soon as there is room for it. False: it will not be sent."""
        try:
            return self._outbox.send(data, address)
        except OSError:
            return False

    def close(self) -> None:
        """What still waits is not sent. Closing again is success."""
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._outbox.close()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._readable)

    def _readable(self) -> None:
        began, ends = time.thread_time(), time.perf_counter() + TURN
        for _ in range(BATCH):
            try:
                data, address = self._socket.recvfrom(self._longest)
            except OSError:  # nothing more for now
                return
            self._take(data, address)
            if self._socket.fileno() < 0:  # it was closed meanwhile
                return
            if time.perf_counter() > ends:
                break
        self._loop.remove_reader(self._socket)
        spent = time.thread_time() - began
        self._pause = self._loop.call_later(spent * (1 / self._share - 1), self._listen)


class Outgoing:
    """Sockets to send from and to get answers at, by Datagrams: one for IPv4, one for IPv6, made when they are needed."""

    def __init__(self, take: Take, *, longest: int, share: float, buffer: int = BUFFER) -> None:
        self._take, self._longest, self._share, self._buffer = take, longest, share, buffer
        self._made: dict[int, Datagrams | None] = {}  # by the length of an address

    def send(self, data: bytes, address: Address) -> bool:
        """False: it will not be sent; such as on a host that has no IPv6."""
        if len(address) not in self._made:
            self._made[len(address)] = None
            with suppress(OSError):
                sock = bound("0.0.0.0" if len(address) == 2 else "::", 0, self._buffer)
                self._made[len(address)] = Datagrams(sock, self._take, longest=self._longest, share=self._share)
        way = self._made[len(address)]
        return way is not None and way.send(data, address)

    def close(self) -> None:
        for way in self._made.values():
            if way is not None:
                way.close()


def send_all(place: str, packets: Iterable[bytes]) -> None:
    """To HOST:PORT. Blocks while the name is looked up. What cannot be sent is lost, as all that goes by UDP may be."""
    host, _, port = place.rpartition(":")
    with suppress(OSError, ValueError):
        (family, kind, _, _, address), *_ = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        with socket.socket(family, kind) as sock:
            for packet in packets:
                sock.sendto(packet, address)


def bound(host: str, port: int, buffer: int = BUFFER) -> socket.socket:
    """A UDP socket for Datagrams at this address of ours; port 0: any. IPv6 is IPv6 alone. Raises OSError."""
    family, *_, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        for option, beyond in BEYOND_LIMIT.items():
            sock.setsockopt(socket.SOL_SOCKET, option, buffer)
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, beyond, buffer)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


async def own_sockets(listen: Iterable[str], name: str, port: int) -> list[socket.socket]:
    """At the addresses the site named; else at those that others see by this host's name; else at all. Raises HostError."""
    if named := tuple(listen) or (name,) * is_numeric(name):
        return _all_bound(named, port)
    hosts = [str(address[0]) for address in await addresses_of(name, port)]
    outside = [host for host in hosts if not ip_address(host.partition("%")[0]).is_loopback]
    with suppress(HostError):  # a name that leads elsewhere
        if outside:
            return _all_bound(outside, port)
    return _all_bound(EVERYWHERE, port)


def _all_bound(hosts: Iterable[str], port: int) -> list[socket.socket]:
    """At each of these; of every address one is enough, for a host may have no IPv6."""
    sockets, problems = list[socket.socket](), list[str]()
    for host in hosts:
        try:
            sockets.append(bound(host, port))
        except OSError as exc:
            problems.append(f"UDP port {port} of {host}: {exc.strerror or exc}")
    if problems and not (hosts is EVERYWHERE and sockets):
        for sock in sockets:
            sock.close()
        hint = "A port below 1024 wants CAP_NET_BIND_SERVICE; `port` is the same on all factories. `ss -ulpn` shows who has a port."
        raise HostError("; ".join(problems), hint=hint)
    return sockets


class Names:
    """Where UDP for these goes. *hosts*: all addresses that were ever found."""

    def __init__(self, names: Iterable[str], port: int) -> None:
        self._names, self._port = tuple(names), port
        self._places: dict[str, tuple[float, list[Address]]] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(LOOKED_UP)
        self.hosts: set[str] = set()

    async def look_up(self, timeout: float) -> None:
        """Addresses that are old serve until there are new ones; those that were never known are waited for."""
        now = asyncio.get_running_loop().time()
        for name in self._names:
            if name not in self._looking and (name not in self._places or now - self._places[name][0] > NAME_LASTS):
                self._looking[name] = asyncio.create_task(self._find(name))
        unknown = [self._looking[name] for name in self._looking if name not in self._places]
        if unknown:
            await asyncio.wait(unknown, timeout=timeout)

    def of(self, name: str) -> list[Address]:
        """What is known now."""
        return self._places.get(name, (0.0, []))[1]

    async def close(self) -> None:
        """They are looked up no more."""
        for task in self._looking.values():
            task.cancel()
        await asyncio.gather(*self._looking.values(), return_exceptions=True)

    async def _find(self, name: str) -> None:
        try:
            async with self._gate:
                if addresses := await addresses_of(name, self._port):
                    self._places[name] = (asyncio.get_running_loop().time(), addresses)
                    self.hosts.update(address[0] for address in addresses)
        finally:
            del self._looking[name]


async def addresses_of(name: str, port: int) -> list[Address]:
    """Where UDP for this name goes, IPv4 first; none: nobody knows it. A slow server of names blocks nothing else."""

    def look(flags: int = 0) -> list[Address]:
        try:
            places = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM, flags=flags)
        except (OSError, UnicodeError):  # such as a label of 64 characters
            return []
        return [address for *_, address in sorted(places, key=lambda place: place[0] != socket.AF_INET)]

    return look(socket.AI_NUMERICHOST) or await in_thread(look)


def is_numeric(host: str) -> bool:
    """Is it an address, and no name?"""
    try:
        return bool(ip_address(host.partition("%")[0]))
    except ValueError:
        return False
