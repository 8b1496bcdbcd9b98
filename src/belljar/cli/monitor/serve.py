"""`belljar monitor serve`: machines as they live and end, on a page."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from belljar.assembly import Runtime
from belljar.cli.lease.asking import DOOR, ask
from belljar.cli.monitor import LEDGER, host_metrics, reader
from belljar.cli.parser import Args
from belljar.errors import BelljarError, LibraryMissing
from belljar.host.files import private_folder, read_secret, write_whole
from belljar.jobs.users import asked_as, users_of
from belljar.model import to_json
from belljar.monitor.live import Host, living, paths_of, story
from belljar.monitor.nodes import Remote
from belljar.monitor.view import Machine, Values
from belljar.reading import from_json
from belljar.records import replace

MOST, LARGEST = 500, 4096  # of one user: machines; characters of one
HELD = 20.0  # seconds for which the lease service holds a question until there is news


def host_of(args: Args, runtime: Runtime) -> Host:
    """This host, for a verb with LEDGER and --door."""
    read, folders = reader(args, runtime), runtime.folders
    leased = (lambda: leases(args.door)) if args.door.exists() else lambda: iter(())
    return Host(os.uname().nodename, folders.store, lambda: look(runtime), lambda: read({}), leased)


def look(runtime: Runtime) -> tuple[list[Machine], set[Path]]:
    """The machines that live on this host, for root those of all its users, and the paths by which a change shows."""
    node = runtime.settings.paths.node
    machines, paths = living(runtime.machines.living()), {node} if node else set[Path]()
    paths |= paths_of(runtime.folders, machines)
    for user in users_of(runtime):
        theirs, rows = list[Machine](), list[object]()
        with suppress(BelljarError):
            rows = asked_as(
                runtime, user, lambda theirs: to_json(living(theirs.machines.living())), what="list machines"
            )
        for row in rows[:MOST] if isinstance(rows, list) else ():
            with suppress(ValueError):  # a user may say anything
                theirs += [replace(from_json(Machine, row), user=user.name)] if len(str(row)) < LARGEST else []
        paths |= paths_of(runtime.of_user(user.uid, user.home).folders, theirs)
        machines += theirs
    return machines, paths


def tell(runtime: Runtime, id: str) -> Values | None:
    """A machine's story, whichever user of this node has it."""
    for user in (None, *users_of(runtime)):
        with suppress(BelljarError):
            told = asked_as(runtime, user, lambda theirs: story(theirs.folders, id), what="read records")
            if isinstance(told, dict):
                return told
    return None


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
        raise LibraryMissing(f"the page: the library {exc.name} is not installed") from exc
    from belljar.monitor.metrics import Tally, collected
    from belljar.service.systemd import serving

    file, end = token_file(args, runtime), server.listening(args.listen)
    token = read_secret(file).decode()
    metrics = collected(Tally(reader(args, runtime)), lambda: host_metrics(runtime))

    async def work() -> None:
        hub = server.Hub(host_of(args, runtime), [Remote(place, token) for place in args.nodes])
        app = server.app(hub, server.Access(token), lambda id: tell(runtime, id), metrics)
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


SEEN = f"""{LEDGER}
{DOOR}"""
SERVE = f"""# serve | show a page and metrics: numbers to everybody who reaches the port, names and consoles to those with the token
--listen ADDRESS:PORT =127.0.0.1:9180 | where; beyond this host, put a server with TLS in front
--token-file FILE | with the token, mode 0600; default: monitor/token below `paths.store`, made where it is missing
--node URL * @nodes | another node's monitor, which has the same token: [NAME=]http://HOST:9180
{SEEN}
"""
