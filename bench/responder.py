"""What a flood costs a responder: packets a second from processes of their own, on loopback, while the event loop does other work and
decides about a space of 500 factories ten times a second.

    python bench/responder.py [--rate 10000] [--seconds 10]

Told for each kind of flood: packets taken and answers sent a second, the part of one processor that the responder's process used,
the longest and the usual lateness of a task that wants a turn each 10 ms, how many decisions were made and when the latest of them was
done, and how many of a friend's questions were answered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from decide import case

from belljar.vacuum import MachineStatus, Mode, Space, TypeStatus
from belljar.vacuum.protocol.query import Snapshot
from belljar.vacuum.protocol.responder import responding

HOST, SPACE = "127.0.6.1", "vac02.example.org"
NOW = int(time.time())
SLOTS = tuple(
    MachineStatus(HOST, f"m-{n:02}", "Running", "atlas", "u", "vm-raw", NOW, NOW, NOW, 1, 1, 1.0, 10.0)
    for n in range(64)
)
TYPES = tuple(TypeStatus(HOST, name, 100.0, 10, 10.0) for name in ("atlas", "lhcb", "cms", "alice", "gridpp"))
TOLD = Snapshot(SPACE, HOST, "", SLOTS, TYPES)
TICK, EACH = 0.01, 0.1
FLOODER = """
import itertools, socket, sys, time
host, port, rate, seconds, senders, data = sys.argv[1], *map(float, sys.argv[2:5]), int(sys.argv[5]), sys.argv[6].encode()
socks = []
for n in range(senders):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((f"127.1.{n // 250}.{n % 250 + 1}", 0))
    sock.setblocking(False)
    socks.append(sock)
turns, began, sent = itertools.cycle(socks), time.monotonic(), 0
while (spent := time.monotonic() - began) < seconds:
    while sent < spent * rate:
        next(turns).sendto(data, (host, int(port)))
        sent += 1
    time.sleep(0.001)
print(sent)
"""


def question(word: str) -> str:
    return json.dumps({"message_type": word, "space": SPACE, "cookie": "5be1" * 16})


def flood(words: tuple[str, ...]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE, text=True)


async def measure(name: str, data: str, senders: int, rate: float, seconds: float) -> None:
    space = Space(SPACE, HOST, (HOST,), port=19951, allow=("127.0.0.0/8",))
    async with responding(space, lambda: TOLD, lambda *_, **__: None) as there:
        words = (FLOODER, HOST, str(space.port), str(rate), str(seconds), str(senders), data)
        flooder = flood(words) if data else None
        late, before = [], resource.getrusage(resource.RUSAGE_SELF)
        friend, decider, decided = asyncio.create_task(ask_on(space.port)), case(500, Mode.IMPROVED, 1), list[float]()
        deciding = asyncio.create_task(decide_on(decider, decided))
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            wanted = time.monotonic() + TICK
            await asyncio.sleep(TICK)
            late.append(1000 * (time.monotonic() - wanted))
        friend.cancel()
        deciding.cancel()
        after = resource.getrusage(resource.RUSAGE_SELF)
        sent = int(flooder.communicate()[0]) if flooder else 0
        asked, answered = await friend
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    taken = there.counts["answered"] + sum(
        n for why, n in there.counts.items() if why not in ("answered", "sent", "unsent")
    )
    print(
        f"{name:<34} {sent / seconds:>8.0f} sent/s  {taken / seconds:>8.0f} taken/s  {there.counts['sent'] / seconds:>8.0f} answers/s"
        f"  {100 * used / seconds:>5.1f} % of a processor  late {statistics.median(late):.1f} ms, at most {max(late):.1f} ms"
        f"  {len(decided)} decisions, done after {1000 * max(decided):.0f} ms at most  friend {answered}/{asked}"
    )


async def decide_on(decider: Callable[[], float], decided: list[float]) -> None:
    """A decision each 100 ms; for each the time from when it was due until it was made."""
    due = time.monotonic()
    while True:
        decider()
        decided.append(time.monotonic() - due)
        due += EACH
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def ask_on(port: int) -> tuple[int, int]:
    """A question each 100 ms from an address of its own; (asked, answered whole within a second)."""
    loop, asked, answered = asyncio.get_running_loop(), 0, 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.2.0.1", 0))
        sock.setblocking(False)
        try:
            while True:
                sock.sendto(question("machinetypes_query").encode(), (HOST, port))
                asked += 1
                try:
                    async with asyncio.timeout(1):
                        for _ in TYPES:
                            await loop.sock_recv(sock, 10240)
                    answered += 1
                except TimeoutError:
                    pass
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            return asked - 1, min(answered, asked - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=10_000)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    cases: list[tuple[str, str, int]] = [
        ("nothing", "", 1),
        ("rubbish, one sender", "rubbish " * 20, 1),
        ("rubbish, 1000 senders", "rubbish " * 20, 1000),
        ("of another space, 1000 senders", question("machines_query").replace("vac02", "vac03"), 1000),
        ("machines (64 slots), one sender", question("machines_query"), 1),
        ("types (5), 1000 senders", question("machinetypes_query"), 1000),
    ]
    for name, data, senders in cases:
        asyncio.run(measure(name, data, senders, args.rate, args.seconds))


if __name__ == "__main__":
    main()
