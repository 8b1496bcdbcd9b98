"""`belljar monitor serve` and `belljar top`: machines as they live and end, on a page and on a terminal."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from belljar.assembly import Runtime
from belljar.cli.lease.asking import ask
from belljar.cli.monitor import LEDGER, host_metrics, reader
from belljar.cli.parser import Args
from belljar.errors import CommandMissing
from belljar.host.files import private_folder, read_secret, write_whole
from belljar.monitor.live import Host, story
from belljar.monitor.view import Values

HELD = 20.0  # seconds for which the lease service holds a question until there is news


def host_of(args: Args, runtime: Runtime) -> Host:
    """This host, for a verb with LEDGER and --door."""
    read = reader(args, runtime)
    leased = (lambda: leases(args.door)) if args.door.exists() else lambda: iter(())
    return Host(os.uname().nodename, runtime.folders, runtime.machines.events, lambda: read({}), args.window, leased)


def leases(door: Path) -> Iterator[list[Values]]:
    """Machines of all leases, as root or as the service's account may ask."""
    tag = ""
    while True:
        yield ask(door, "usage", all=True, back=1.0)["machines"]
        tag = ask(door, "status", tag=tag, wait=HELD).get("tag", "")


def serve(args: Args, runtime: Runtime) -> None:
    try:
        from belljar.monitor import server
    except ImportError as exc:
        hint = "`pip install 'belljar[monitor]'` in belljar's own environment."
        raise CommandMissing(f"the page: the library {exc.name} is not installed", hint=hint) from exc
    from belljar.monitor.nodes import Remote
    from belljar.service.systemd import serving

    file, end = token_file(args, runtime), server.listening(args.listen)
    token = read_secret(file).decode()
    remotes = [Remote(place, token) for place in args.nodes]
    metrics = server.metrics_app(reader(args, runtime), lambda: host_metrics(runtime))

    async def work() -> None:
        hub = server.Hub(host_of(args, runtime), remotes, lambda id: story(runtime.folders, id))
        app = server.app(hub, server.Access(token), metrics)
        await serving(hub.watch(), server.serve(end, app), reload=hub.ring)

    host, port = end.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"http://{where}/ shows numbers to everybody; names and consoles take the token in {file}", flush=True)
    asyncio.run(work())


def token_file(args: Args, runtime: Runtime) -> Path:
    """Made where it is not there."""
    file: Path = args.token_file or private_folder(runtime.folders.store / "monitor") / "token"
    if not args.token_file and not file.exists():
        write_whole(file, secrets.token_urlsafe(24).encode() + b"\n")
    return file
