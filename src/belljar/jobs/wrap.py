"""`belljar internal wrap SYSTEM`: what a batch system starts in place of a job's script. Every job of a site may come this way.

A job that wants no machine becomes what its system would have started: by execve, with the environment as it came, so
that nothing of belljar is left in its process. The others get a machine and this process ends as they end.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from belljar import batch, errors
from belljar.batch.job.terms import Dialect, Job, Surroundings, Verdict
from belljar.host.commands import SEARCH_PATH
from belljar.host.files import read_capped
from belljar.jobs import Runtime, complain, tell_troubles
from belljar.model import Cause, MachineSpec, Outcome, OutcomeClass, Request, Share
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.batch.job.verdict import Run
    from belljar.jobs.batch.checkpoints import Checkpoints

LARGEST_FILE = 16 << 20
LONGEST_LINE = 64 << 10
KEPT = ("HOME", "USER", "LOGNAME", "LANG", "TERM", "TZ")  # of the job's variables, for belljar itself and QEMU


def run(system: str, words: list[str], runtime: Runtime) -> int:
    dialect = batch.load(system).dialect
    here = surroundings(words)
    clear_environment(here)
    job = dialect.read(here)
    here = replace(here, env=tuple(pair for pair in here.env if pair[0] not in job.redirect))
    runtime.in_job = True
    (mistake, hides_the_image), image = understood(runtime), job.image
    settings, checkpoints = runtime.settings, None
    try:
        from belljar.batch.job.policy import checkpoint_of, image_for

        image = image_for(job.image, job.queue, settings.batch)
        if image and job.visitor and runtime.commands:
            return become(here, replace(job, native=job.visitor(runtime.commands.parent)), runtime)
        if not image and not hides_the_image:
            return become(here, job, runtime)
        if mistake:
            raise mistake
        if rule := checkpoint_of(job.checkpoint, settings.batch):
            from belljar.jobs.batch.checkpoints import Checkpoints
            from belljar.jobs.node import runner

            checkpoints = Checkpoints(rule, job, dialect, settings.batch, runner(runtime, system))
        outcome = in_machine(here, job, image, runtime, checkpoints)
    except (errors.BelljarError, OSError) as exc:
        from belljar.machine.planning.refusal import put_on_record

        error = errors.HostError(errors.in_words(exc)) if isinstance(exc, OSError) else exc
        outcome = put_on_record(error, f"{job.system}:{job.id}", image, runtime.folders)
    from belljar.jobs.node import runner

    if checkpoints is not None and checkpoints.has_any():
        job = replace(job, reruns=True)  # it goes on, and does not begin again
    return leave(dialect, job, outcome, settings.batch, runner(runtime, system), checkpoints)


# -- settings ------------------------------------------------------------------------------------------------------------


def understood(runtime: Runtime) -> tuple[errors.BelljarError | None, bool]:
    """What is wrong with the settings, and whether that hides which image the job gets; the runtime then goes by what can
    be understood of them. A mistake of the site fails no job: jobs without a machine need no settings, and the others may
    run on another node."""
    try:
        runtime.settings  # noqa: B018 - to see whether they can be read
        return None, False
    except errors.BelljarError as exc:
        mistakes = runtime.inspect().mistakes
        own = [mistake for mistake in mistakes if mistake.is_users]
        of_image = ("", "batch", "batch.default_image", "batch.queue_images")
        hides = any(mistake.key in of_image and not mistake.is_users for mistake in mistakes)
        text = "; ".join(map(str, own or mistakes)) or exc.message
        sites = errors.HostError(f"this node's settings: {text}", hint="The site has to correct them.")
        runtime.is_lenient = True
        return errors.BadSetting(text) if own else sites, hides


# -- the caller ----------------------------------------------------------------------------------------------------------


def surroundings(words: list[str]) -> Surroundings:
    """This process's own. Options of the redirect may come as one word: that is how the kernel passes a `#!` line."""
    options, rest = dict[str, str](), list(words)
    while rest and rest[0].startswith("--") and (word := rest.pop(0)) != "--":
        for option in word.split():
            if (match := re.fullmatch("--([^=]+)=(.*)", option, re.DOTALL)) is None:
                raise errors.BadOption(f"{option}: not of the form --WORD=VALUE")
            options[match[1]] = match[2]
    return Surroundings(
        argv=tuple(map(os.fsencode, rest)), env=environment(), cwd=_cwd(), uid=os.geteuid(),
        gid=os.getegid(), groups=tuple(os.getgroups()), options=options, stdin=_stdin, read=_read,
    )  # fmt: skip


