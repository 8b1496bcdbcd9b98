"""`belljar internal keep`: read a request as one line of JSON from standard input, keep its machine in a process of its own, and
print one line of JSON once it is claimed (with --count: so many, one after the other): {"id": ...}, or {"error": class, "message": ..., "hint": ...}. For programs, not for people."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from belljar.assembly import Runtime
from belljar.cli import is_reader_gone
from belljar.cli.parser import Args
from belljar.errors import OUR_FAILURE, BadOption, BadRequest, BelljarError, HostError, in_words
from belljar.guest import Streams
from belljar.guest.stdio import FdSource
from belljar.machine import KEEPER_LOG, STDERR_LOG, STDOUT_LOG
from belljar.machine.life.output import FileSink
from belljar.machine.outside.detached import LONGEST_ANSWER, answer_of
from belljar.model import Request, RunPayload, StdinKind
from belljar.records import replace

OF_ALL = ("reading", "jobs.attend", "jobs.starting", "guest.conversation", "machine.life.own_work")
# What a clone imports on its way; the process that makes many of them does so once.
OF_EACH = ("guest.relay", *(f"hypervisor.qemu.{name}" for name in ("process.complaints", "proof", "template.plugging")))
LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


OPTIONS = """
--count N =1 | read so many requests, a line each, and answer each; what every one needs is imported once
--stdin N | the open descriptor that the payload reads (default: nothing, /dev/null)
--tied | end the machine when standard input is closed, and so with the process that holds its other end"""


def run(args: Args, runtime: Runtime) -> int:
    """The part of whoever is asked: it ends with the last answer, and a keeper is nobody's child."""
    from belljar.jobs.starting import finish_the_dead

    # What every request needs is there before it comes. What is wrong with the settings is told to the asker.
    for name in (*OF_ALL, *(OF_EACH if args.count > 1 else ())):
        import_module(f"belljar.{name}")
    with suppress(BelljarError, OSError):
        runtime.supervisor()
    is_good = True
    try:
        lines = _lines(args)
        finish_the_dead(runtime)
    except (BelljarError, OSError) as exc:
        os.write(1, _refusal(exc))
        return OUR_FAILURE
    gc.freeze()  # what is there is no garbage: a keeper that looked would have to copy its pages
    for line in lines:
        answer = _answer(line, args, runtime)
        is_good = is_good and b'"id"' in answer[:6]
        os.write(1, answer)
    return 0 if is_good else OUR_FAILURE


def _answer(line: bytes, args: Args, runtime: Runtime) -> bytes:
    """Of one keeper, which has claimed its machine, or of what kept it from that."""
    try:
        request = asked(line, args, runtime)
    except BelljarError as exc:
        return _refusal(exc)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        stdin = args.stdin
        if stdin is not None and args.count > 1:  # each reads from its beginning
            stdin = os.open(f"/proc/self/fd/{stdin}", os.O_RDONLY | os.O_CLOEXEC)
        _keep(request, stdin, args.tied, writer, runtime)
    os.close(writer)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))  # whoever asked gave up waiting
    with open(reader, "rb") as file:
        answer = file.read(LONGEST_ANSWER) or _refusal(_died(child))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return answer


def _refusal(error: BelljarError | OSError) -> bytes:
    return _line(answer_of(error if isinstance(error, BelljarError) else HostError(in_words(error))))


def _line(answer: dict[str, str]) -> bytes:
    return json.dumps(answer).encode()[: LONGEST_ANSWER - 1] + b"\n"


def _lines(args: Args) -> list[bytes]:
    """All that is read of standard input. What else comes on a tie means nothing."""
    if args.tied and not stat.S_ISFIFO(os.fstat(0).st_mode) and not stat.S_ISSOCK(os.fstat(0).st_mode):
        hint = "Give it a pipe, and keep it open."
        raise BadOption("--tied: standard input is neither a pipe nor a socket", hint=hint)
    if args.stdin is not None:
        try:
            os.set_inheritable(args.stdin, False)
        except OSError as exc:
            raise BadOption(f"--stdin {args.stdin}: {exc.strerror}", hint="Give an open descriptor.") from exc
    with open(0, "rb", closefd=False) as file:
        return [file.readline() for _ in range(args.count)]


