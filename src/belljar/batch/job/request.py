"""From a Job to the Request for its machine; and which of its variables reach the guest: all but those about the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from belljar.batch import Settings
from belljar.batch.job.policy import Asker, check_allowed, check_limits, guest_memory
from belljar.batch.job.terms import Command, Job, Surroundings
from belljar.errors import InputMissing, UsageError
from belljar.model import (
    MIB,
    SCRATCH_PLACE,
    Account,
    MachineSpec,
    Payload,
    PlainFile,
    Request,
    RunPayload,
    StdinKind,
    Transfer,
)
from belljar.records import dataclass, replace

Pairs = tuple[tuple[bytes, bytes], ...]

# What tells a program of the host where things of the host are, or speaks to a daemon of the host's session.
HOST_ONLY = (
    "LD_*", "DBUS_*", "XDG_RUNTIME_DIR", "XDG_SESSION_*", "XDG_SEAT", "XDG_VTNR", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION",
    "SSH_CLIENT", "SSH_TTY", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "KRB5CCNAME", "NOTIFY_SOCKET", "LISTEN_*",
    "INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_*", "GPG_AGENT_INFO", "BELLJAR_*", "GLIBC_TUNABLES", "MALLOC_*",
)  # fmt: skip
SYSTEM_PATH = (b"/usr/local/sbin", b"/usr/local/bin", b"/usr/sbin", b"/usr/bin", b"/sbin", b"/bin")
ALSO_THERE = (*SYSTEM_PATH, b"/usr/local/games", b"/usr/games")
OF_THE_USER = (b"HOME", b"USER", b"LOGNAME", b"SHELL", b"MAIL")
LARGEST_SCRIPT = 6 * MIB
LARGEST_FILE = MIB  # a scheduler's file; a larger one stays outside
MOST_ENTRIES = 100_000  # of a folder that is copied
NEVER_STAGED = ("/", "/tmp", "/var/tmp", "/dev/shm", "/root", "/home", "/etc", "/usr", "/var", "/opt", "/proc", "/sys")


@dataclass(frozen=True)
class Caller:
    """What of this process the payload takes over, and what the site gives to every machine."""

    account: Account
    umask: int
    rlimits: tuple[tuple[str, int, int], ...]
    stdio: tuple[StdinKind, StdinKind, StdinKind]
    machine: MachineSpec  # for a job that asks for nothing else
    terminal: bool = False  # standard input and output are one: an interactive job
    own: tuple[str, ...] = ()  # belljar's folders, never a part of the job's


def build(here: Surroundings, job: Job, caller: Caller, settings: Settings, now: float) -> Request:
    """The request for this job's machine. Raises NotPermitted, OverLimit, InputMissing, UsageError."""
    usual = caller.machine
    check_allowed(usual.image, Asker.of(caller.account, job.queue), settings)
    check_limits(job.cpus, job.memory, job.disk, settings)
    hard = {name: most for name, _, most in caller.rlimits}  # QEMU has to live with these
    memory = guest_memory(job.memory, hard.get("AS", -1), settings, usual.memory, data=hard.get("DATA", -1))
    machine = replace(
        usual, cpus=job.cpus or usual.cpus, memory=memory, disk=None if settings.scratch else job.disk,
        scratch=(job.disk or settings.scratch) if settings.scratch else None,
    )  # fmt: skip
    aliases = (("alias", alias) for alias in job.aliases)
    overhead = f"{(job.memory - memory) // MIB} MiB of the job's {job.memory // MIB} MiB" if job.memory else ""
    before = str(job.started_before)
    labels = (("queue", job.queue), ("job name", job.name), ("started before", before), ("overhead", overhead))
    return Request(
        id=os.urandom(6).hex(), machine=machine, work=RunPayload(payload(here, job, caller, settings)),
        name=f"{job.system}:{job.id}", requester=f"{job.system}:{job.id}", created=now, wall_limit=job.wall,
        collect=settings.collect, collect_limit=settings.collect_limit, is_allotted=True,
        grace=settings.grace or job.grace, labels=(*aliases, *((name, text) for name, text in labels if text)),
    )  # fmt: skip


