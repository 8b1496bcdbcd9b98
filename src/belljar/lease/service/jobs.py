"""The batch system: a lease's job is submitted under its own name and found again by it; one question tells of all of them."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Awaitable, Callable, Container
from pathlib import Path

from belljar.batch import PilotJob, Pilots
from belljar.errors import CommandFailed, LeaseEnded
from belljar.host.commands import run_beside
from belljar.host.files import private_folder, write_whole
from belljar.host.threads import in_thread
from belljar.lease import Lease, Settings, jobfile
from belljar.lease.advance import lease_of
from belljar.lease.case import Job
from belljar.lease.jobfile import JobFile
from belljar.lease.margins import KILL, margins
from belljar.lease.protocol import lease_key

ASK = 30.0  # seconds one command of the batch system may take
FRESH = 2.0  # seconds for which an answer counts, where nothing was done since
# What a batch system says when asking again is of no use.
NEVER = re.compile(
    r"invalid|not permitted|denied|unknown (queue|resource|project)|no such|not available|exceed|violat|cannot be satisfied"
    r"|unable to run job: (job rejected|unknown)|does not exist",
    re.IGNORECASE,
)
Run = Callable[[tuple[str, ...]], Awaitable[bytes]]


class Rejected(Exception):
    """The batch system will never take this job: why, in its words."""


async def command(argv: tuple[str, ...]) -> bytes:
    """What it prints. Raises CommandMissing, CommandFailed."""
    return (await run_beside(argv, timeout=ASK)).out


class Jobs:
    """*pin*: of the service's certificate."""

    def __init__(
        self, settings: Settings, pilots: Pilots, site_key: bytes, pin: str, run_command: Run = command
    ) -> None:
        self._settings, self._pilots, self._site_key, self._pin = settings, pilots, site_key, pin
        self._command = run_command
        self._answer: tuple[float, tuple[Job, ...]] | None = None

    async def all(self) -> tuple[Job, ...]:
        """Raises BelljarError, ValueError."""
        now = asyncio.get_running_loop().time()
        if self._answer is None or now - self._answer[0] > FRESH:
            printed = await self._command(self._pilots.query())
            self._answer = (
                now,
                tuple(Job(one.name, one.id, one.state, one.reason, one.expected) for one in self._pilots.jobs(printed)),
            )
        return self._answer[1]

    async def submit(self, lease: Lease) -> str:
        """The job's id. The folder gets its files first. Raises Rejected; BelljarError, ValueError where it may be tried again."""
        self._answer = None
        folder, name = self._settings.jobs, lease.job_name
        job = self._job(lease, folder / name)
        try:
            argv = self._pilots.submit(job, str(folder / f"{name}.sh"))
        except ValueError as exc:
            raise Rejected(str(exc)) from exc
        await in_thread(lambda: self._write(lease, folder, job))
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
        """A running job's limit is this now. Raises LeaseEnded where the batch system does not allow it."""
        try:
            await self._command(self._pilots.extend(job, seconds))
        except (ValueError, CommandFailed) as exc:
            raise LeaseEnded(f"the batch system does not let job {job} last longer: {exc}",
                             hint="Ask for a new lease.") from exc  # fmt: skip

    def sweep(self, live: Container[str]) -> None:
        """Files of leases that do not live: their keys are of no use any more. What pilots wrote (`*.log`) stays."""
        for file in self._settings.jobs.glob("belljar-r-*"):
            if file.suffix != ".log" and lease_of(file.stem) not in live:
                file.unlink(missing_ok=True)

    def _write(self, lease: Lease, folder: Path, job: PilotJob) -> None:
        settings = self._settings
        found = margins(lease.wanted.seconds, lease.wanted.nodes, settings, quantum=self._pilots.quantum)
        file = JobFile(
            lease.id, lease.attempt, lease.wanted.nodes, (f"{settings.address}:{settings.port}",), self._pin,
            lease_key(self._site_key, lease.id).hex(), deadline=found.pilot, claim=settings.staging,
            barrier=2 * settings.barrier, grace=settings.grace, notice=settings.notice or self._pilots.notice, report=KILL,
            heartbeat=settings.heartbeat,
        )  # fmt: skip
        private_folder(folder)
        jobfile.write(folder / lease.job_name, file)
        write_whole(folder / f"{lease.job_name}.sh", self._pilots.script(job), mode=0o700)

    def _job(self, lease: Lease, file: Path) -> PilotJob:
        wanted, settings = lease.wanted, self._settings
        share = min(wanted.per_node, wanted.count)
        return PilotJob(
            lease.job_name, (*shlex.split(settings.pilot), "pilot", str(file)), wanted.nodes, wanted.size.cpus * share,
            wanted.size.memory * share + settings.overhead,
            margins(wanted.seconds, wanted.nodes, settings, quantum=self._pilots.quantum).walltime, lease.owner,
            str(settings.jobs / f"{lease.job_name}.log"), wanted.queue, wanted.account, lease.shunned, settings.environment,
        )  # fmt: skip
