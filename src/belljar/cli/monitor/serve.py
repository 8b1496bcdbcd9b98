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
from belljar.errors import BelljarError, CommandMissing
from belljar.host.files import private_folder, read_secret, write_whole
from belljar.jobs.users import LOOK_TIMEOUT, asked_as, users_of
from belljar.journal import JOURNAL
from belljar.monitor.live import ID, Host, Living, story
from belljar.monitor.nodes import Remote
from belljar.monitor.view import BLANK, Values

TEXTS = ("id", "name", "image", "requester", "start", "state")
MOST, LONGEST, PHASES = 500, 200, 20  # of one user: machines; characters of a word, phases of a machine
DAY = 86400.0  # machines that ended are counted for so long
HELD = 20.0  # seconds for which the lease service holds a question until there is news


def host_of(args: Args, runtime: Runtime) -> Host:
    """This host, for a verb with LEDGER and --door."""
    read = reader(args, runtime)
    leased = (lambda: leases(args.door)) if args.door.exists() else lambda: iter(())
    return Host(
        os.uname().nodename, runtime.folders, runtime.machines.events, lambda: read({}), DAY, leased, lambda: others(runtime)
    )  # fmt: skip


def others(runtime: Runtime) -> tuple[list[Values], set[Path]]:
    """Machines of this node's other users, as they say themselves, and what changes when these do."""
    machines, users, host = list[Values](), users_of(runtime), os.uname().nodename
    paths = {runtime.settings.paths.node or Path("/")} if users else set[Path]()
    for user in users:
        folders, found = runtime.of_user(user.uid, user.home).folders, []
        paths.add(folders.machines)
        with suppress(BelljarError):
            found = asked_as(
                runtime,
                user,
                lambda theirs: Living(host, theirs.folders).read()[-MOST:],
                timeout=LOOK_TIMEOUT,
                what="list machines",
            )
        for machine in found if isinstance(found, list) else ():
            with suppress(LookupError, TypeError, ValueError, OverflowError):  # a user may say anything
                texts = {key: str(machine[key])[:LONGEST] for key in TEXTS} | {"user": user.name, "node": host}
                phases = [
                    (str(name)[:LONGEST], int(1000 * moment) / 1000) for name, moment in machine["phases"][-PHASES:]
                ]
                sizes = {key: int(machine[key]) for key in ("cpus", "memory")}
                machines.append({**BLANK, **texts, **sizes, "phases": phases})
                paths |= {folders.machine(texts["id"]) / JOURNAL} if ID.fullmatch(texts["id"]) else set()
    return machines, paths


def tell(runtime: Runtime, id: str) -> Values | None:
    """Its story, whichever user of this node has it."""
    found = story(runtime.folders, id)
    for user in users_of(runtime) if found is None and ID.fullmatch(id) else ():
        with suppress(BelljarError):
            told = asked_as(
                runtime, user, lambda theirs: story(theirs.folders, id), timeout=LOOK_TIMEOUT, what="tell of a machine"
            )
            found = told if isinstance(told, dict) else found
    return found


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
        hint = "In a checkout: `make install EXTRAS=monitor`."
        raise CommandMissing(f"the page: the library {exc.name} is not installed", hint=hint) from exc
    from belljar.monitor.metrics import Tally, collected
    from belljar.service.systemd import serving

    file, end = token_file(args, runtime), server.listening(args.listen)
    token = read_secret(file).decode()
    remotes = [Remote(place, token) for place in args.nodes]
    metrics = collected(Tally(reader(args, runtime)), lambda: host_metrics(runtime))

    async def work() -> None:
        hub = server.Hub(host_of(args, runtime), remotes, lambda id: tell(runtime, id))
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


SEEN = f"""{LEDGER}
{DOOR}"""
SERVE = f"""# serve | show a page and metrics: numbers to everybody who reaches the port, names and consoles to those with the token
--listen ADDRESS:PORT =127.0.0.1:9180 | where; beyond this host, put a server with TLS in front
--token-file FILE | with the token, mode 0600; default: monitor/token below `paths.store`, made where it is missing
--node URL * @nodes | another node's monitor, which has the same token: [NAME=]http://HOST:9180
{SEEN}
"""
