"""The batch system: a lease's job is submitted under its own name and found again by it; one question tells of all of them."""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path

from belljar.errors import CommandFailed, MachineBusy
from belljar.host.commands import printed
from belljar.host.files import private_folder, write_whole
from belljar.host.threads import in_thread
from belljar.lease import Lease, Settings
from belljar.lease.decisions.advance import lease_of
from belljar.lease.decisions.margins import KILL, Queue, margins
from belljar.lease.jobfile import JobFile
from belljar.lease.network import ports_of
from belljar.lease.protocol import lease_key
from belljar.model import dumps
from belljar.pool import NamedJob, PilotJob, Pilots

ASK = 30.0  # seconds one command of the batch system may take
LOGS = 7 * 86400.0  # seconds for which pilots' words are kept
LIMITS = 300.0  # seconds for which what queues allow is believed
FRESH = 2.0  # seconds for which an answer counts, where nothing was done since
# What a batch system says when asking again is of no use.
NEVER = re.compile(
    r"invalid|not permitted|denied|unknown (queue|resource|project)|no such|not available|exceed|violat|cannot be satisfied"
    r"|unable to run job: (job rejected|unknown)|does not exist",
    re.IGNORECASE,
)
Run = Callable[[tuple[str, ...]], Awaitable[bytes]]
COMMAND: Run = partial(printed, timeout=ASK)


class Rejected(Exception):
    """The batch system will never take this job: why, in its words."""


class Jobs:
    """*pin*: of the service's certificate. *run*: gives what it prints, and raises CommandMissing, CommandFailed."""

    def __init__(self, settings: Settings, pilots: Pilots, site_key: bytes, pin: str, run: Run = COMMAND) -> None:
        self._settings, self._pilots, self._site_key, self._pin = settings, pilots, site_key, pin
        self._command, self._queues, self._learned = run, b"", -LIMITS
        self._answer: tuple[float, tuple[NamedJob, ...]] | None = None

    async def all(self) -> tuple[NamedJob, ...]:
        """Raises BelljarError, ValueError."""
        now = asyncio.get_running_loop().time()
        if self._answer is None or now - self._answer[0] > FRESH:
            printed = await self._command(self._pilots.query())
            self._answer = (now, tuple(self._pilots.jobs(printed)))
        return self._answer[1]

    async def learn(self) -> None:
        """What queues allow, once in a while. Raises BelljarError."""
        now = asyncio.get_running_loop().time()
        if now - self._learned >= LIMITS:
            self._learned = now
            self._queues = await self._command(self._pilots.limits)

    def queue(self, name: str) -> Queue:
        return Queue(self._pilots.longest(self._queues, name), self._pilots.quantum)

    async def submit(self, lease: Lease) -> str:
        """The job's id. The folder gets its files first. Raises Rejected; BelljarError, ValueError where it may be tried again."""
        self._answer = None
        folder, name, terms = self._settings.jobs, lease.job_name, lease.wanted
        times = margins(terms.seconds, terms.nodes, self._settings, quantum=self._pilots.quantum)
        job = self._job(lease, folder / name, times.walltime)
        try:
            argv = self._pilots.submit(job, str(folder / f"{name}.sh"))
        except ValueError as exc:
            raise Rejected(str(exc)) from exc
        await in_thread(lambda: self._write(lease, folder, job, times.pilot))
        try:
            return self._pilots.submitted(await self._command(argv))
        except CommandFailed as exc:
            if NEVER.search(exc.message):
                raise Rejected(exc.message) from exc
            raise

    async def cancel(self, job: str) -> None:
        """Raises BelljarError; one that is gone is seen at the next look."""
        self._answer = None
        await self._command(self._pilots.cancel(job))

    async def extend(self, job: str, seconds: float) -> None:
        """A running job's limit is this now. Raises MachineBusy where the batch system does not allow it."""
        try:
            await self._command(self._pilots.extend(job, seconds))
        except (ValueError, CommandFailed) as exc:
            raise MachineBusy(f"the batch system does not let job {job} last longer: {exc}",
                             hint="Ask for a new lease. What the site can do: docs/operate/lease/operation.md.") from exc  # fmt: skip

    def sweep(self, live: Container[str]) -> None:
        """Files of leases that do not live, and drafts (`.*`): their keys are of no use. What pilots wrote (`*.log`) stays for a while."""
        for file in (*self._settings.jobs.glob("belljar-r-*"), *self._settings.jobs.glob(".belljar-r-*")):
            with suppress(FileNotFoundError):
                is_kept = file.suffix == ".log" and time.time() - file.stat().st_mtime < LOGS
                if not is_kept and lease_of(file.stem) not in live:
                    file.unlink()

    def _write(self, lease: Lease, folder: Path, job: PilotJob, deadline: float) -> None:
        settings = self._settings
        file = JobFile(lease.id, lease.attempt, lease.wanted.nodes, (f"{settings.address}:{settings.port}",), self._pin,
                       lease_key(self._site_key, lease.id).hex(), deadline=deadline, claim=settings.staging,
                       barrier=2 * settings.barrier, grace=settings.grace, notice=settings.notice or self._pilots.notice,
                       report=KILL, heartbeat=settings.heartbeat, ports=ports_of(settings, lease.wanted))  # fmt: skip
        private_folder(folder)
        write_whole(folder / lease.job_name, dumps(file) + b"\n", durable=True)
        write_whole(folder / f"{lease.job_name}.sh", self._pilots.script(job), mode=0o700)

    def _job(self, lease: Lease, file: Path, limit: int) -> PilotJob:
        terms, settings = lease.wanted, self._settings
        share, argv = min(terms.per_node, terms.count), (*shlex.split(settings.pilot), "pilot", str(file))
        return PilotJob(lease.job_name, argv, terms.nodes, terms.size.cpus * share,
                        terms.size.memory * share + settings.overhead, limit, lease.owner, f"{file}.log", terms.queue,
                        terms.account, lease.shunned, settings.environment)  # fmt: skip
