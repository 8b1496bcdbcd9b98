"""A user network, guarded and open, and networks between two machines: connections begun, datagrams answered, MB/s of a stream each way.

Root alone: guests and server are in two network namespaces of the benchmark's own. A guest does one after the other; the
host's load is in all figures, so compare them within one run. Of two machines one is the server: on a bridge, in an isolated group,
and in two parts of a group that two processes carry by TLS, as the pilots of a lease do on two hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from common import parser, progress, publish, table

Found = dict[str, float]  # per second, by kind

CASES = ("guarded", "open")
PAIRS = {
    "bridge": ("bridge:br0@10.98.0.1", "bridge:br0@10.98.0.2"),
    "isolated": ("isolated:bench@10.98.0.1", "isolated:bench@10.98.0.2"),
    "two hosts": ("isolated:bench+0@10.98.0.1", "isolated:bench+1@10.98.0.2"),
}
BRIDGE = {"BELLJAR_NETWORK_BRIDGES": "br0", "BELLJAR_NETWORK_BRIDGE_ADDRESSES": "10.98.0.1-10.98.0.9/24"}
KINDS = ("connections", "datagrams", "up", "down")
ADDRESS, PORT = "203.0.113.1", 8080  # RFC 5737
# A byte says what a connection is for: c closes, u takes until the end and says so, d gives as much as it is asked for.
SERVER = """
import socket, threading
server = socket.create_server(("0.0.0.0", 8080), backlog=1000)
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("0.0.0.0", 8080))
def answer():
    while True:
        data, sender = echo.recvfrom(2048)
        echo.sendto(data, sender)
def serve(one):
    with one:
        what = one.recv(1)
        if what == b"u":
            while one.recv(1 << 20):
                pass
            one.sendall(b".")
        elif what == b"d":
            left, piece = int(one.recv(20)), bytes(1 << 20)
            while left > 0:
                one.sendall(piece)
                left -= len(piece)
threading.Thread(target=answer, daemon=True).start()
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
GUEST = """
import json, socket, sys, time
place, count, size = (sys.argv[1], 8080), int(sys.argv[2]), int(sys.argv[3]) << 20
def timed(work):
    begin = time.monotonic()
    work()
    return time.monotonic() - begin
def connect():
    for _ in range(count):
        with socket.create_connection(place, timeout=60) as one:
            one.sendall(b"c")
            one.recv(1)
def ask():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.settimeout(60)
        for _ in range(count):
            one.sendto(b"?", place)
            one.recv(100)
def up():
    with socket.create_connection(place, timeout=60) as one:
        one.sendall(b"u")
        for _ in range(size >> 20):
            one.sendall(bytes(1 << 20))
        one.shutdown(socket.SHUT_WR)
        one.recv(1)
def down():
    with socket.create_connection(place, timeout=60) as one:
        one.sendall(b"d")
        one.sendall(b"%19d " % size)
        while one.recv(1 << 20):
            pass
ask()
print(json.dumps({"connections": count / timed(connect), "datagrams": count / timed(ask), "up": size / 1e6 / timed(up), "down": size / 1e6 / timed(down)}))
"""


# What a pilot has for the network of its lease's machines, of which this process has the first or the second.
CARRIER = """
import asyncio, json, sys
from pathlib import Path
from belljar.lease.jobfile import JobFile
from belljar.lease.network.trunk import Trunk
from belljar.lease.orders import MachineOrder, Peer, Reach
async def carry(rank, folder):
    job = JobFile("bench", 1, 2, ("127.0.0.1:1",), "0" * 64, "5a" * 32, 60.0, 5.0, 5.0, 5.0, 5.0, ports="0")
    trunk = Trunk(job, rank, lambda: folder, lambda *words, **facts: None)
    own = folder / ("carrier%d" % rank)
    own.mkdir(exist_ok=True)
    reach = await trunk.open(own)
    print(json.dumps([reach.at, reach.pin]), flush=True)
    peer = Peer(1 - rank, Reach(*json.loads(await asyncio.to_thread(sys.stdin.readline))), (2 - rank,))
    trunk.join(MachineOrder("", network="isolated:bench+%d@" % rank, peers=(peer,)))
    await asyncio.to_thread(sys.stdin.readline)
    await trunk.works.end()
asyncio.run(carry(int(sys.argv[1]), Path(sys.argv[2])))
"""


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--count", type=int, default=200, help="connections and datagrams (default: %(default)s)")
    arguments.add_argument("--mib", type=int, default=16, help="size of a stream (default: %(default)s)")
    arguments.add_argument("--only", choices=("world", "pairs"), help="user networks, or those between two machines")
    args = arguments.parse_args()
    if os.geteuid() != 0:
        print("not measured: network namespaces are made by root")
        return
    with namespaces() as (host, _), tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        if args.only != "pairs":
            world = measured(args, host, CASES, lambda name: to_the_world(args, host, name))
        if args.only != "world":
            add_bridge(host)
            pairs = measured(args, host, tuple(PAIRS), lambda name: to_another(args, host, name, Path(folder)))
    result = {"benchmark": "networks"}
    if args.only != "pairs":
        result |= told(world, "guarded")
    if args.only != "world":
        result |= {"pairs": told(pairs, "bridge")}
    publish(args, result)


