"""Dask: a cluster whose workers are machines, each with a user network. Run it in a virtual environment with distributed and belljar,
which the machines share.

    with MachineCluster(2, memory="2G") as cluster, distributed.Client(cluster) as client:
        client.submit(pow, 2, 5).result()

A worker connects to the scheduler at an address of this host, which the site lets machines reach (`network.allow`). A worker's
port is published at that address (`network.publish`), so workers reach each other, too.
https://distributed.dask.org/en/stable/adaptive.html, `distributed.deploy.spec`
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import Any, Unpack

from distributed import Scheduler, SpecCluster
from distributed.deploy.spec import ProcessInterface
from distributed.utils import get_ip

from belljar import api
from belljar.model import Share

logger = logging.getLogger(__name__)
PORT = 8788  # of the worker, in its guest


class MachineWorker(ProcessInterface):  # type: ignore[misc]
    """A worker in a machine with these options of `belljar.api.start`."""

    def __init__(self, scheduler: str, name: object, host: str, nthreads: int, options: api.Options) -> None:
        super().__init__(name=name)
        self._scheduler, self._name, self._host, self._nthreads = scheduler, name, host, nthreads
        self._options, self._is_closing = options, False
        self._machine: api.Machine | None = None

    async def start(self) -> None:
        with socket.create_server((self._host, 0)) as probe:
            port = probe.getsockname()[1]
        argv = [sys.executable, "-m", "distributed.cli.dask_worker", self._scheduler, "--name", str(self._name)]
        argv += ["--no-nanny", "--no-dashboard", "--nthreads", str(self._nthreads), "--local-directory", "/tmp"]
        argv += ["--listen-address", f"tcp://127.0.0.1:{PORT}", "--contact-address", f"tcp://{self._host}:{port}"]
        shares = (*self._options.get("shares", ()), Share(sys.prefix, sys.prefix))
        ports = (*self._options.get("ports", ()), api.Port(PORT, port, self._host))
        options: api.Options = {"network": "user", **self._options, "shares": shares, "ports": ports}
        self._machine = await api.astart(argv, tied=True, **options)
        self._end = asyncio.create_task(self._finish(self._machine))
        await super().start()

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
