"""The network of a lease over several hosts: pilots that connect to each other on loopback, and cards that send real frames."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.stories.lease.house import Running, Service, job_for

from belljar.errors import HostError
from belljar.lease.jobfile import JobFile
from belljar.lease.network import trunk as trunks
from belljar.lease.network.trunk import STREAM, Trunk
from belljar.lease.orders import Do, MachineOrder, Order, Peer, Reach
from belljar.lease.protocol import Opening, lease_key
from belljar.model import NetworkMode
from belljar.network import Networks, Settings
from belljar.records import replace
from belljar.service.gate import MOST, Gate, Streams, dial, own_address

LEASE = "r-0123456789abcdef0"
KEY = "5a" * 32
EVERYONE = b"\xff" * 6


class Host:
    """A pilot and one machine, in folders of its own."""

    def __init__(self, folder: Path, rank: int, key: str = KEY, lease: str = LEASE) -> None:
        self.folder, self.rank, self.lease = folder, rank, lease
        folder.mkdir(parents=True, exist_ok=True)
        self.job = JobFile(lease, 1, 2, ("127.0.0.1:1",), "0" * 64, key, 60.0, 5.0, 5.0, 5.0, 5.0, ports="0")
        self.told: list[str] = []
        self.news = asyncio.Event()

    async def up(self) -> Reach:
        self.trunk = Trunk(self.job, self.rank, lambda: self.folder, self.tell)
        reach = await self.trunk.open(self.folder)
        assert reach is not None and not list(self.folder.glob("*.pem"))
        self.reach = reach
        networks = Networks(Settings(), self.folder)
        name = f"{self.lease}+{self.rank}@10.98.0.{self.rank + 1}/24"
        self.port = await networks.join(
            NetworkMode.ISOLATED, name, "0" * 12, uid=os.geteuid(), intend=lambda what, path: None
        )
        self.mac = bytes.fromhex(self.port.link.mac.replace(":", ""))
        self.line = socket.socket(fileno=os.dup(self.port.link.fd))
        return reach

    def knows(self, *others: Host) -> None:
        peers = tuple(Peer(one.rank, one.reach, (one.rank + 1,)) for one in others)
        self.trunk.join(MachineOrder("x", network=f"isolated:{self.lease}+{self.rank}@10.98.0.1/24", peers=peers))

    def send(self, to: bytes, text: bytes, source: bytes | None = None) -> None:
        self.line.send(to + (source or self.mac) + b"\x08\x00" + text)

    async def hear(self) -> bytes:
        async with asyncio.timeout(10):
            return (await asyncio.get_running_loop().sock_recv(self.line, 1 << 16))[14:]

    async def reaches(self, other: Host) -> None:
        """Frames cross; those that are sent before the connection is there are lost."""
        hearing = asyncio.ensure_future(other.hear())
        while not hearing.done():
            self.send(other.mac, b"hello from %d" % self.rank)
            await asyncio.wait({hearing}, timeout=0.05)
        assert await hearing == b"hello from %d" % self.rank
        other.empty()

    def empty(self) -> list[bytes]:
        """What has come, and nobody took."""
        found = []
        while True:
            try:
                found.append(self.line.recv(1 << 16)[14:])
            except BlockingIOError:
                return found

    def tell(self, what: str, **facts: object) -> None:
        self.told.append(f"{what} {facts}")
        self.news.set()

    async def down(self) -> None:
        await self.trunk.works.end()
        self.line.close()
        self.port.close()


@asynccontextmanager
async def hosts(*all_of_them: Host) -> AsyncIterator[None]:
    for one in all_of_them:
        await one.up()
    try:
        yield
    finally:
        for one in all_of_them:
            await one.down()
            assert os.listdir(one.folder / "networks") == []


async def test_frames_cross_between_two_hosts_and_go_nowhere_else(tmp_path: Path) -> None:
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    async with hosts(one, two):
        one.knows(two)
        two.knows(one)
        await one.reaches(two)
        await two.reaches(one)
        one.send(EVERYONE, b"to all")
        one.send(two.mac, bytes(9000))
        assert [await two.hear(), await two.hear()] == [b"to all", bytes(9000)]
        one.send(two.mac, b"as another", source=two.mac)
        one.send(two.mac[:5] + b"\x07", b"to nobody")
        one.send(two.mac, b"then")
        assert await two.hear() == b"then"


async def test_a_stream_of_frames_arrives_whole_and_in_order(tmp_path: Path) -> None:
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    async with hosts(one, two):
        one.knows(two)
        two.knows(one)
        await one.reaches(two)
        for number in range(2000):
            one.send(two.mac, b"%d" % number)
            assert await two.hear() == b"%d" % number


async def test_a_flood_stops_nobody(tmp_path: Path) -> None:
    """Neither a guest that sends without end, nor one that does not read."""
    one, two, three = (Host(tmp_path / str(rank), rank) for rank in range(3))
    async with hosts(one, two, three):
        for host in (one, two, three):
            host.knows(*({one, two, three} - {host}))
        await one.reaches(two)
        await three.reaches(one)
        for _ in range(5000):
            try:
                one.send(two.mac, bytes(9000))
            except BlockingIOError:
                await asyncio.sleep(0)
        await one.reaches(three)
        await three.reaches(one)
        left = [b""]
        while left:  # until nothing of the flood comes any more
            await asyncio.sleep(0.1)
            left = two.empty()
        await one.reaches(two)


async def test_three_hosts_and_one_that_dies_and_comes_back(tmp_path: Path) -> None:
    one, two, three = (Host(tmp_path / str(rank), rank) for rank in range(3))
    async with hosts(one, two):
        await three.up()
        for host in (one, two, three):
            host.knows(*({one, two, three} - {host}))
        await one.reaches(three)
        await three.reaches(two)
        await three.down()
        one.send(three.mac, b"to the dead")
        await one.reaches(two)
        async with hosts(again := Host(tmp_path / "again", 2)):
            again.knows(one, two)
            await again.reaches(one)
            await two.reaches(again)


async def test_a_key_of_another_lease_reaches_nothing(tmp_path: Path) -> None:
    """Though it knows address, pin and the lease's id."""
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    liar = Host(tmp_path / "3", 1, key="6b" * 32)
    async with hosts(one, two, liar):
        one.knows(two)
        liar.knows(one)
        two.knows(one)
        await two.reaches(one)
        for _ in range(20):
            liar.send(one.mac, b"a lie")
            await asyncio.sleep(0.02)
        assert one.empty() == [] and any("connection was closed" in line for line in liar.told)
        await one.reaches(two)