def payload(here: Surroundings, job: Job, caller: Caller, settings: Settings) -> Payload:
    """What runs inside: the job as its system would have started it, with all that it finds around it."""
    command: Command = job.inside if job.inside.argv else job.native
    copies = stage_cwd(here, caller, settings)
    inside = (*(share.target for share in caller.machine.shares), *(copy.inside for copy in copies))
    env = for_guest(here.env, settings, (*inside, *map(os.fsdecode, job.staged.folders)))
    if settings.scratch:
        env = (*(pair for pair in env if pair[0] != b"TMPDIR"), (b"TMPDIR", SCRATCH_PLACE.encode()))
    return Payload(
        argv=command.argv, program=command.path, account=caller.account, cwd=here.cwd,
        env=env, umask=caller.umask,
        rlimits=caller.rlimits, lingers=job.lingers, terminal=caller.terminal and command.stdin is None,
        stdin=StdinKind.STREAM if command.stdin is not None else caller.stdio[0], stdout=caller.stdio[1],
        stderr=caller.stdio[2], inputs=copies, files=tuple(files(here, job, inside)),
        outputs=tuple(replace(copy, changed_only=True) for copy in copies),
    )  # fmt: skip


def with_defaults(request: Request, defaults: Mapping[bytes, bytes]) -> Request:
    """With the variables of a container image, as `apptainer exec` has them: only those that neither the job has nor are about its user,
    but the image's PATH behind the job's folders on shares."""
    work = request.work
    assert isinstance(work, RunPayload)
    own = dict(work.payload.env)
    folders = [folder for folder in own.get(b"PATH", b"").split(b":") if folder and folder not in ALSO_THERE]
    new = {name: value for name, value in defaults.items() if name not in own and name not in OF_THE_USER}
    if path := defaults.get(b"PATH"):
        new[b"PATH"] = b":".join([*folders, path])
    env = (*(pair for pair in work.payload.env if pair[0] not in new), *new.items())
    return replace(request, work=RunPayload(replace(work.payload, env=env)))


def for_guest(env: Pairs, settings: Settings, inside: Iterable[str]) -> Pairs:
    """The job's variables without the host's own. PATH keeps the system's folders and those below *inside*."""
    kept = tuple(word.encode() for word in settings.keep_env)
    dropped = tuple(word.encode() for word in (*HOST_ONLY, *settings.drop_env))
    folders = tuple(folder.rstrip("/").encode("utf-8", "surrogateescape") for folder in inside)
    ours = ((name, value) for name, value in env if name and (_fits(name, kept) or not _fits(name, dropped)))
    return tuple((name, _path(value, folders) if name == b"PATH" else value) for name, value in ours)


def _fits(name: bytes, patterns: tuple[bytes, ...]) -> bool:
    return any(name.startswith(word[:-1]) if word.endswith(b"*") else name == word for word in patterns)


def _path(value: bytes, folders: tuple[bytes, ...]) -> bytes:
    """What of a search path the guest can have. Never empty: an empty PATH means the current folder."""
    entries = [
        entry for entry in value.split(b":")
        if not entry.startswith(b"/") or entry.rstrip(b"/") in ALSO_THERE or _is_below(entry, folders)
    ]  # fmt: skip
    if not any(entry in SYSTEM_PATH for entry in entries):
        entries += SYSTEM_PATH
    return b":".join(entries)


