"""Published ports: sockets of this host whose connections are carried, by the agent's channel, to services of the guest.

They are the supervisor's own and go with it. A connection that comes before the machine runs waits; one to a port on which
nothing in the guest listens is reset.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from belljar.errors import BadOption, BelljarError
from belljar.guest import Streams
from belljar.host.streams import Works
from belljar.machine.life.life import Lifecycle
from belljar.machine.life.work import Running
from belljar.model import Port
from belljar.network import Publish

BACKLOG = 128
MOST = 256  # connections of a machine at once; BACKLOG further ones wait, more are reset
RESET, END = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)  # what closing a socket does (SO_LINGER)


class Ports:
    """Of one machine. Made and used in the event loop that keeps it."""

    def __init__(self, life: Lifecycle, running: Running, allowed: Publish) -> None:
        self._life, self._running, self._allowed = life, running, allowed
        self._servers, self._works, self._free = list[asyncio.Server](), Works(OSError), asyncio.Semaphore(MOST)
        self._refusals: set[tuple[int, str]] = set()  # that were told

    async def open(self, port: Port) -> Port:
        """Listen, and return where. Raises BadOption, NoSpace."""
        from ipaddress import ip_address

        what = f"--publish {port.place}:{port.guest}"
        if not self._life.request.work.has_agent:
            raise BadOption(f"{what}: its guest has no agent of belljar's", hint="With `--ready agent` it has one.")
        try:
            is_local = ip_address(port.address).is_loopback
            if self._allowed is Publish.NONE or not (is_local or self._allowed is Publish.ANY):
                raise ValueError(f'this host\'s settings do not allow it (`network.publish = "{self._allowed.value}"`)')
            if not 1 <= port.guest <= 65535:
                raise ValueError(f"{port.guest} is not a port")
            self._life.record.write("publish", port=port)
            server = await asyncio.start_server(
                lambda *ends: self._works.begin(self._carry(port.guest, *ends)), port.address, port.host
            )
        except (OSError, OverflowError, ValueError) as exc:
            why = os.strerror(exc.errno or 0) if isinstance(exc, OSError) else str(exc)
            hint = "Leave the address out for the loopback; take a port from 1024 on, or 0 for a free one; or ask your site."
            raise BadOption(f"{what}: {why}", hint=hint) from exc
        self._servers.append(server)
        made = Port(port.guest, server.sockets[0].getsockname()[1], port.address)
        self._life.record.tell("published", port=made)
        return made

    async def close(self) -> None:
        """Its guest is gone by now, and so are the connections that were carried."""
        for server in self._servers:
            server.close()
        await self._works.end()

    async def _carry(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end on both sides."""
        client = Client(writer)
        try:
            if len(self._works) <= MOST + BACKLOG:
                await self._running.is_up.wait()
                async with self._free:
                    if (guest := self._running.guest) is not None:
                        await (await guest.connect(port, Streams(reader, client, None))).wait()
        except BelljarError as error:
            if (port, error.message) not in self._refusals:
                self._refusals.add((port, error.message))
                self._life.record.tell("connection-refused", port=port, reason=error.message)
        finally:
            if not client.is_whole:
                writer.transport.abort()
            writer.close()


class Client:
    """Who connected, as a sink. Until it has been sent all, it is reset by whatever ends this process."""

    is_whole = False

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._socket = writer, writer.get_extra_info("socket")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        task = asyncio.current_task()
        if task is None or not task.cancelling():  # else it was broken off, which is not an end
            self._writer.write_eof()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, END)
            self.is_whole = True
