"""A factory on this host: how long until all of its slots have a machine, against one `belljar run` in the same run; packets it answers
a second meanwhile and afterwards; its processor time when nothing happens. Machines are small, and wait until they are ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from common import parser, publish, seconds, table

ADDRESS = "127.0.0.9"
SETTINGS = """
[space]
name = "bench.example.org"
factories = ["{address}"]
port = {port}
allow = ["127.0.0.0/8"]
[factory]
name = "{address}"
processors = {slots}
memory = "{memory}"
overload = 100000
[machinetype.bench]
share = 1
image = "{image}"
network = "none"
user_data = "{folder}/script"
"""
QUERY = {
    "message_type": "machinetypes_query", "vacquery_version": "VacQuery 01.03", "space": "bench.example.org", "cookie": "c",
}  # fmt: skip


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--slots", type=int, default=64)
    arguments.add_argument("--memory", default="192M", help="of a machine (default: %(default)s)")
    arguments.add_argument("--idle", type=float, default=120.0, help="seconds for the idle factory's processor time")
    args = arguments.parse_args()
    single = min(
        seconds([args.belljar, "run", "--image", args.image, "--memory", args.memory, "--", "true"]) for _ in range(3)
    )
    with tempfile.TemporaryDirectory(prefix="belljar-bench-") as name:
        folder = Path(name)
        (folder / "script").write_text("#!/bin/sh\nexec sleep 100000\n")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.bind((ADDRESS, 0))
            port = sock.getsockname()[1]
        (folder / "vacuum.toml").write_text(
            SETTINGS.format(
                address=ADDRESS, port=port, slots=args.slots, memory=args.memory, image=args.image, folder=folder
            )
        )
        env = {**os.environ, "BELLJAR_HOST_CPUS_PER_CPU": "0"}
        command = [args.belljar, "vacuum", "run", str(folder / "vacuum.toml"), "--state", str(folder / "state")]
        begin = time.perf_counter()
        factory = subprocess.Popen(command, env=env, stdout=open(folder / "log", "wb"))  # noqa: SIM115
        try:
            filling = answers(port, lambda: running(args.belljar) >= args.slots, pause=0.01)
            filled = time.perf_counter() - begin
            full = answers(port, after(10.0))
            before, at = processor_time(factory.pid), time.perf_counter()
            time.sleep(args.idle)
            idle = (processor_time(factory.pid) - before) / (time.perf_counter() - at) * 3600
        finally:
            factory.send_signal(signal.SIGTERM)
            factory.wait()
            for one in ours(args.belljar):
                subprocess.run([args.belljar, "stop", one, "--grace", "0s"], check=False, stdout=subprocess.DEVNULL)
    table(
        ("what", "figure", "unit"),
        [
            ("slots", args.slots, ""), ("one `belljar run -- true`", round(single, 3), "s"),
            ("all slots filled after", round(filled, 1), "s"), ("a slot, in such runs", round(filled / args.slots / single, 2), "x"),
            ("queries answered while it fills (100/s at most)", round(filling), "1/s"), ("queries answered when full", round(full), "1/s"),
            ("processor time of the idle factory", round(idle, 1), "s/h"),
        ],
    )  # fmt: skip
    publish(
        args,
        {
            "benchmark": "vacuum", "slots": args.slots, "run": single, "filled": filled, "answered_filling": filling,
            "answered_full": full, "idle_per_hour": idle,
        },
    )  # fmt: skip


def ours(belljar: str) -> list[str]:
    shown = subprocess.run([belljar, "ps", "--format", "json"], capture_output=True, check=True).stdout
    return [one["id"] for one in json.loads(shown) if one["name"] == "bench" and one["state"] == "running"]


def running(belljar: str) -> int:
    return len(ours(belljar))


def after(length: float):  # type: ignore[no-untyped-def]
    end = time.perf_counter() + length
    return lambda: time.perf_counter() > end


def answers(port: int, until, pause: float = 0.0) -> float:  # type: ignore[no-untyped-def]
    """Queries that were answered in a second, one after the other, until that is so; looked at twice a second."""
    found, begin = 0, time.perf_counter()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(1.0)
        look = begin
        while True:
            if time.perf_counter() - look > 0.5:
                if until():
                    return found / (time.perf_counter() - begin)
                look = time.perf_counter()
            try:
                sock.sendto(json.dumps(QUERY).encode(), (ADDRESS, port))
                sock.recv(65536)
                found += 1
                time.sleep(pause)
            except OSError:
                time.sleep(0.05)  # it does not listen yet


def processor_time(pid: int) -> float:
    facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(facts[11]) + int(facts[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
