"""Factories of the tests: each at a loopback address of its own, which is its name, too. What they send is written out by the documents
of VacQuery, and does not come from the code that is tested."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

SPACE = "vac02.batch.example.org"
Message = dict[str, Any]
Answer = Callable[[Message, int], list[Message | bytes]]  # to a query, the nth from 1


def common(name: str, asked: Message, kind: str) -> Message:
    return {
        "message_type": kind, "vac_version": "Vac 03.00.00 vacd-responder", "daemon_version": "Vac 03.00.00 vacd-responder",
        "vacquery_version": "VacQuery 01.03", "cookie": asked["cookie"], "space": asked["space"], "factory": name,
        "site": "batch.example.org", "time_sent": 1767268800,
    }  # fmt: skip


def of_type(name: str, asked: Message, machinetype: str, hs06: float = 10.0, of: int = 1, **more: Any) -> Message:
    return common(name, asked, "machinetype_status") | {
        "num_machinetypes": of, "machinetype": machinetype, "running_hs06": hs06, "running_machines": 1,
        "running_processors": 1.0, "running_cpus": 1.0, "num_before_fizzle": 0, "bytes_per_processor": 2147483648,
        "max_wallclock_seconds": 86400, "max_processors": 1, "shutdown_message": None, "shutdown_time": None,
        "shutdown_machine": None,
    } | more  # fmt: skip


def types(*names: str) -> Callable[[str], Answer]:
    """A factory that tells of these types."""
    return lambda name: lambda asked, nth: [of_type(name, asked, one, of=len(names)) for one in names]


class Peer(asyncio.DatagramProtocol):
    def __init__(self, answer: Answer, delay: float = 0.0) -> None:
        self.answer, self.delay = answer, delay
        self.asked: list[Message] = []
        self.transport: asyncio.DatagramTransport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        asked = json.loads(data)
        self.asked.append(asked)
        for message in self.answer(asked, len(self.asked)):
            packet = message if isinstance(message, bytes) else json.dumps(message).encode()
            if self.delay:
                asyncio.get_running_loop().call_later(self.delay, self.transport.sendto, packet, address)
            else:
                self.transport.sendto(packet, address)


def free_port(*hosts: str) -> int:
    """A UDP port that is free at all of these."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as first:
            first.bind((hosts[0], 0))
            port: int = first.getsockname()[1]
        try:
            for host in hosts:
                with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as sock:
                    sock.bind((host, port))
        except OSError:
            continue
        return port


@asynccontextmanager
async def peers(port: int, answers: dict[str, Answer], delay: float = 0.0) -> AsyncIterator[dict[str, Peer]]:
    """Factories by their addresses, until the end of the context."""
    loop = asyncio.get_running_loop()
    made = {}
    try:
        for host, answer in answers.items():
            _, made[host] = await loop.create_datagram_endpoint(
                lambda answer=answer: Peer(answer, delay),
                local_addr=(host, port),  # type: ignore[misc]
            )
        yield made
    finally:
        for one in made.values():
            one.transport.close()
