"""Two hosts with a pilot each, and a third for who tells them what to do: network namespaces with a bridge between them.

    h1 10.88.0.1 ----+
    h2 10.88.0.2 ----+---- br0 10.88.0.9   desk

Pilots are the `belljar pilot` of a site, in folders of their own; the desk is the service's channel and the orders of this test.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.live.conftest import Belljar
from tests.live.net_lab import ip

from belljar.host.files import write_whole
from belljar.lease import Do, Instance, Lease, Order, Report, Settings, Slot, Tell, Wanted
from belljar.lease.decisions.case import Case
from belljar.lease.jobfile import JobFile
from belljar.lease.network import address_of, placed
from belljar.lease.orders import MachineOrder
from belljar.lease.protocol import lease_key
from belljar.lease.service.channel import Channel
from belljar.model import MIB, dumps
from belljar.service.credentials.certificates import own_certificate

LEASE = "r-00000000000000001"
SITE_KEY = b"k" * 32
PORT = 8470
SETTINGS = Settings(networks=(("private", "private"),))


class TwoHosts:
    """Begun by `up`, once for each lease that is wanted."""

    def __init__(self, folder: Path, image: str, lease: str = LEASE, port: int = PORT) -> None:
        tag = os.urandom(3).hex()
        self.folder, self.image, self.lease, self.port = folder, image, lease, port
        self.desk, self.names = f"bjd{tag}", (f"bjx{tag}", f"bjy{tag}")
        self.hosts = [Belljar(folder / name) for name in ("h1", "h2")]
        self.pilots: list[subprocess.Popen[bytes]] = []
        self.talk: subprocess.Popen[str] | None = None
        for name in (self.desk, *self.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", self.desk, "link", "add", "br0", "type", "bridge")
        ip("-n", self.desk, "addr", "add", "10.88.0.9/24", "dev", "br0")
        ip("-n", self.desk, "link", "set", "br0", "up", "promisc", "on")
        for number, name in enumerate(self.names, 1):
            ip("-n", name, "link", "add", "out", "type", "veth", "peer", "name", f"h{number}", "netns", self.desk)
            ip("-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "out")
            ip("-n", name, "link", "set", "out", "up")
            ip("-n", self.desk, "link", "set", f"h{number}", "master", "br0", "up")

    def inside(self, name: str, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", name, *argv]

    def up(self, state: str = "running") -> TwoHosts:
        """A machine on each host is in this state."""
        pem = self.folder / f"{self.port}.pem"
        pin = own_certificate(pem, ("10.88.0.9",))
        job = JobFile(
            self.lease, 1, 2, (f"10.88.0.9:{self.port}",), pin, lease_key(SITE_KEY, self.lease).hex(), deadline=900.0,
            claim=60.0, barrier=60.0, grace=5.0, notice=10.0, report=1.0, heartbeat=2.0, ports="8480-8489",
        )  # fmt: skip
        file = self.folder / self.lease
        write_whole(file, dumps(job) + b"\n")
        argv = (sys.executable, "-m", "tests.live.pilots_lab", str(pem), str(self.port), self.lease, self.image)
        root = Path(__file__).parents[2]
        self.talk = subprocess.Popen(
            self.inside(self.desk, *argv), cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.heard("ready")
        for rank, host in enumerate(self.hosts):
            words = self.inside(self.names[rank], *map(str, host.argv("pilot", str(file), "--rank", str(rank))))
            self.pilots.append(subprocess.Popen(words, env=host.env, stdin=subprocess.DEVNULL))
        for _ in self.hosts:
            self.heard(state)
        return self

    def heard(self, what: str) -> str:
        """The next line of the desk's that begins so."""
        assert self.talk is not None and self.talk.stdout is not None
        for line in self.talk.stdout:
            if line.startswith(what):
                return line
        raise AssertionError(f"the desk ended before {what!r}")

    def machine(self, number: int) -> str:
        (found,) = self.hosts[number].machines()
        return found

    def exec(self, number: int, *argv: str, timeout: float = 120) -> str:
        """In the machine of this host."""
        done = self.hosts[number]("exec", self.machine(number), "--", *argv, timeout=timeout)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def release(self) -> None:
        assert self.talk is not None and self.talk.stdin is not None
        self.talk.stdin.write("release\n")
        self.talk.stdin.flush()
        for pilot in self.pilots:
            pilot.wait(60)

    def sockets(self, number: int) -> str:
        """That anybody listens at on this host."""
        argv = self.inside(self.names[number], "ss", "-Hltn")
        return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout

    def connections(self, number: int) -> str:
        return ip("netns", "exec", self.names[number], "ss", "-Htn", "state", "established")

    def links(self, number: int) -> list[str]:
        shown = json.loads(ip("-n", self.names[number], "-j", "link"))
        return sorted(one["ifname"] for one in shown)

    def groups(self, number: int) -> list[str]:
        """Sockets of isolated groups."""
        return sorted(str(path.name) for path in self.hosts[number].run_folder.glob("networks/*/*"))

    def close(self) -> None:
        for process in (*self.pilots, self.talk):
            if process is not None:
                if process.poll() is None:
                    process.kill()
                process.wait(20)
        if self.talk is not None:
            for pipe in (self.talk.stdin, self.talk.stdout):
                assert pipe is not None
                pipe.close()
        for host in self.hosts:
            host.close()
        for name in (self.desk, *self.names):
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=30)


# -- the desk ----------------------------------------------------------------------------------------------------------


class Desk:
    """Orders a machine on each of two slots, once both have come."""

    def __init__(self, lease: str, image: str) -> None:
        self.lease, self.image = lease, image
        self.slots: dict[int, Slot] = {}
        self.numbers: dict[tuple[str, str], int] = {}
        self.channel = Channel(SITE_KEY, self.applied, self.hear, lambda: None, lambda *a, **k: None, 10.0)

    async def applied(self, slot: str, pilot: str) -> int:
        return self.numbers.get((slot, pilot), 0)

    async def hear(self, report: Report) -> Iterable[Order]:
        self.numbers[report.slot, report.pilot] = max(report.seq, self.numbers.get((report.slot, report.pilot), 0))
        if report.state is not None:
            print(report.state.value, report.instance, report.why, flush=True)
        if report.tell is not Tell.HELLO or report.facts is None:
            return ()
        self.slots[report.rank] = Slot(self.lease, 1, report.rank, report.pilot, facts=report.facts)
        if len(self.slots) == 2:
            asyncio.get_running_loop().call_later(0.5, self.begin)
        return (Order(Do.WAIT),)

    def begin(self) -> None:
        lease = Lease(self.lease, "ada", Wanted(self.image, 2, network="private"))
        slots = tuple(self.slots[rank] for rank in (0, 1))
        case = Case(
            lease,
            tuple(
                Instance(
                    f"i-{one.rank}",
                    lease.id,
                    one.rank,
                    "ada",
                    slot=one.id,
                    address=address_of(SETTINGS, "private", one.rank),
                )
                for one in slots
            ),
            slots,
        )
        for one in slots:
            name = f"i-{one.rank}"
            order = placed(MachineOrder(self.image, memory=512 * MIB, hostname=name), case, name, SETTINGS)
            self.channel.order(one.id, Order(Do.GO))
            self.channel.order(one.id, Order(Do.START, name, dumps(order).decode()))


async def serve(pem: Path, port: int, lease: str, image: str) -> None:
    desk = Desk(lease, image)
    server = await desk.channel.serve("", port, pem)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        for slot in desk.slots.values():
            desk.channel.order(slot.id, Order(Do.RELEASE))
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]))