def environment() -> tuple[tuple[bytes, bytes], ...]:
    """The variables this process was started with, in their order: Python may have changed its own copy."""
    with open("/proc/self/environ", "rb") as file:
        pairs = (word.partition(b"=") for word in file.read().split(b"\0") if word)
    return tuple((name, value) for name, _, value in pairs)


def clear_environment(here: Surroundings) -> None:
    """What the job's environment says is for the job: neither belljar's helpers nor QEMU are to load its libraries."""
    names = {name.decode() for name, _ in here.env if name.isascii()}
    kept = {name: here.var(name) for name in names if name in KEPT or name.startswith("BELLJAR_")}
    os.environ.clear()
    os.environ.update({"PATH": SEARCH_PATH, **kept})


def _cwd() -> bytes:
    try:
        return os.getcwdb()
    except FileNotFoundError:
        return b"/"


def _stdin() -> bytes:
    """All of standard input: a pipe in which a system tells what to run."""
    with open(0, "rb", closefd=False) as file:
        data = file.read(LONGEST_LINE + 1)
    if len(data) > LONGEST_LINE:
        raise errors.BadOption("standard input: more than the name of a script")
    return data


def _read(path: bytes) -> bytes:
    try:
        return read_capped(Path(os.fsdecode(path)), LARGEST_FILE)
    except errors.UnsafeFolder:  # a file that a user named
        raise OSError(errno.EINVAL, f"no plain file, or larger than {LARGEST_FILE >> 20} MiB") from None


# -- without a machine ---------------------------------------------------------------------------------------------------


def become(here: Surroundings, job: Job, runtime: Runtime) -> int:
    """Become what the system would have started. Returns only where the system has its own answer to a command that
    cannot be started. Python changed the handling of two signals; both are restored."""
    ignored = ignored_by_parent() if job.inherits_ignored else 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN if ignored >> (number - 1) & 1 else signal.SIG_DFL)
    if job.notice is not None:
        from belljar.jobs.batch.notice import stand_by

        stand_by(job.notice)
    command = job.native
    if command.stdin is not None:
        reader, writer = os.pipe()  # both end with this program; the reader's copy stays
        os.write(writer, command.stdin)  # at most LONGEST_LINE: it fits into the pipe
        os.dup2(reader, 0)
    try:
        start = execute if command.unstarted is None else _execve
        start(command.path, list(command.argv), here)
    except OSError as exc:
        if command.unstarted is not None:
            from belljar.jobs.batch.ending import carry_out, end
            from belljar.jobs.node import runner

            return end(carry_out(command.unstarted(exc), runner(runtime, job.system))[0])
        complain(f"{os.fsdecode(command.path)}: {exc.strerror}")
        os._exit(126 if exc.errno in (8, 13) else 127)


def ignored_by_parent() -> int:
    """The signals that our parent ignores, as a mask: Python does not say which were ignored when it began."""
    with suppress(OSError), open(f"/proc/{os.getppid()}/status", "rb") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith(b"SigIgn:"))
    return 0


def execute(path: bytes, argv: list[bytes], here: Surroundings) -> NoReturn:
    """As execvp: the first of that name in the job's PATH; the shell for a script without a first line."""
    trouble = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for folder in os.fsencode(here.var("PATH")).split(b":") if b"/" not in path else [b""]:
        try:
            _execve(candidate := os.path.join(folder, path), argv, here)
        except OSError as exc:
            if exc.errno == errno.ENOEXEC:
                _execve(b"/bin/sh", [b"/bin/sh", candidate, *argv[1:]], here)
            trouble = trouble if exc.errno == errno.ENOENT else exc
    raise trouble


def _execve(path: bytes, argv: list[bytes], here: Surroundings) -> NoReturn:
    """Python refuses an entry `=x`, which has no name and which a job may have all the same; nor can it say a name twice."""
    if len(env := dict(here.env)) == len(here.env) and b"" not in env:
        os.execve(path, argv, env)
    import ctypes

    def words(texts: list[bytes]) -> object:
        return (ctypes.c_char_p * (len(texts) + 1))(*texts, None)

    pairs = [name + b"=" + value for name, value in here.env]
    ctypes.CDLL(None, use_errno=True).execve(path, words(argv), words(pairs))
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# -- in a machine --------------------------------------------------------------------------------------------------------


