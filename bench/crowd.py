"""Simulated pilots: a process of their own beside the service that is measured, with which it shares the host's processors. So it does
as little as it can while the clock runs: frames are made before, bytes are stamped when they arrive and read when nothing else does.
A real pilot has a node for that."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import select
import socket
import ssl
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT))
from tests.stories.lease.wire import LARGE

from belljar.host.files import write_whole
from belljar.lease import Cause, InstanceState, jobfile
from belljar.lease.jobfile import JobFile
from belljar.lease.orders import Do, Report, Tell
from belljar.lease.protocol import HEAD, Message, Opening, frame
from belljar.lease.service.channel import BACKLOG
from belljar.model import dumps, to_json
from belljar.service.credentials.certificates import own_certificate

Row = dict[str, float]
I = InstanceState  # noqa: E741
LONGEST = 120.0  # seconds without a word of the service


def whole(buffer: bytearray) -> Iterator[Message]:
    """The messages that are whole in it."""
    while len(buffer) >= (end := HEAD + int.from_bytes(buffer[:HEAD], "big")) > HEAD:
        yield json.loads(buffer[HEAD:end])
        del buffer[:end]


class Pilot:
    """Its machine is up at once, and gone at once."""

    def __init__(self, job: JobFile, rank: int, context: ssl.SSLContext) -> None:
        self.job, self.rank, self._context, self._name = job, rank, context, os.urandom(16).hex()
        self._buffer = bytearray()
        self.seq = self.acked = self.seen = self.messages = self.known = 0
        self.orders = dict[str, str]()  # the last of each kind: its machine
        self.end: ssl.SSLSocket

    def connect(self) -> None:
        """By TCP; TLS and the openings come as the other side answers."""
        host, _, port = self.job.service[0].rpartition(":")
        plain = socket.create_connection((host, int(port)))
        plain.setblocking(False)
        self.end = self._context.wrap_socket(plain, do_handshake_on_connect=False)
        self.greet()

    def greet(self) -> None:
        """A step of TLS; after the last, this side's opening."""
        try:
            self.end.do_handshake()
        except ssl.SSLWantReadError:
            return
        if sha256(self.end.getpeercert(binary_form=True) or b"").hexdigest() != self.job.pin:
            sys.exit("another certificate than the job file's")
        self.end.send(Opening(self.job.lease, self.rank, self.job.attempt, self._name).frame(self.job.secret))

    def hear(self, data: bytes) -> None:
        self._buffer += data
        for message in whole(self._buffer):
            self.messages += 1
            self.acked = max(self.acked, message.get("ack", 0))
            self.seen = max(self.seen, message.get("seq", 0))
            if order := message.get("order"):
                self.orders[order["do"]] = order["instance"]

    def tell(self, tell: Tell, *, numbered: bool = False, **facts: Any) -> bytes:
        """The frame."""
        self.seq += numbered
        seq = self.seq if numbered else 0
        report = Report(tell, self.job.lease, self.job.attempt, self.rank, self._name, seq, time.time(), **facts)
        return frame({"seq": seq, "ack": self.seen, "report": to_json(report)})

    # -- words: what it says, after which it waits for something ------------------------------------------------------------

    def hello(self) -> list[bytes]:
        return [self.tell(Tell.HELLO, facts=LARGE)]

    def heartbeat(self) -> list[bytes]:
        self.known = self.messages
        return [self.tell(Tell.HEARTBEAT, mono=1.0)]

    def run(self) -> list[bytes]:
        machine, steps = self.orders[Do.START.value], (I.STAGING, I.BOOTING, I.RUNNING)
        return [self.tell(Tell.INSTANCE, numbered=True, mono=1.0, instance=machine, state=one) for one in steps]

    def leave(self) -> list[bytes]:
        over = {"numbered": True, "mono": 2.0, "cause": Cause.USER}
        gone = self.tell(Tell.INSTANCE, instance=self.orders[Do.START.value], state=I.TERMINATED, **over)
        return [gone, self.tell(Tell.ENDED, **over)]

    def nothing(self) -> list[bytes]:
        return []


Says, Waits = Callable[[Pilot], list[bytes]], Callable[[Pilot], bool]
WORDS: dict[str, tuple[Says, Waits]] = {
    "connect": (Pilot.nothing, lambda one: one.messages > 0),  # the service knows who it is, and has said so
    "hello": (Pilot.hello, lambda one: bool(one.orders)),
    "ordered": (Pilot.nothing, lambda one: Do.START.value in one.orders),
    "run": (Pilot.run, lambda one: one.acked >= one.seq),
    "heartbeat": (Pilot.heartbeat, lambda one: one.messages > one.known),
    "pinged": (Pilot.nothing, lambda one: Do.PING.value in one.orders),
    "stopped": (Pilot.nothing, lambda one: Do.STOP.value in one.orders),
    "leave": (Pilot.leave, lambda one: one.acked >= one.seq),
}