async def connect(host: Host, said: bytes) -> Streams:
    """By somebody who can do what a pilot does, as far as they have its key."""
    streams = await dial(host.reach.at, host.reach.pin, "127.0.0.1")
    streams[1].write(said)
    return streams


async def is_hung_up(streams: Streams) -> bool:
    async with asyncio.timeout(10):
        try:
            while await streams[0].read(1 << 16):
                pass
        except ConnectionError:
            pass
        finally:
            streams[1].transport.abort()
    return True


async def test_openings_that_lie_are_of_no_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    key = lease_key(bytes.fromhex(KEY), LEASE)
    async with hosts(one, two):
        one.knows(two)
        async with asyncio.timeout(10):
            while LEASE not in one.trunk._parts:  # noqa: ASYNC110  # before, whoever connects is hung up on
                await asyncio.sleep(0.01)
        honest = Opening(LEASE, 1, stream=STREAM).frame(key)
        streams = await connect(one, honest)
        assert (await Opening.heard(streams[0], lambda _: key)).slot == 0
        for wrong in (b"\0\0\0\1x", b"\xff" * 5000, honest[:-1] + b"!"):
            assert await is_hung_up(await connect(one, wrong)), wrong
        for rank, lease, secret in (
            (7, LEASE, key),
            (0, LEASE, key),
            (1, "r-other", key),
            (1, LEASE, bytes.fromhex(KEY)),
        ):
            again = await connect(one, Opening(lease, rank, stream=STREAM).frame(secret))
            assert await is_hung_up(again), (rank, lease)
        frame = one.mac + one.mac[:5] + b"\x02" + b"\x08\x00" + b"honest"
        lies = [
            b"\x01\xff\xff" + bytes(0xFFFF),
            b"\x01\0\0",
            b"\x01\0\x05short",
            b"\x02" + len(frame).to_bytes(2, "big") + frame,
        ]
        for source in (one.mac, one.mac[:5] + b"\x09", b"\x52\0\0\0\0\x02"):
            lie = one.mac + source + b"\x08\x00" + b"a lie"
            lies.append(b"\x01" + len(lie).to_bytes(2, "big") + lie)
        streams[1].write(b"".join(lies) + b"\x01" + len(frame).to_bytes(2, "big") + frame)
        assert await one.hear() == b"honest"
        streams[1].transport.abort()
        monkeypatch.setattr(trunks, "GREETING", 0.2)
        assert await is_hung_up(await connect(one, b""))