def asked(line: bytes, args: Args, runtime: Runtime) -> Request:
    """The request, as a machine on its own can have it."""
    try:
        request = Request.from_json(json.loads(line))
    except ValueError as exc:
        raise BadRequest(f"standard input: {exc}") from exc
    if any(folder.exists() for folder in (runtime.folders.machine(request.id), runtime.folders.ended(request.id))):
        raise BadRequest(f"id: {request.id!r}: there is, or was, a machine of this id", hint="Draw another one.")
    if not isinstance(request.work, RunPayload):
        return request
    payload = request.work.payload
    if payload.terminal:
        raise BadRequest("work.payload.terminal: True: a machine on its own has no terminal")
    stderr = StdinKind.STDOUT if payload.stderr is StdinKind.STDOUT else StdinKind.STREAM
    stdin = StdinKind.NULL if args.stdin is None else StdinKind.STREAM
    payload = replace(payload, stdin=stdin, stdout=StdinKind.STREAM, stderr=stderr)
    return replace(request, work=replace(request.work, payload=payload))


def _died(child: int) -> BelljarError:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    how = f"was ended by signal {-status}" if status < 0 else f"ended with exit code {status}"
    return HostError(f"the keeper {how} before it had claimed its machine", hint="Look at what it wrote to stderr.")


# -- the keeper ------------------------------------------------------------------------------------------------------


def _keep(request: Request, stdin: int | None, tied: bool, writer: int, runtime: Runtime) -> NoReturn:
    answer = _refusal(HostError("the machine was cancelled before it was begun"))

    def tell(answer: bytes) -> None:
        nonlocal writer
        with suppress(OSError):  # whoever asked may be gone
            os.write(writer, answer)
        os.close(writer)
        writer = -1

    def claimed() -> None:
        with suppress(OSError):
            _leave_the_asker(request, runtime.folders.machine(request.id), tied)
        tell(_line({"id": request.id}))

    try:
        from belljar.jobs.attend import attend
        from belljar.jobs.starting import ensure_image, widen_limits

        widen_limits()
        ensure_image(runtime, request.machine.image, public_only=request.machine.public_image)
        runtime.images.resolve(request.machine.image)  # who asks hears at once of one that is not there
        if is_reader_gone(1):  # while an image was fetched or built
            raise HostError("who asked for the machine is gone", hint="It was not begun: nobody would know of it.")
        outcome = attend(runtime, request, _streams(request, stdin, runtime), tie=0 if tied else None, claimed=claimed)
        if outcome.error:  # else it was cancelled
            answer = _line({"error": outcome.error, "message": outcome.reason, "hint": outcome.hint})
    except (BelljarError, OSError) as exc:
        answer = _refusal(exc)
    except BaseException:  # whatever it is, whoever asked gets an answer, and this process ends below
        import traceback

        traceback.print_exc()
    if writer >= 0:
        tell(answer)
    os._exit(0)


def _leave_the_asker(request: Request, folder: Path, tied: bool) -> None:
    """From here on what the keeper says is in the machine's folder, and nothing holds the asker's pipes or folder."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    if isinstance(request.work, RunPayload):  # who follows them finds them from now on
        for name in (STDOUT_LOG, STDERR_LOG):
            os.close(os.open(folder / name, LOG_FLAGS, 0o600))
    log = os.open(folder / KEEPER_LOG, LOG_FLAGS, 0o600)
    for number, file in enumerate((0 if tied else null, null, log)):
        os.dup2(file, number)
    os.close(null)
    os.close(log)


def _streams(request: Request, stdin: int | None, runtime: Runtime) -> Streams:
    if not isinstance(request.work, RunPayload):
        return Streams(None, None, None)
    folder, limit = runtime.folders.machine(request.id), runtime.settings.machine.output_limit
    source = None if stdin is None else FdSource(stdin)
    is_apart = request.work.payload.stderr is StdinKind.STREAM
    stderr = FileSink(folder / STDERR_LOG, limit) if is_apart else None
    return Streams(source, FileSink(folder / STDOUT_LOG, limit), stderr)
