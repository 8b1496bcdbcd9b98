"""Dask: a cluster whose workers are machines, each with a user network.

    with MachineCluster(2, memory="2G") as cluster, distributed.Client(cluster) as client:
        client.submit(pow, 2, 5).result()

A worker connects to the scheduler at an address of this host, which the site lets machines reach (`network.allow`). Connections to a
worker come to a port of that address, and are carried into its machine: so workers reach each other, too.
https://distributed.dask.org/en/stable/adaptive.html, `distributed.deploy.spec`
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any, Unpack

from distributed import Scheduler, SpecCluster
from distributed.deploy.spec import ProcessInterface
from distributed.utils import get_ip

from belljar import api
from belljar.adapters.environment import environment
from belljar.errors import BelljarError
from belljar.model import Share

logger = logging.getLogger(__name__)
PORT = 8788  # of the worker, in its guest
CONNECT = f"""
import socket, threading
there, out = socket.create_connection(("127.0.0.1", {PORT})), open(1, "wb")
def send():
    with open(0, "rb", 0) as source:
        while data := source.read(65536):
            there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while data := there.recv(65536):
    out.write(data)
    out.flush()
"""


class Sent:
    """A connection's way back, as a command's output."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()


class MachineWorker(ProcessInterface):  # type: ignore[misc]
    """A worker in a machine with these options of `belljar.api.start`."""

    def __init__(self, scheduler: str, name: object, host: str, nthreads: int, options: api.Options) -> None:
        super().__init__(name=name)
        self._scheduler, self._name, self._host, self._nthreads = scheduler, name, host, nthreads
        self._options, self._is_closing = options, False
        self._machine: api.Machine | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, self._host, 0)
        port = self._server.sockets[0].getsockname()[1]
        argv = [sys.executable, "-m", "distributed.cli.dask_worker", self._scheduler, "--name", str(self._name)]
        argv += ["--no-nanny", "--no-dashboard", "--nthreads", str(self._nthreads), "--local-directory", "/tmp"]
        argv += ["--listen-address", f"tcp://127.0.0.1:{PORT}", "--contact-address", f"tcp://{self._host}:{port}"]
        shares = (*self._options.get("shares", ()), Share(environment(), environment()))
        options: api.Options = {"network": "user", **self._options, "shares": shares}
        self._machine = await api.astart(argv, tied=True, **options)
        self._end = asyncio.create_task(self._finish(self._machine))
        await super().start()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._machine is not None
        try:
            await self._machine.acarry([sys.executable, "-IS", "-c", CONNECT], api.Streams(reader, Sent(writer), None))
        except (BelljarError, OSError):  # the machine has ended
            pass
        finally:
            writer.close()

    async def _finish(self, machine: api.Machine) -> None:
        outcome = await machine.await_end()
        if not self._is_closing:
            logger.warning("worker %s: its machine %s ended: %s", self._name, outcome.id, outcome.reason)
        await super().close()

    async def close(self) -> None:
        """Return when its machine is gone."""
        self._is_closing = True
        if self._machine is not None:
            self._machine.release()
            await self._end
        if self._server is not None:
            self._server.close()
        await super().close()


class MachineCluster(SpecCluster):  # type: ignore[misc]
    """*workers* machines with *nthreads* threads each. *host*: the address of this host that they can reach."""

    def __init__(
        self, workers: int = 1, *, nthreads: int = 1, host: str = "", asynchronous: bool = False, **options: Unpack[api.Options]
    ) -> None:  # fmt: skip
        host = host or get_ip()
        facts: dict[str, Any] = {"host": host, "nthreads": nthreads, "options": options}
        worker = {"cls": MachineWorker, "options": facts}
        super().__init__(
            workers=dict.fromkeys(range(workers), worker), worker=worker, asynchronous=asynchronous,
            scheduler={"cls": Scheduler, "options": {"host": host, "dashboard": False, "port": 0}},
        )  # fmt: skip
