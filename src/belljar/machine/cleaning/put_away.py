"""How a domain that ended by itself is explained, and how everything of a machine is put away at the end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from belljar.errors import BelljarError, BootTimeout, DomainDied, DomainKilled, GuestError, NoSpace, ShareLost
from belljar.hints import TYPE_CHECKING, Any
from belljar.host.files import copy_tree, private_folder, read_capped, remove_tree, write_whole
from belljar.hypervisor import DomainEvent, EventKind
from belljar.journal import Ledger
from belljar.machine import CONSOLE_LOG, CONTROL, CREDENTIALS, JOBOUTPUTS, KEPT_DISK, LOCK, NOT_KEPT, OUTCOME
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import Ended
from belljar.model import QEMU_LOG, Cause, RunPayload, State, dumps, to_json

if TYPE_CHECKING:
    from belljar.image.store.qcow2 import Overlays

TAIL = 1 << 16
MESSAGE = "shutdown_message"
LONGEST_MESSAGE, LARGEST_MESSAGE = 300, 64 << 10
FORM = r"([1-9][0-9]{2}) (.*)"
OURS = "belljar: "  # how lines begin by which belljar's init, and what it has others run, say why they give up
PANIC = "Kernel panic - not syncing"  # what comes after it is a trace
ExplainOff = Callable[[EventKind, str], BelljarError]  # what a guest's own end amounts to, with the console's last line
RETIRED = ".retired-"  # the folder of a machine whose record was copied already


async def read(events: AsyncIterator[DomainEvent], life: Lifecycle, explain_off: ExplainOff) -> BelljarError:
    """Wait until the domain ends or breaks without having been asked to; returns what to tell about it. What breaks before
    there is a payload failed to boot; afterwards it is lost."""
    async for event in events:
        life.record.tell("domain", kind=event.kind, detail=event.detail[:200], status=event.status)
        error = _error_of(event, life, explain_off)
        if error.cause in (Cause.BOOT_FAILED, Cause.GUEST_LOST):
            error.cause = Cause.GUEST_LOST if life.is_begun else Cause.BOOT_FAILED
        return error
    return DomainDied("QEMU's events ended before QEMU did")


def _error_of(event: DomainEvent, life: Lifecycle, explain_off: ExplainOff) -> BelljarError:
    match event.kind:
        case EventKind.PANICKED:
            return GuestError(f"the guest's kernel crashed{_last_line(life, CONSOLE_LOG, ': ')}")
        case EventKind.SHUTDOWN | EventKind.RESET:
            return explain_off(event.kind, _last_line(life, CONSOLE_LOG, ""))
        case EventKind.DISK_FULL:
            return NoSpace(f"{life.folders.scratch}: no space left for what the guest writes to its disk")
        case EventKind.DISK_ERROR:
            return DomainDied(f"the guest's disk cannot be read or written: {event.detail}")
        case EventKind.SHARE_LOST:
            return event.why or ShareLost(f"a shared folder is not served any more: {event.detail}")
        case EventKind.EXITED:
            status = event.status or 0
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                who = "the host's OOM killer, a limit, or an administrator"
                return DomainKilled(f"QEMU was killed from outside (by {who})")
            if event.why is not None and (os.WIFEXITED(status) or not isinstance(event.why, DomainDied)):
                return event.why
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return DomainDied(f"QEMU ended with {how}{_last_line(life, QEMU_LOG, ': ')}")


def own_limit(life: Lifecycle) -> None:
    """QEMU runs under the payload's own limit on processor time: killed for that, the payload used it up."""
    work, used = life.request.work, life.outcome.host.user + life.outcome.host.system
    limits = {name: hard for name, _, hard in work.payload.rlimits} if isinstance(work, RunPayload) else {}
    most = limits.get("CPU", -1)
    if life.outcome.error == DomainKilled.__name__ and 0 <= most <= used + 1:  # the kernel looks once a second
        life.end(Ended(Cause.CANCELLED, signal.SIGKILL, f"the limit of {most} s of processor time was reached"))
        life.note(error="", hint="")


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncIterator[None]:
    """BootTimeout when the inside takes longer than *seconds*; the message names what was waited for."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        raise BootTimeout(f"waited {seconds:g} s for {what}") from exc


def put_away(life: Lifecycle, overlays: Overlays) -> None:
    """Remove what only a live machine needs, write the outcome, move the folder to the ended ones, free the lock. Each step
    is tried whatever became of the one before; what is left is the reaper's. Raises nothing."""
    request, folders = life.request, life.folders
    ended = folders.ended(request.id)
    with life.phase("clean"):
        if not request.keep:
            with life.trying("its disk was not removed"):
                overlays.discard(folders.overlay(request.id))
        for path in (*life.files, life.folder / CONTROL):
            with life.trying("a file of it was not removed"), suppress(FileNotFoundError):
                os.unlink(path)
    life.point("before-release")
    phases = {name: round(seconds, 6) for name, seconds in life.phases.items()}
    life.note(phases=phases, ended=time.time(), **shutdown_of(life.folder))
    outcome = to_json(life.outcome)
    with life.trying("its outcome is only told here"):
        keep_outcome(outcome, life.folder, ended)
    life.point("outcome-written")
    life.leave_towards(State.DONE)
    with life.trying("its record waits for a reaper"):  # for one that moves it with its row in the ledger, not without
        Ledger(folders.logs).append(outcome, time.time())
        retire(life.folder, ended)
        remove_tree(folders.begun / request.id)
    if request.keep:
        import shutil

        with life.trying("its disk was not kept"), suppress(FileNotFoundError):  # it may never have been started
            shutil.move(folders.overlay(request.id), ended / KEPT_DISK)
    life.release()


