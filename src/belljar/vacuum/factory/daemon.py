"""`belljar vacuum run`: a factory with all that belongs to it in one event loop, from its settings to its end.

Reads vacuum.toml, answers VacQuery, asks the other factories, refreshes pipes, obeys HUP (settings again) and the drain order, tells
VacMon, Prometheus and systemd. Machines are none of its children: whatever happens to this process, they go on."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

from belljar import __version__
from belljar.errors import BelljarError, HostError
from belljar.host.files import private_folder, read_secret
from belljar.host.threads import in_thread
from belljar.host.toml import Mistake
from belljar.host.watch import watching
from belljar.records import dataclass, replace
from belljar.service import kept
from belljar.service.datagrams import send_all
from belljar.service.metrics import Metric
from belljar.service.metrics import serve as serve_metrics
from belljar.service.systemd import notify, serving
from belljar.service.telling import Tell
from belljar.vacuum import MachineType, Pipe, Space, TypeStatus
from belljar.vacuum.factory import monitor
from belljar.vacuum.factory.factory import Factory
from belljar.vacuum.factory.keeper import Living, Machines
from belljar.vacuum.factory.materials import make_user_data, renew
from belljar.vacuum.protocol.fields import Status as Told
from belljar.vacuum.protocol.poll import Memory, Poller, remember
from belljar.vacuum.protocol.query import UNSOLICITED, Kind, Snapshot, reply
from belljar.vacuum.protocol.responder import Answering, responding
from belljar.vacuum.settings import copies, pipes, settings

ORDER, PIPES = "drain.json", "pipes"
FRESH = 1.0  # seconds for which an answer to others is the same
FIXED = (  # these need a new process
    "name", "factory", "factories", "port", "listen", "allow", "key_file", "signed_only", "poll_silence", "poll_limit",
)  # fmt: skip


@dataclass(frozen=True)
class Order:
    """What an operator said beside the settings: nothing new is started; all machines are gone by a moment."""

    draining: bool = False
    shutdown_time: float | None = None

    def applied(self, space: Space) -> Space:
        ends = [moment for moment in (space.shutdown_time, self.shutdown_time) if moment is not None]
        return replace(space, draining=space.draining or self.draining, shutdown_time=min(ends, default=None))


def order(folder: Path) -> Order:
    made: Order | None = kept.read(folder / ORDER, Order)
    return made or Order()


def give_order(folder: Path, order: Order) -> None:
    """The factory that works in this folder obeys it at once, and after a restart too."""
    kept.keep(private_folder(folder, mode=0o755) / ORDER, order, durable=True)


async def serve(file: Path, folder: Path, tell: Tell, *, metrics: tuple[str, int] | None = None) -> None:
    """A factory until TERM or INT. Raises BadSetting; HostError where another one works in this folder, or its UDP port is taken."""
    with kept.alone(folder, "factory", mode=0o755):
        await Daemon(file, folder, tell, settings.load(file)).run(metrics)


class Daemon:
    """The factory's surroundings."""

    def __init__(self, file: Path, folder: Path, tell: Tell, space: Space) -> None:
        self._file, self._folder, self._tell = file, folder, tell
        self._settings = space  # as the files have it: without pipes and orders
        self._key = read_secret(space.key_file) if space.key_file else b""
        self._poller = Poller(space, client="vacd-factory", key=self._key)
        self._known: Memory = {}
        self._noted: dict[str, frozenset[str]] = {}  # by event
        self._cached: tuple[float, Snapshot] | None = None
        self.answering: Answering | None = None
        self.factory = Factory(order(folder).applied(space), folder, Machines(space), self._ask, self._user_data, tell)

    async def run(self, metrics: tuple[str, int] | None) -> None:
        space, places = self._settings, self._poller.places
        async with AsyncExitStack() as stack:
            stack.push_async_callback(places.close)
            answering = responding(space, self._snapshot, self._tell, key=self._key, factories=places.hosts)
            self.answering = await stack.enter_async_context(answering)
            stack.enter_context(watching(self._folder, ORDER, self.obey))
            if metrics is not None:
                serve_metrics(*metrics, self._metrics)
            self._tell("factory started", space=space.name, factory=space.factory, version=__version__)
            self._look_here()
            self.obey()
            await serving(self.factory.run(), self._report(), self._renew(), self._refresh(), reload=self.reload)
        self._tell("factory stopped", machines=len(self.factory.living))

    # -- settings ------------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """Obey the settings files as they are now; broken ones change nothing but the status."""
        try:
            space = settings.load(self._file)
            if changed := [key for key in FIXED if getattr(space, key) != getattr(self._settings, key)]:
                what = f"{', '.join(changed)}: is not changed in a running factory"
                raise HostError(what, hint="Restart it: machines go on.")
        except BelljarError as exc:
            self._tell("settings refused", why=exc.message)
            self.factory.use(self.factory.space, exc.message)
        else:
            self._settings = space
            self._tell("settings read")
            self._look_here()
            self.factory.use(self.factory.space, "")
            self.obey()

    def _look_here(self) -> None:
        """What is well said and does not fit this host is told: a file may come later, and other types go on."""
        wrong = settings.wrong_here(self._settings)
        self._note("settings", (Mistake(str(self._file), key, what, hint) for key, what, hint in wrong))

    def obey(self) -> None:
        """Settings and orders, as they are now."""
        space, folder = order(self._folder).applied(self._settings), self._folder / PIPES
        space, notes = pipes.with_pipes(space, {pipe.name: copies.kept(pipe, folder) for pipe in space.pipes})
        self._note("pipe", notes)
        self.factory.use(space)

    async def _refresh(self) -> None:
        """The pipes, once in a cycle where they are due: side by side, and no decision waits for a slow one."""
        while True:
            await asyncio.gather(*map(self.refresh, self._settings.pipes))
            await asyncio.sleep(self._settings.cycle)

    async def refresh(self, pipe: Pipe) -> None:
        """Obey what the pipe's document says now, if that is news."""
        try:
            folder = private_folder(self._folder / PIPES)
            before = copies.kept(pipe, folder)
            copy = await in_thread(lambda: copies.refresh(pipe, folder, time.time()))
            self.factory.troubles.note(f"pipe {pipe.name}", copy.problem)
            if copy.document != before.document:
                self.obey()
        except (BelljarError, OSError) as exc:
            self.factory.troubles.note(f"pipe {pipe.name}", exc)

    def _note(self, event: str, mistakes: Iterable[Mistake]) -> None:
        """What of the settings or a pipe is not obeyed, or cannot be here: each once, until it was mended."""
        lines = frozenset(map(str, mistakes))
        for line in sorted(lines - self._noted.get(event, frozenset())):
            self._tell(event, why=line)
        self._noted[event] = lines

    # -- what the factory asks for -------------------------------------------------------------------------------------

    async def _ask(self) -> tuple[tuple[TypeStatus, ...], tuple[str, ...]]:
        """What the others run."""
        others = [factory for factory in self._settings.factories if factory != self._settings.factory]
        if not others:
            return (), ()
        answers = await self._poller.ask(Kind.MACHINETYPES)
        statuses, self._known = remember(self._known, answers, time.time())
        return statuses, tuple(factory for factory in answers.silent if factory != self._settings.factory)

    def _user_data(self, kind: MachineType, order: Living, now: float) -> bytes:
        return make_user_data(self._settings, kind, order.id, now, order.ends)

    async def _renew(self) -> None:
        """Once in a cycle: the site's files come by any way (a link that is turned, a mount), so there is no event that all have."""
        while True:
            await asyncio.sleep(self._settings.cycle)
            await self.renew_credentials()

    async def renew_credentials(self) -> None:
        """Those of machines that live, where the site has renewed its own files. What fails is told once."""
        kinds = {kind.name: kind for kind in self.factory.space.types if kind.proxy or kind.token_file}
        for machine in [
            machine for machine in self.factory.living if machine.machinetype in kinds and machine.began is not None
        ]:
            kind = kinds[machine.machinetype]
            try:
                await in_thread(functools.partial(renew, kind, Path(machine.folder), time.time(), machine.ends))
                self.factory.troubles.note(f"credentials of {kind.name}")
            except BelljarError as exc:
                self.factory.troubles.note(f"credentials of {kind.name}", exc)

    # -- what others are told ------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        """As it was within the last second: a flood of questions costs one look at the host."""
        now = time.monotonic()
        if self._cached is None or now - self._cached[0] > FRESH:
            self._cached = (now, self.factory.snapshot())
        return self._cached[1]

    def _metrics(self) -> Iterable[Metric]:
        packets = self.answering.counts if self.answering else {}
        return monitor.metrics(self.factory, self._snapshot().types, packets)

    async def _report(self) -> None:
        """After each cycle: systemd's watchdog, and VacMon."""
        async for ended in self.factory.reports():
            status = self.factory.status
            used = f"{status.processors} of {status.most_processors} processors"
            notify("WATCHDOG=1", f"STATUS={status.machines} machines, {used}")
            now = self._snapshot()
            statuses: list[Told] = [ended] if ended is not None else [*((now.own,) if now.own else ()), *now.types]
            await in_thread(lambda statuses=statuses, now=now: push(self.factory.space.vacmon, statuses, now))  # type: ignore[misc]


def push(places: Iterable[str], statuses: Iterable[Told], now: Snapshot) -> None:
    """Unsolicited packets, each to each HOST:PORT."""
    packets = [reply(status, now, UNSOLICITED, time.time(), daemon="vacd-factory") for status in statuses]
    for place in places:
        send_all(place, packets)