async def test_hosts_that_have_nothing_to_do_with_the_lease_are_not_talked_to(tmp_path: Path) -> None:
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    async with hosts(one, two):
        with pytest.raises((ConnectionError, OSError)):  # nobody is known yet
            await dial(one.reach.at, one.reach.pin, "127.0.0.1")
        one.knows(two)
        with pytest.raises((ConnectionError, OSError)):
            await dial(one.reach.at, one.reach.pin, "127.0.0.2")
        place = ("127.0.0.1", int(one.reach.at.rpartition(":")[2]))
        flood = []
        for _ in range(MOST + 50):
            flood.append(socket.create_connection(place))
            await asyncio.sleep(0)
        with pytest.raises((ConnectionError, OSError)):  # too many who have shown nothing
            await dial(one.reach.at, one.reach.pin, "127.0.0.1")
        for end in flood:
            end.close()
        two.knows(one)
        await one.reaches(two)


async def test_a_pilot_says_why_a_host_is_not_reached_and_survives_nonsense(tmp_path: Path) -> None:
    one, two = Host(tmp_path / "1", 0), Host(tmp_path / "2", 1)
    async with hosts(one, two):
        for at, pin in (
            ("127.0.0.1:1", "0" * 64),
            ("nonsense", ""),
            ("127.0.0.1:99999", "é"),
            (one.reach.at, "é" * 64),
        ):
            two.trunk._peers.clear()
            two.news.clear()
            peers = (Peer(0, replace(one.reach, at=at, pin=pin), (1,)),)
            two.trunk.join(MachineOrder("x", network=f"isolated:{LEASE}+1@10.98.0.2/24", peers=peers))
            async with asyncio.timeout(10):
                await two.news.wait()
            assert f"network of {LEASE}, node 0" in two.told[-1]


async def test_a_pilot_says_where_it_is_reached_and_listens_until_its_end(tmp_path: Path) -> None:
    service = Service(tmp_path, (Order(Do.GO),))
    async with service.up():
        for ports in ("", "0"):
            run = Running(job_for(service, ports=ports), tmp_path)
            await service.until(lambda: service.heard)
            hello = service.heard[0]
            assert hello.facts is not None and (hello.facts.reach is not None) == bool(ports)
            service.channel.order(hello.slot, Order(Do.RELEASE))
            await run.ended()
            service.heard.clear()
        assert hello.facts.reach is not None and hello.facts.reach.at.startswith("127.0.0.1:")
        with pytest.raises(ConnectionRefusedError):
            await dial(hello.facts.reach.at, hello.facts.reach.pin)


async def test_ports_of_the_sites_choice(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gate = Gate("127.0.0.1", f"{port}-{port + 5}", tmp_path)
        assert port < gate.number <= port + 5
        task = asyncio.ensure_future(gate.serve(set(), None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(HostError, match=f"no port of {port} is free"):
            Gate("127.0.0.1", str(port), tmp_path)
        await asyncio.gather(task, return_exceptions=True)


async def test_a_port_without_descriptors_is_open_again_when_there_are_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("belljar.service.streams.FULL", 0.01)
    loop, fails = asyncio.get_running_loop(), [errno.EMFILE]
    accept = loop.sock_accept

    async def full(end: socket.socket) -> object:
        if fails:
            raise OSError(fails.pop(), "no")
        return await accept(end)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(5))
        await writer.drain()

    monkeypatch.setattr(loop, "sock_accept", full)
    gate = Gate("127.0.0.1", "0", tmp_path)
    task = asyncio.ensure_future(gate.serve({"127.0.0.1"}, talk))
    async with asyncio.timeout(20):
        reader, writer = await dial(gate.at, gate.pin)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello" and not fails
    writer.transport.abort()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_a_host_without_a_way_to_its_service_says_so() -> None:
    assert own_address(("nowhere.invalid:80", "nonsense", "127.0.0.1:9")) == "127.0.0.1"
    with pytest.raises(HostError, match=r"no route to nowhere\.invalid:80"):
        own_address(("nowhere.invalid:80",))