def measured(
    args: argparse.Namespace, host: str, cases: tuple[str, ...], once: Callable[[str], Found]
) -> dict[str, list[Found]]:
    """Each case in turn, as often as is wanted."""
    found: dict[str, list[Found]] = {name: [] for name in cases}
    for number in range(args.runs):
        for name in cases:
            found[name].append(once(name))
        progress(f"round {number + 1} of {args.runs}")
    progress("")
    return found


def told(found: dict[str, list[Found]], base: str) -> dict[str, object]:
    """A table of medians, and each beside that of one."""
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in KINDS} for name, rounds in found.items()
    }
    ratios = {name: {key: value / medians[base][key] for key, value in one.items()} for name, one in medians.items()}
    head = (
        "network",
        "connections/s",
        "datagrams/s",
        "MB/s up",
        "MB/s down",
        *(f"{kind}, of {base}" for kind in KINDS),
    )
    rows = [(name, *(medians[name][kind] for kind in KINDS), *(ratios[name][kind] for kind in KINDS)) for name in found]
    table(head, rows)
    return {"per_second": medians, f"of_{base}": ratios, "rounds": found}


def to_the_world(args: argparse.Namespace, host: str, egress: str) -> Found:
    env = {**os.environ, "BELLJAR_NETWORK_EGRESS": egress}
    run = [args.belljar, "run", "--image", args.image, "--network", "user", "--", "python3", "-c", GUEST]
    return asked([*inside(host), *run, ADDRESS, str(args.count), str(args.mib)], env)


def to_another(args: argparse.Namespace, host: str, name: str, folder: Path) -> Found:
    env = {**os.environ, **BRIDGE, "BELLJAR_PATHS_RUN": str(folder)}
    first, second = (
        [*inside(host), args.belljar, "run", "--image", args.image, "--network", one] for one in PAIRS[name]
    )
    with carriers(host, folder) if name == "two hosts" else nullcontext():
        argv = [*first, "--", "python3", "-c", SERVER]
        with subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None and server.stdout.readline() == "ready\n"
                argv = [*second, "--", "python3", "-c", GUEST, "10.98.0.1", str(args.count), str(args.mib)]
                return asked(argv, env)
            finally:
                server.terminate()


def asked(argv: list[str], env: dict[str, str]) -> Found:
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    found: Found = json.loads(done.stdout)
    return found


@contextmanager
def carriers(host: str, folder: Path) -> Iterator[None]:
    """Both parts of a group, each with a process that carries its frames to the other."""
    both = [
        subprocess.Popen(
            [*inside(host), sys.executable, "-c", CARRIER, str(rank), str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        places = [one.stdout.readline() for one in both if one.stdout is not None]
        for one, place in zip(both, reversed(places), strict=True):
            assert one.stdin is not None
            one.stdin.write(place)
            one.stdin.flush()
        yield
    finally:
        for one in both:
            one.communicate("end\n", timeout=30)


def add_bridge(host: str) -> None:
    ip("-n", host, "link", "add", "br0", "type", "bridge")
    ip("-n", host, "link", "set", "br0", "up")


def inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """The host's and the world's, with a cable between them and a server in the world."""
    tag = os.urandom(3).hex()
    host, world = f"bjh{tag}", f"bjw{tag}"
    try:
        for name in (host, world):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", host, "link", "add", "out", "type", "veth", "peer", "name", "in", "netns", world)
        for name, card, last in ((host, "out", 2), (world, "in", 1)):
            ip("-n", name, "addr", "add", f"203.0.113.{last}/24", "dev", card)
            ip("-n", name, "link", "set", card, "up")
        ip("-n", host, "route", "add", "default", "via", ADDRESS)
        argv = ["ip", "netns", "exec", world, sys.executable, "-c", SERVER]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "ready\n"
            yield host, world
            server.kill()
    finally:
        for name in (host, world):
            subprocess.run(["ip", "netns", "delete", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()
