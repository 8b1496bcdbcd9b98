"""A bait's machines: asked for, found again after a restart, ended, by belljar's own door.

A machine's work is to join the pool: a script as root, which reads the pool's secret from its standard input. So the secret is in no
image, request, record or command line. The machine ends when its batch daemon does.
"""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar import api
from belljar.bait import NEVER, Settings
from belljar.bait.decisions.advance import UNFIT
from belljar.bait.decisions.decide import Room, size_of
from belljar.bait.machines import scrub
from belljar.bait.networks.uplink import Uplinks
from belljar.errors import BadOption, BelljarError, HostError, NoSuchMachine
from belljar.host.caller import describe
from belljar.host.files import read_capped
from belljar.host.room import host_memory
from belljar.host.threads import in_thread
from belljar.model import Account, NetworkMode, Payload, PlainFile, Request, RunPayload, Share, StdinKind
from belljar.pool import UNFIT_CODE, JobView, Member, Pool
from belljar.records import replace

ROOT = Account("root", 0, 0, "root", home="/root")
GRACE = 5.0
LONGEST_LINE = 160
PROVED = 60.0  # seconds in which a machine is clean
LARGEST_SECRET, LARGEST_CONF = 1 << 12, 1 << 20
BAIT, JOB = "bait", "bait-job"  # labels