class Pilots:
    """So many, of one job."""

    def __init__(self, job: JobFile, count: int) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the pin says more than any name
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._all = [Pilot(job, rank, context) for rank in range(count)]
        self._ready, self._by_end = select.epoll(), dict[int, Pilot]()
        self._arrived = deque[tuple[Pilot, bytes, float]]()  # and is not read

    def do(self, word: str) -> tuple[float, list[float]]:
        """When all began, and when each had what it waited for."""
        says, waits = WORDS[word]
        frames = [says(one) for one in self._all]
        begin = time.monotonic()
        for one, mine in zip(self._all, frames, strict=True):
            if word == "connect":
                one.connect()
                self._by_end[one.end.fileno()] = one
                self._ready.register(one.end, select.EPOLLIN)
            for said in mine:
                one.end.send(said)
        at = {one: begin for one in self._all if waits(one)}
        while len(at) < len(self._all):
            ends = self._ready.poll(0 if self._arrived else LONGEST)
            if not ends and not self._arrived:
                sys.exit(f"{word}: {len(self._all) - len(at)} pilots wait in vain")
            for end, _ in ends:
                self._take(self._by_end[end])
            if not ends:
                one, data, moment = self._arrived.popleft()
                one.hear(data)
                if waits(one):
                    at.setdefault(one, moment)
        return begin, [at[one] for one in self._all]

    def _take(self, one: Pilot) -> None:
        if one.end.version() is None:
            return one.greet()
        data = one.end.recv(1 << 16) or sys.exit("the service closed a connection")
        self._arrived.append((one, data, time.monotonic()))


def simulated(file: Path, count: int) -> None:
    """They do what standard input says, a word each line, all at once, and tell when, by the clock of this host, each was ready."""
    pilots = Pilots(jobfile.read(file), count)
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        begin, at = pilots.do(line.strip())
        print(json.dumps({"begin": begin, "at": at}), flush=True)


# -- from the service's side -------------------------------------------------------------------------------------------


class Crowd:
    """The process of simulated pilots, from here."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def all(self, word: str) -> Row:
        """Milliseconds from the word's start to each pilot's being done: the middle, the last but one of 100, and the last."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n".encode())
        line = await self._process.stdout.readline()
        if not line:
            sys.exit("the simulated pilots are gone")
        said = json.loads(line)
        return spread([1000 * (one - said["begin"]) for one in said["at"]]) | {"until": max(said["at"])}


def spread(times: list[float]) -> Row:
    ordered = sorted(times)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "last": ordered[-1],
    }


class Bare(asyncio.Protocol):
    """A service that answers a frame by a frame, with nothing behind it. What this takes, asyncio and TLS take on this host."""

    def __init__(self, key: bytes) -> None:
        self._key, self._buffer, self._sent = key, bytearray(), 0

    def connection_made(self, transport: Any) -> None:
        self._write: Callable[[bytes], None] = transport.write

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for one in whole(self._buffer):
            if "proof" in one:
                self._write(Opening(one["lease"], one["slot"]).frame(self._key))
                continue
            self._sent += "report" in one
            order = {"seq": self._sent, "order": {"do": Do.WAIT.value, "instance": ""}} if "report" in one else {}
            self._write(frame({"ack": 0, **order}))


async def bare(folder: Path, count: int) -> tuple[Row, Row]:
    """Connections and hellos of so many pilots, to such a service."""
    certificate, key, file = folder / "bare.pem", os.urandom(32), folder / "bare.job"
    pin, context = own_certificate(certificate, ("127.0.0.1",)), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
    context.load_cert_chain(certificate)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Bare(key), "127.0.0.1", 0, ssl=context, backlog=BACKLOG)
    where = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    job = JobFile(f"r-{0:017x}", 1, count, (where,), pin, key.hex(), 60.0, 60.0, 60.0, 0.0, 10.0)
    write_whole(file, dumps(job))
    async with crowd(file, count) as pilots:
        found = await pilots.all("connect"), await pilots.all("hello")
    server.close()
    return found


@asynccontextmanager
async def crowd(file: Path, count: int) -> AsyncIterator[Crowd]:
    command = (sys.executable, __file__, str(file), str(count))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
    try:
        yield Crowd(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


if __name__ == "__main__":
    simulated(Path(sys.argv[1]), int(sys.argv[2]))
