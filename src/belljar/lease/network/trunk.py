"""The network of a lease over several hosts: one TLS connection for each two of its pilots. That of the higher rank makes it, and makes it
again whenever it breaks; both show the lease's key before the first frame."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from belljar.errors import BelljarError
from belljar.host.streams import Works
from belljar.host.threads import in_thread
from belljar.lease.jobfile import JobFile
from belljar.lease.orders import MachineOrder, Peer, Reach
from belljar.lease.protocol import Opening, lease_key
from belljar.network import part_of
from belljar.service.gate import Gate, Streams, dial, own_address
from belljar.service.telling import Troubles

if TYPE_CHECKING:
    from belljar.network import Part

STREAM = "network"
GREETING = 10.0  # seconds until both have shown the key
SOONEST, LATEST = 0.2, 3.0  # seconds between two tries
ENDS = (OSError, EOFError, ValueError, TypeError, LookupError, OverflowError)  # what others say may be nonsense


class Trunk:
    """One pilot's side. *run*: where this host's live machines are."""

    def __init__(self, job: JobFile, rank: int, run: Callable[[], Path], tell: Callable[..., None]) -> None:
        self._job, self._rank, self._run, self._troubles = job, rank, run, Troubles(tell)
        self._peers: dict[str, dict[int, Peer]] = {}  # by lease, by rank
        self._parts: dict[str, Part] = {}  # by lease
        self.works = Works()  # to be ended with the pilot
        self._address, self._hosts = "", set[str]()  # of this host, and of the other pilots'

    async def open(self, folder: Path) -> Reach | None:
        """Listen, where the job file says so. Raises HostError."""
        if not self._job.ports:
            return None
        self._address = await in_thread(lambda: own_address(self._job.service))
        gate = Gate(self._address, self._job.ports, folder)
        self.works.begin(gate.serve(self._hosts, self._met))
        return Reach(gate.at, gate.pin)

    def join(self, order: MachineOrder) -> None:
        """Before this machine starts. A lease's peers are those of its first."""
        group = order.network.partition(":")[2].partition("@")[0]
        lease = group.partition("+")[0]
        if order.peers and self._job.ports and lease not in self._peers:
            self._peers[lease] = {peer.rank: peer for peer in order.peers}
            self._hosts |= {peer.reach.at.rpartition(":")[0].strip("[]") for peer in order.peers}
            self.works.begin(self._hold(lease, group))

    async def _hold(self, lease: str, group: str) -> None:
        """Stand in for the other pilots' machines, and connect to those of lower ranks."""
        peers = self._peers[lease].values()
        numbers = [number for peer in peers for number in peer.numbers]
        try:
            part = await in_thread(lambda: part_of(self._run(), group, numbers), undo=lambda part: part.close())
        except (BelljarError, OSError) as exc:
            return self._troubles.note(f"network of {lease}", exc)
        with closing(part):
            self._parts[lease] = part
            part.listen()
            lower = (self._keep(lease, peer) for peer in peers if peer.rank < self._rank)
            await asyncio.gather(*lower, asyncio.Event().wait())

    async def _keep(self, lease: str, peer: Peer) -> None:
        """Connected, until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(GREETING):
                    streams = await dial(peer.reach.at, peer.reach.pin, self._address)
                try:
                    await self._talk(streams, lease)
                finally:
                    streams[1].transport.abort()
            except ENDS as exc:
                self._troubles.note(f"network of {lease}, node {peer.rank}", exc)
            await asyncio.sleep(random.uniform(SOONEST, LATEST))

    async def _met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Somebody has connected."""
        with suppress(*ENDS):
            await self._talk((reader, writer))

    async def _talk(self, streams: Streams, lease: str = "") -> None:
        """A connection, from its openings to its end. *lease*: of who made it; the other side is told."""
        reader, writer = streams
        async with asyncio.timeout(GREETING):
            if lease:
                writer.write(self._opening(lease))
            peer = await Opening.heard(reader, self._key_of)
            if not lease:
                writer.write(self._opening(peer.lease))
        numbers = self._peers[peer.lease][peer.slot].numbers
        self._troubles.note(f"network of {peer.lease}, node {peer.slot}")
        await self._parts[peer.lease].carry(numbers, reader, writer)

    def _opening(self, lease: str) -> bytes:
        return Opening(lease, self._rank, stream=STREAM).frame(self._key(lease))

    def _key_of(self, opening: Opening) -> bytes | None:
        is_ours = opening.stream == STREAM and opening.slot in self._peers.get(opening.lease, ())
        return self._key(opening.lease) if is_ours else None

    def _key(self, lease: str) -> bytes:
        """Not the one that the service is spoken to with: what is said here is of no use there."""
        return lease_key(self._job.secret, lease)