class Machines:
    """The machines of this host's bait. All but `start`, `prove` and `admit` is cheap."""

    def __init__(self, settings: Settings, pool: Pool, shares: tuple[Share, ...]) -> None:
        self._settings, self._pool, self._shares = settings, pool, shares
        self._uplinks = Uplinks(tuple(dict(settings.networks).values()))

    def living(self) -> frozenset[str]:
        return frozenset(self._cpus())

    def _cpus(self) -> dict[str, int]:
        """Processors of those that live."""
        views = ((machine.id, machine.view) for machine in api.machines())
        return {id: view.cpus for id, view in views if view.labels.get(BAIT) == self._settings.name}

    def ended(self, id: str) -> str | None:
        """Why this machine has ended; None where nothing is known of its end."""
        with suppress(NoSuchMachine):
            machine = api.find(id)
            view = machine.view
            if view.ended is not None:
                return why_ended(view.outcome or {}, view.image, machine.stderr) or str(view.cause)
        return None

    def last_words(self, id: str) -> str:
        """The last line of what a machine that lives has written to its stderr; "" where there is none."""
        with suppress(NoSuchMachine, OSError):
            return last_line(api.find(id).stderr)
        return ""

    async def start(self, job: JobView, id: str) -> None:
        """Returns when it is claimed. Raises BelljarError."""
        # It asks the resolver.
        request = await in_thread(lambda: request_for(job, id, self._settings, self._pool, self._shares))
        await api.astart(request, stdin=secret(self._settings))

    async def prove(self, id: str) -> str:
        """Clean it. "" where it is what it was before its first job, or what is not."""
        try:
            return scrub.why_not(*await self._as_root(id, scrub.scrub(self._pool.folders)))
        except (BelljarError, OSError) as exc:
            return line_of(exc)

    async def admit(self, job: JobView, id: str) -> None:
        """This job's user to a machine that is clean. Raises BelljarError."""
        lines = "\n".join((f"{job.uid} {job.number}", *account_of(job), ""))
        code, _, err = await self._as_root(id, scrub.ADMIT.encode(), lines.encode())
        if code:
            raise HostError(f"{id}: {job.owner} could not be added: {err[:200].decode('ascii', 'replace')}")

    async def _as_root(self, id: str, script: bytes, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        """Its payload's user is root. Raises BelljarError."""
        try:
            async with asyncio.timeout(PROVED):
                return await api.find(id).aexec((b"/bin/sh", b"-c", script), stdin)
        except TimeoutError:
            raise HostError(f"{id}: its guest did not end a script of ours within {PROVED:.0f} s") from None

    def image(self, job: JobView) -> str:
        """The digest of the image it would have now; "" where there is none."""
        with suppress(BelljarError):
            return api.image_digest(job.image or self._settings.images[0])
        return ""

    def end(self, id: str) -> None:
        with suppress(NoSuchMachine):
            api.find(id).ask("stop", grace=GRACE)

    def room(self, taken: int) -> Room:
        """*taken*: processors of machines that are not claimed yet."""
        left, most = api.room(), self._settings.max_cpus or os.cpu_count() or 1
        cpus = most - sum(self._cpus().values()) - taken
        free = self._uplinks.free() if self._settings.min_bandwidth else None
        return Room(left.memory, cpus, left.scratch, host_memory()[0], most, free, self._no_image())

    def _no_image(self) -> str:
        """Why none of the images can be used; "" where one can."""
        reasons = []
        for image in self._settings.images:
            try:
                api.image_digest(image)
                return ""
            except (BelljarError, OSError) as exc:
                reasons.append(line_of(exc))
        return reasons[0] if reasons else ""

    def events(self) -> AsyncIterator[dict[str, Any]]:
        return aiter(api.aevents())


def request_for(job: JobView, id: str, settings: Settings, pool: Pool, shares: tuple[Share, ...] = ()) -> Request:
    """The request for one machine of this job. Raises BelljarError."""
    size, hosts = size_of(job, settings), "\n".join(settings.hosts)
    features = tuple(dict.fromkeys((settings.feature, feature_of(settings.name), *job.features)))
    member = Member(pool.name_of(id), size.cpus, size.job_memory, features, account_of(job), hosts, job.number)
    alias = f"{settings.system}:{job.id}"
    labels = {BAIT: settings.name, JOB: job.id, "owner": job.owner, "queue": job.queue, "alias": alias}
    request = joining_request(
        member, settings, pool, network=job.network, address=pool.address_of(id), image=job.image or settings.images[0],
        baseline=scrub.baseline() if settings.cache != NEVER else b"", one_job=settings.cache == NEVER and size.count == 1,
        disk=job.disk or None, shares=shares, labels=labels, requester=f"bait:{job.id}",
    )  # fmt: skip
    return replace(request, id=id)


def joining_request(
    member: Member, settings: Settings, pool: Pool, *, network: str = "", address: str = "", baseline: bytes = b"",
    one_job: bool = False, **asked: Any,
) -> Request:  # fmt: skip
    """The request for a machine that becomes this node. *one_job*: it ends when its job has. Raises BelljarError."""
    bridges, kind = dict(settings.networks), network or settings.networks[0][0]
    if kind not in bridges:
        raise BadOption(f"network class {kind}: there is {', '.join(bridges)} here")
    joining = pool.joining(member, settings.conf, _read(settings.conf, "conf", LARGEST_CONF))
    copies = (PlainFile(bytes(path), _read(path, "conf", LARGEST_CONF)) for path in joining.copies)
    payload = Payload(
        (b"join-the-pool",), ROOT, script=joining.script, cwd=b"/", env=(*joining.env, (b"BASELINE", baseline), (b"ONE_JOB", b"1" * one_job)),
        stdin=StdinKind.STREAM, files=(*joining.files, *copies),
    )  # fmt: skip
    return api.request_of(
        RunPayload(payload), cpus=member.cpus, memory=member.memory + settings.overhead, network=NetworkMode.BRIDGE,
        network_name=bridges[kind] + (f"@{address}" if address else ""), name=member.name, grace=GRACE, **asked,
    )  # fmt: skip


def why_ended(outcome: Mapping[str, Any], image: str, stderr: bytes) -> str:
    """In a line; with what the machine said, where its batch daemon ended by itself."""
    line, code = last_line(stderr), outcome.get("exit_code")
    if code == UNFIT_CODE:
        return f"{UNFIT}{image}: {line or 'it does not say why'}"
    reason = str(outcome.get("reason") or "")
    return f"{reason or f'exit {code}'}: {line}" if code and line else reason


def last_line(text: bytes) -> str:
    """A guest wrote it."""
    lines = text[-4096:].decode("utf-8", "replace").strip().splitlines()
    return "".join(filter(str.isprintable, lines[-1]))[:LONGEST_LINE] if lines else ""


def secret(settings: Settings) -> bytes:
    """The pool's; none where the system has none. Raises HostError."""
    return b"" if settings.key == Path() else _read(settings.key, "key", LARGEST_SECRET)


def feature_of(name: str) -> str:
    """The feature of this bait's nodes, by which it knows them."""
    return "bait_" + "".join(char if char.isalnum() else "_" for char in name)


def account_of(job: JobView) -> tuple[str, ...]:
    """The line of passwd and those of group for the one user whose job a node runs. Raises BadOption for one this host does not
    know, or by another number."""
    try:
        entry = pwd.getpwnam(job.owner)
    except KeyError:
        raise BadOption(f"{job.id}: its user {job.owner[:60]!r} is not known on this host") from None
    if job.uid not in (-1, entry.pw_uid):
        raise BadOption(f"{job.id}: its user {job.owner} has the uid {job.uid}, and {entry.pw_uid} on this host")
    user = describe(entry.pw_uid, entry.pw_gid, None)
    groups = (f"{name}:x:{gid}:{user.name}" for gid, name in ((user.gid, user.group), *user.groups))
    return (f"{user.name}:x:{user.uid}:{user.gid}::{user.home}:{user.shell}", *groups)


def _read(path: Any, key: str, largest: int) -> bytes:
    try:
        return read_capped(path, largest)
    except OSError as exc:
        raise HostError(f"{path}: {exc.strerror}", hint=f"Correct `{key}` in bait.toml.") from exc


def line_of(error: Exception) -> str:
    text = f"{type(error).__name__}: {error.message}" if isinstance(error, BelljarError) else str(error)
    return text.replace("\n", " ")