def shutdown_of(folder: Path) -> dict[str, Any]:
    """What the guest said of its own end, as facts of the outcome."""
    code, line = message(folder / JOBOUTPUTS / MESSAGE)
    return {"shutdown_code": code, "shutdown_message": line.partition(" ")[2]} if code else {}


def message(path: Path) -> tuple[int, str]:
    """(code, line) of a `shutdown_message` (HSF-TN-2016-04), which the guest wrote; (0, "") for any other form."""
    try:
        text = read_capped(path, LARGEST_MESSAGE).decode(errors="replace")
    except (OSError, BelljarError):
        return 0, ""
    line = "".join(char for char in text.partition("\n")[0] if char.isprintable())[:LONGEST_MESSAGE].strip()
    match = re.match(FORM, line)
    return (int(match[1]), line) if match else (0, "")


def keep_outcome(outcome: dict[str, Any], folder: Path, ended: Path) -> None:
    """Put the outcome into the machine's folder; where that cannot be written any more, into that of its record."""
    try:
        write_whole(folder / OUTCOME, dumps(outcome))
    except (OSError, BelljarError):
        private_folder(ended)
        write_whole(ended / OUTCOME, dumps(outcome))


def retire(source: Path, target: Path) -> None:
    """Move a folder to the ended ones, across file systems too, with its lock held. Raises OSError; nothing is moved
    then."""
    for path in (path for pattern in NOT_KEPT for path in source.glob(pattern)):
        with suppress(OSError):
            path.unlink()
    with suppress(OSError):
        remove_tree(source / CREDENTIALS)
    try:
        os.rename(source, target)
    except OSError:
        copy_tree(source, target)
        gone = source.parent.parent / f"{RETIRED}{source.name}"
        os.rename(source, gone)
        remove_tree(gone)
    with suppress(OSError):
        os.unlink(target / LOCK)


def _last_line(life: Lifecycle, name: str, before: str) -> str:
    """The line of a log of this machine that explains its end, with something before it; "" when there is none."""
    try:
        text = read_capped(life.folder / name, 4 << 20)[-TAIL:].decode(errors="replace")
    except OSError:
        return ""
    words = last_words(text)
    return f"{before}{words}" if words else ""


def last_words(text: str, *, ours_only: bool = False) -> str:
    """The last line by which belljar's part of the guest explains its end; without one, and not *ours_only*, the
    kernel's line about its panic, or else the last line."""
    lines = text.strip().splitlines()
    ours = [line for line in lines if line.strip().startswith(OURS)]
    chosen = ours or ([] if ours_only else [line for line in lines if PANIC in line] or lines)
    return chosen[-1].strip()[:300] if chosen else ""
