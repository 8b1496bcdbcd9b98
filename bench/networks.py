"""A user network, guarded and open: connections begun, datagrams answered, MB/s of a stream each way.

Root alone: guests and server are in two network namespaces of the benchmark's own. A guest does one after the other; the
host's load is in all figures, so compare them within one run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from common import parser, progress, publish, table

CASES = ("guarded", "open")
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


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--count", type=int, default=200, help="connections and datagrams (default: %(default)s)")
    arguments.add_argument("--mib", type=int, default=16, help="size of a stream (default: %(default)s)")
    args = arguments.parse_args()
    if os.geteuid() != 0:
        print("not measured: network namespaces are made by root")
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with namespaces() as (host, _):
        for number in range(args.runs):
            for name in CASES:
                env = {**os.environ, "BELLJAR_NETWORK_EGRESS": name}
                run = [args.belljar, "run", "--image", args.image, "--network", "user", "--", "python3", "-c", GUEST]
                argv = ["ip", "netns", "exec", host, *run, ADDRESS, str(args.count), str(args.mib)]
                done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
                found[name].append(json.loads(done.stdout))
            progress(f"round {number + 1} of {args.runs}")
    progress("")
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    base = medians["guarded"]
    ratios = {name: {key: value / base[key] for key, value in one.items()} for name, one in medians.items()}
    kinds = ("connections", "datagrams", "up", "down")
    head = (
        "network",
        "connections/s",
        "datagrams/s",
        "MB/s up",
        "MB/s down",
        *(f"{kind}, of guarded" for kind in kinds),
    )
    table(
        head,
        [(name, *(medians[name][kind] for kind in kinds), *(ratios[name][kind] for kind in kinds)) for name in CASES],
    )
    publish(args, {"benchmark": "networks", "per_second": medians, "of_guarded": ratios, "rounds": found})


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
