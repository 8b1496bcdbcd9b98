"""Published ports: sockets of this host whose connections are carried, by the agent's channel, to services of the guest.

They are the supervisor's own and go with it. A connection that comes before the machine runs waits; one to a port on which
nothing in the guest listens is reset.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import struct
from collections.abc import Coroutine
from contextlib import suppress

from belljar.errors import BadOption, BelljarError
from belljar.guest import Process, Streams
from belljar.hints import Any
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running
from belljar.machine.orders import cancelled
from belljar.model import Port
from belljar.network import Publish

BACKLOG = 128
MOST = 256  # connections of a machine at once; further ones wait
ACCEPT_AGAIN = 1.0  # seconds
RESET = struct.pack("ii", 1, 0)  # a linger of no time
REFUSALS = {
    errno.EADDRINUSE: ("it is taken", "Choose another port, or 0 for a free one."),
    errno.EACCES: ("ordinary users cannot listen there", "Choose a port from 1024 on, or 0 for a free one."),
    errno.EADDRNOTAVAIL: ("this host does not have that address", "Leave the address out for the loopback."),
}
NO_AGENT = "nobody in the guest could connect: it has no agent of belljar's"


class Ports:
    """Of one machine. Made and used in the event loop that keeps it."""

    def __init__(self, life: Lifecycle, running: Running, allowed: Publish) -> None:
        self._life, self._running, self._allowed = life, running, allowed
        self._free = asyncio.Semaphore(MOST)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: set[socket.socket] = set()
        self._refusals: set[tuple[int, str]] = set()  # that were told

    def open(self, port: Port) -> Port:
        """Listen, and return where. Raises BadOption, NoSpace."""
        address = f"[{port.address}]" if ":" in port.address else port.address
        what = f"--publish {address}:{port.host}:{port.guest}"
        if not self._life.request.work.has_agent:
            raise BadOption(f"{what}: {NO_AGENT}", hint="With `--ready agent` it has one.")
        family = self._checked(port, what)
        self._life.record.write("publish", port=port)
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._sockets.add(listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((port.address, port.host))
            listener.listen(BACKLOG)
        except OSError as exc:
            why, hint = REFUSALS.get(exc.errno or 0, (os.strerror(exc.errno or 0), None))
            raise BadOption(f"{what}: {why}", hint=hint) from exc
        made = Port(port.guest, listener.getsockname()[1], port.address)
        self._life.record.tell("published", port=made)
        self._begin(self._accept(listener, port.guest))
        return made

    async def close(self) -> None:
        """Its guest is gone by now, and so are the connections that were carried."""
        for task in list(self._tasks):
            await cancelled(task)
        for end in self._sockets:
            end.close()

    def _checked(self, port: Port, what: str) -> socket.AddressFamily:
        """Raises BadOption."""
        import ipaddress

        try:
            address = ipaddress.ip_address(port.address)
        except ValueError:
            address = None
        if address is None or not 0 <= port.host <= 65535 or not 1 <= port.guest <= 65535:
            raise BadOption(f"{what}: not an IP address of this host and two ports")
        if self._allowed is Publish.NONE or (self._allowed is Publish.LOOPBACK and not address.is_loopback):
            remedy = "Leave the address out for the loopback." if self._allowed is Publish.LOOPBACK else ""
            why = f'`network.publish = "{self._allowed.value}"`'
            raise BadOption(f"{what}: this host's settings do not allow it ({why})", hint=remedy or "Ask your site.")
        return socket.AF_INET if address.version == 4 else socket.AF_INET6

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            await self._free.acquire()
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:  # descriptors or memory are short, of which nothing tells the end
                self._free.release()
                await asyncio.sleep(ACCEPT_AGAIN)
            else:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self._sockets.add(connection)
                self._begin(self._carry(connection, port))

    async def _carry(self, connection: socket.socket, port: int) -> None:
        """One connection, to its end on both sides."""
        client = Client(connection)
        try:
            with connection, suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._running.is_up.wait()
                if (guest := self._running.guest) is None:
                    return
                client.process = await guest.connect(port, Streams(client, client, None))
                if (await client.process.wait()).exit_code == 0:  # all of it was carried: it is not reset
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))
        except BelljarError as error:
            if (port, error.message) not in self._refusals:
                self._refusals.add((port, error.message))
                self._life.record.tell("connection-refused", port=port, reason=error.message)
        finally:
            self._sockets.discard(connection)
            self._free.release()


class Client:
    """Who connected, as source and sink."""

    process: Process | None = None  # the connection in the guest

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def read(self, limit: int) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._connection, limit)
        except OSError:
            if self.process is not None:  # it is gone for good: nobody reads the answer either
                await self.process.signal(signal.SIGKILL)
            raise

    async def write(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def close(self) -> None:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # else it was broken off, which is not an end
            self._connection.shutdown(socket.SHUT_WR)
