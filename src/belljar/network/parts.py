"""A group of which each host has a part: one process of each host carries frames to the others', over connections that it is given.

    frame      u8 number of the machine it is for, u16 length (big-endian), Ethernet frame

A frame that finds a full queue is lost, as on any network.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from belljar.host.files import private_folder
from belljar.host.locks import locked
from belljar.network.isolated import LARGEST, LOCK, LOCK_PATIENCE, MOST, SMALLEST, Ends, place_of, prefix, remove_dead

HEAD = struct.Struct(">BH")
CHUNK, FULL = 1 << 17, 1 << 20  # bytes read at once; bytes that wait for a connection, beyond which frames are lost


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

    async def carry(
        self, numbers: Iterable[int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes = b""
    ) -> None:
        """Frames to and from these machines, until the connection ends. *data*: what has come of it already. Raises
        OSError, EOFError."""
        senders, wire, buffer = frozenset(numbers), Wire(writer), bytearray(data)
        self._wires.update(dict.fromkeys(senders, wire))
        try:
            while True:
                at, end = 0, HEAD.size
                while len(buffer) >= end:
                    number, length = HEAD.unpack_from(buffer, at)
                    if len(buffer) < end + length:
                        break
                    self._deliver(number, bytes(buffer[end : end + length]), senders)
                    at, end = end + length, end + length + HEAD.size
                del buffer[:at]
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