def files(here: Surroundings, job: Job, inside: Iterable[str]) -> Iterator[PlainFile]:
    """The script, the scheduler's files, folders of the job's own. What lies on a share is there already."""
    shared = tuple(os.fsencode(folder) for folder in inside)
    if job.script and (job.script_skips_line or not _is_below(job.script, shared)):
        yield PlainFile(job.script, script_text(here, job), 0o700)
    for folder in job.staged.folders:
        if not _is_below(folder, shared):
            yield PlainFile(folder, None, 0o700)
    for path in job.staged.into:
        if not _is_below(path, shared):
            with suppress(OSError):  # the system did not make it
                if len(data := here.read(path)) <= LARGEST_FILE:
                    yield PlainFile(path, data, 0o644)


def script_text(here: Surroundings, job: Job) -> bytes:
    """The user's script. Raises InputMissing."""
    name = os.fsdecode(job.script)
    try:
        text = here.read(job.script)
    except OSError as exc:
        hint = "The batch system spooled it there; see its log."
        raise InputMissing(f"{name}: {exc.strerror}", hint=hint) from exc
    if job.script_skips_line:
        text = text.partition(b"\n")[2]
    if len(text) > LARGEST_SCRIPT:
        hint = "Keep the data in a file that the script reads."
        raise InputMissing(f"{name}: larger than {LARGEST_SCRIPT // MIB} MiB", hint=hint)
    return text


def stage_cwd(here: Surroundings, caller: Caller, settings: Settings) -> tuple[Transfer, ...]:
    """The working directory as a copy, if no share has it and the job may write to it. Raises UsageError."""
    path = os.path.realpath(os.fsdecode(here.cwd))
    places = tuple(os.fsencode(share.target) for share in caller.machine.shares)
    if _is_below(here.cwd, places) or path in NEVER_STAGED or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return ()
    left_out = (*_stdio_below(path), *_own_below(path, caller.own))
    size, entries = measure(path, settings.stage_limit, lambda relative: relative in left_out)
    if size > settings.stage_limit or entries > MOST_ENTRIES:
        raise UsageError(
            f"working directory {path}: on no shared folder, and to be copied into the machine it is too large"
            f" (more than {settings.stage_limit // MIB} MiB or {MOST_ENTRIES} files)",
            hint="Submit from a shared folder (your home), or clean the folder up.",
        )
    return (Transfer(path, os.fsdecode(here.cwd), left_out),)


def measure(folder: str, limit: int, is_left_out: Callable[[str], bool]) -> tuple[int, int]:
    """(bytes, entries) below a folder; stops counting soon after one of them is too many. What cannot be read, or has just gone, does not
    count: who copies it says so, and it is no fault of this node."""
    size = entries = 0
    for path, folders, files in os.walk(folder):
        within = path[len(folder) :].lstrip("/")
        entries += len(folders) + len(files)
        if size > limit or entries > MOST_ENTRIES:
            break
        folders[:] = [name for name in folders if not is_left_out(os.path.join(within, name))]
        for name in files:
            with suppress(OSError):
                size += 0 if is_left_out(os.path.join(within, name)) else os.lstat(f"{path}/{name}").st_blocks * 512
    return size, entries


def _stdio_below(folder: str) -> Iterator[str]:
    """The job's output files, relative to the folder: the batch system writes to them, so no copy may come back."""
    for number in (0, 1, 2):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{number}")
            if path.startswith(folder.rstrip("/") + "/"):
                yield os.path.relpath(path, folder)


def _own_below(folder: str, own: Iterable[str]) -> Iterator[str]:
    """belljar's folders that lie in *folder*, or will. HTCondor mounts parts of a job's directory over /tmp."""
    for path in own:
        if path.startswith(folder.rstrip("/") + "/"):
            yield os.path.relpath(path, folder)
            continue
        above = next((str(place) for place in (Path(path), *Path(path).parents) if place.exists()), "/")
        twin = os.path.join(folder, above.lstrip("/"))
        if above != "/" and os.path.isdir(twin) and os.path.samefile(twin, above):
            yield path.lstrip("/")


def _is_below(path: bytes, folders: Iterable[bytes]) -> bool:
    return any(path == folder or path.startswith(folder.rstrip(b"/") + b"/") for folder in folders)