def in_machine(
    here: Surroundings, job: Job, image: str, runtime: Runtime, checkpoints: Checkpoints | None = None
) -> Outcome:
    """Run the job in its machine. Raises BelljarError for what is refused before there is one."""
    from belljar.jobs.starting import START_PATIENCE, check_folder, environment_of, widen_limits

    check_folder(runtime)
    request = make_request(here, job, image, runtime, checkpoints)
    from belljar.batch.job.policy import Asker, may_be_own
    from belljar.batch.job.request import with_defaults
    from belljar.host.caller import caller
    from belljar.jobs.attend import attend

    widen_limits()
    runtime.reaper.quick(START_PATIENCE)  # what cannot be finished is for the site to mend, not for this job
    try:
        runtime.images.settle(runtime.settings.image.default, own=True)  # the workshop's
        own = may_be_own(Asker.of(caller(), job.queue), runtime.settings.batch)
        runtime.images.settle(image, own=own, pulls="://" in image)  # the rules have judged that
        runtime.images.ensure(image)
        container = runtime.images.resolve(image).container
    except errors.ImageUnknown as exc:
        if job.image:
            raise
        raise errors.NoStore(f"{exc.message}, and the site gives it to jobs that name none") from exc
    if container:
        request = with_defaults(request, environment_of(container))
    command = job.inside if job.inside.argv else job.native
    alone = not job.signals_reach_all
    return attend(runtime, request, stdin=command.stdin, alone=alone, notice=job.notice, checkpoints=checkpoints)


def make_request(
    here: Surroundings, job: Job, image: str, runtime: Runtime, checkpoints: Checkpoints | None = None
) -> Request:
    """A job with checkpoints sees no shares, which they could not hold: its working directory is copied."""
    from belljar.batch.job.request import Caller, build
    from belljar.host.caller import caller as own
    from belljar.host.caller import rlimits, umask
    from belljar.jobs.shares import of_site
    from belljar.jobs.starting import kind, usual

    settings, system = runtime.settings, batch.load(job.system)
    shares, devices = tuple[Share, ...](), tuple[str, ...]()
    if checkpoints is None:
        missing = "batch.shares: {}: no such folder on this node"
        shares = of_site(settings.batch.shares, lambda folder: complain(missing.format(folder)))
    env = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in here.env}
    if given := system.dialect.devices(env):
        from belljar.jobs.devices import of_job

        devices = tuple(f"pci:{address}" for address in of_job(given, runtime, system.title))
    caller = Caller(
        account=own(), umask=umask(), rlimits=rlimits(), stdio=(kind(0), kind(1), kind(2)),
        machine=MachineSpec(image, shares=shares, devices=devices, **usual(settings.machine)), terminal=os.isatty(0) and os.isatty(1),
        own=tuple(map(str, (settings.paths.run, settings.paths.scratch, settings.paths.store, settings.paths.logs))),
    )  # fmt: skip
    request = build(here, job, caller, settings.batch, time.time())
    return checkpoints.asked(request) if checkpoints else request


# -- the end -------------------------------------------------------------------------------------------------------------


def leave(
    dialect: Dialect, job: Job, outcome: Outcome, settings: batch.Settings, run: Run, speaker: Checkpoints | None = None
) -> int:
    """End as the verdict says, in the system's own way. *speaker*: the checkpoints of a job that has some speak for it."""
    from belljar.batch.job.verdict import AGAIN, has_begun, judge
    from belljar.jobs.batch.ending import finish

    job, tries = count_tries(dialect, job, run) if outcome.klass in AGAIN else (job, 1)
    verdict = judge(outcome, job, tries, settings)
    # One that had begun may fail yet, for the system's hook to decide.
    if not (job.keeps_output and verdict in (Verdict.REQUEUE, Verdict.HOLD)) or has_begun(outcome):
        tell(outcome, verdict)
    tell_troubles(outcome)
    return finish((speaker or dialect).tell(job, verdict, outcome, tries, settings), verdict, run)


def count_tries(dialect: Dialect, job: Job, run: Run) -> tuple[Job, int]:
    """The job as its system knows it, and how often it could not be started, this time included."""
    with suppress(errors.BelljarError, ValueError):
        if command := dialect.count(job):
            job = dialect.counted(job, run(command))
            return job, 1 + job.failed_starts
    return job, 1 + job.started_before


def tell(outcome: Outcome, verdict: Verdict) -> None:
    """One line on the job's stderr where the job did not end by itself."""
    has_ended = verdict is Verdict.MIRROR and outcome.cause in (Cause.FINISHED, Cause.CANCELLED) and not outcome.error
    if has_ended or outcome.cause is Cause.CHECKPOINTED:
        return
    ended = f"{outcome.id}: " if outcome.id else ""
    hint = outcome.hint if outcome.klass is not OutcomeClass.CANCELLED else ""
    complain(f"{ended}{outcome.reason}", hint)
