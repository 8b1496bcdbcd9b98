"""A sandbox, as harnesses of agents know it: a machine that does nothing but run the commands it is given, as root of its guest.

What goes wrong has two kinds. A machine that was lost through no fault of what ran in it is an InfrastructureFailure: a
trainer leaves such a sample out of the loss. All else is the task's own: exit codes, a command that takes too long, a guest
that was powered off from inside, or whose time is over.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from belljar import api, errors

T = TypeVar("T")
ROOT = api.Account("root", 0, 0, "root", home="/root")
MOST_OUTPUT = 16 << 20  # bytes that are kept of each stream of a command
END_PATIENCE = 10.0  # seconds for a machine that does not answer to end
KIND = re.compile(r"[a-z0-9-]+://|(oci|docker-archive|sif|dir|sha256):")
FAULTS = ("node", "transient")  # outcome classes of what the machine did not do
NEVER_BEGAN = ("not-found", "not-executable", "no-cwd", "rlimit", "failed")  # why a machine never took commands
# What is at fault lies in what was asked for, and the machine is as it was.
REFUSALS = (errors.GuestRefused, errors.InputMissing, errors.OutputMissing, errors.BadOption, api.TimedOut)
# Waits until TERM, under a name that no agent kills when it ends a `sleep` of its own.
WAIT = """printf belljar >/proc/$$/comm; pipe=/tmp/.belljar-$$
mkfifo -m 600 "$pipe" && exec 3<>"$pipe" && rm "$pipe" && read -r _ <&3"""


class InfrastructureFailure(RuntimeError):
    """The machine could not be started, or was lost, through no fault of what ran in it."""


class TaskFailure(RuntimeError):
    """What ran in the sandbox ended it, or its time is over."""


class Unfit(RuntimeError):
    """No sandbox can be made of what was asked for: to try again changes nothing."""


class Sandbox:
    """One machine. Dropped without `close`, or with its process, it is stopped, too. A framework with words of its own for whose
    fault an end is has them in a subclass."""

    infrastructure: type[Exception] = InfrastructureFailure
    unfit: type[Exception] = Unfit

    def __init__(self, machine: api.Machine, env: Mapping[str, str], cwd: str | None, user: str | int) -> None:
        self.machine, self._env, self._cwd, self._user = machine, dict(env), cwd, user

    def __del__(self) -> None:
        self.machine.release()

    @classmethod
    async def create(
        cls, image: str | None, *, argv: Sequence[str] = ("sh", "-c", WAIT), env: Mapping[str, str] | None = None,
        cwd: str | None = None, user: str | int = "root", within: float | None = None, **options: Any,
    ) -> Self:  # fmt: skip
        """A machine that takes commands, after *within* seconds at most. After an error or a cancel nothing of it is
        left. *env*, *cwd* and *user* are those of commands that say nothing else; other *options* are `belljar.api`'s.
        Raises InfrastructureFailure, Unfit."""
        try:
            options = {"requester": "sandbox", **options, "image": image_of(image), "env": env or {}}
            options |= {"cwd": cwd} if cwd else {}  # else the image's own
            return cls(await api.abegin(argv, within=within, **options), env or {}, cwd, user)
        except api.Failed as exc:
            is_ours = isinstance(end := failure(exc.completed.outcome), InfrastructureFailure)
            raise (cls.infrastructure if is_ours else cls.unfit)(str(end)) from exc
        except errors.BelljarError as exc:
            raise (cls.unfit if exc.retry.value == "never" else cls.infrastructure)(f"{exc} ({exc.hint})") from exc
        except (TypeError, ValueError) as exc:
            raise cls.unfit(str(exc)) from exc
        except OSError as exc:
            raise cls.infrastructure(str(exc) or f"no sandbox within {within} s") from exc

    async def exec(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None,
        timeout: float | None = None, user: str | int | None = None,
    ) -> tuple[int, str, str]:  # fmt: skip
        """Exit code, stdout, stderr of a command; what it starts in the background goes on. Raises api.TimedOut, and the
        command is dead then; errors.GuestRefused for what no command can be; InfrastructureFailure, TaskFailure."""
        async with self._blaming():
            account = await self._account(self._user if user is None else user)
            code, out, err = await self.machine.aexec(
                argv, b"", account, MOST_OUTPUT, timeout=timeout, cwd=cwd or self._cwd,
                env={**self._env, **(env or {})}, leaves=True,
            )  # fmt: skip
        return code, text(out), text(err)

    async def put(self, outside: str, inside: str) -> None:
        """Copy a file to this path or into this folder of the guest, or what is in a folder into this folder. Raises
        errors.BelljarError, InfrastructureFailure, TaskFailure."""
        pairs = [(outside, inside)]
        if not inside.strip("/") and os.path.isdir(outside):  # noqa: ASYNC240
            pairs = [(entry.path, f"/{entry.name}") for entry in os.scandir(outside)]
        async with self._blaming():
            for here, there in pairs:
                await self.machine.aput(here, there, ROOT)

    async def get(self, inside: str, outside: str) -> None:
        """The other way."""
        async with self._blaming():
            await self.machine.aget(inside, outside, ROOT)

    async def close(self) -> None:
        """Return when it is gone, also after a cancel."""
        await self.machine.aleave()

    @asynccontextmanager
    async def _blaming(self) -> AsyncIterator[None]:
        try:
            yield
        except REFUSALS:
            raise
        except (errors.BelljarError, OSError) as exc:
            try:
                end = failure(await self.machine.await_end(END_PATIENCE))
            except (TimeoutError, errors.BelljarError):
                end = InfrastructureFailure(f"{self.machine.id}: {exc}")
            raise (self.infrastructure(str(end)) if isinstance(end, InfrastructureFailure) else end) from exc

    async def _account(self, user: str | int) -> api.Account:
        """Who that is in the guest now. Raises errors.GuestRefused."""
        if user in ("root", 0, "0"):
            return ROOT
        _, out, _ = await self.machine.aexec(["cat", "/etc/passwd", "/etc/group"], b"", ROOT, MOST_OUTPUT)
        rows = [row.split(":") for row in text(out).splitlines()]
        groups = {int(row[2]): (row[0], row[3].split(",")) for row in rows if len(row) == 4}
        for name, _, uid, gid, _, home, shell in (row for row in rows if len(row) == 7):
            if str(user) in (name, uid):
                own, _ = groups.pop(int(gid), (f"group{gid}", []))
                others = tuple((number, group) for number, (group, members) in groups.items() if name in members)
                return api.Account(name, int(uid), int(gid), own, others, home or "/", shell or "/bin/sh")
        raise errors.GuestRefused(f"user {user!r}: not in the guest's /etc/passwd")


def failure(outcome: api.Outcome) -> InfrastructureFailure | TaskFailure:
    """Whose fault the end of a machine was."""
    is_ours = outcome.klass.value in (*FAULTS, "cancelled") or outcome.error in NEVER_BEGAN
    kind = InfrastructureFailure if is_ours else TaskFailure
    return kind(f"{outcome.id}: {outcome.reason}{f' ({outcome.hint})' if outcome.hint else ''}")


def image_of(reference: str | None) -> str | None:
    """The image as belljar names it: one of the store, or what says its kind itself; else it is a container's, as docker
    reads that. None: the settings decide."""
    if reference is None or KIND.match(reference):
        return reference
    try:
        api.image_digest(reference)
        return reference
    except errors.ImageError:
        return f"docker://{reference}"


def size_of(cpus: float | None = None, memory_mib: int | None = None, disk_gib: float | None = None) -> dict[str, int]:
    """Options of a machine that has no less than that; None: the settings decide."""
    sizes = {"cpus": cpus, "memory": memory_mib and memory_mib << 20, "disk": disk_gib and disk_gib * (1 << 30)}
    return {name: math.ceil(size) for name, size in sizes.items() if size is not None}


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Its result, for a framework that waits without an event loop, or keeps one waiting."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def text(output: bytes) -> str:
    return output.decode(errors="replace")
