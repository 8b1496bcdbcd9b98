"""`belljar logs ID` and `belljar events`: what a machine, its console and its QEMU wrote, also after its end; and what happens to
all machines, in one stream."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from belljar.assembly import Runtime
from belljar.cli.parser import MACHINE, Args, acts
from belljar.cli.render import as_json, moment
from belljar.errors import OutputMissing
from belljar.host.watch import changes
from belljar.jobs import plain
from belljar.jobs.users import reach
from belljar.journal import Event, follow, read
from belljar.machine import COLLECTED, CONSOLE_LOG, JOBOUTPUTS, STDERR_LOG, STDOUT_LOG
from belljar.machine.life.output import kept
from belljar.machine.outside.watching import Stream
from belljar.model import QEMU_LOG, VIRTIOFSD_LOG

CHUNK = 1 << 16


def logs(args: Args, runtime: Runtime) -> None:
    runtime, machine = reach(runtime, args.machine)
    folder = machine.folder
    if args.joboutput or args.which == JOBOUTPUTS:
        return _joboutputs(folder, args.joboutput)
    names = {
        "console": CONSOLE_LOG, "qemu": QEMU_LOG, "virtiofsd": VIRTIOFSD_LOG, "stdout": STDOUT_LOG, "stderr": STDERR_LOG,
        "collected": COLLECTED,
    }  # fmt: skip
    follows = args.follow and machine.alive
    if args.which == "collected" and not (folder / COLLECTED).exists():
        hint = "Name folders with `belljar run --collect PATH`, or in `batch.collect` for batch jobs."
        raise OutputMissing(f"{folder.name}: nothing was collected of this machine", hint=hint)
    if args.which in ("stdout", "stderr"):
        return _write(kept(folder / names[args.which], follow=follows))
    if args.which in names:
        path = folder / names[args.which]
        return _write(changes(path)) if follows else _copy(path)
    is_all = args.which is None and not follows
    if is_all:
        print("== journal ==")
    for event in follow(folder) if follows else read(folder):
        print(story(event), flush=True)
    for which in ("qemu", "console") if is_all else ():
        print(f"== {which} ==")
        _copy(folder / names[which])


def story(event: Event) -> str:
    """One event as one line: the time, what happened, the facts."""
    seconds = event.get("time", 0.0)
    clock = f"{moment(seconds)}.{int(seconds % 1 * 1000):03}"
    what = str(event.get("state") if event["event"] == "state" else event["event"])
    facts = [
        f"{name}={_fact(value)}"
        for name, value in event.items()
        if name not in ("time", "event", "state", "machine", "argv") and value not in ("", None)
    ]
    return plain(" ".join((clock, f"{what:<10}", *facts))).rstrip()


def _fact(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if text and " " not in text else json.dumps(text)


def _copy(path: Path) -> None:
    try:
        with open(path, "rb") as file:
            _write(iter(lambda: file.read(CHUNK), b""))
    except FileNotFoundError:
        return  # nothing was written


def _joboutputs(folder: Path, name: str | None) -> None:
    """The names of the guest's files, or one of them. Parts of files that never came whole are left out."""
    files = {path.name: path for path in joboutputs(folder)}
    if not name:
        for path in files.values():
            print(f"{path.stat().st_size:>12}  {plain(path.name)}")
    elif name in files:
        _copy(files[name])
    else:
        hint = f"`belljar logs {folder.name} --{JOBOUTPUTS}` names what it has left."
        raise OutputMissing(f"{folder.name}: the guest has left no {name!r}", hint=hint)


def joboutputs(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in (folder / JOBOUTPUTS).iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def _write(chunks: Iterable[bytes]) -> None:
    """Bytes as they are into a file or pipe; on a terminal, without what a guest could do to it."""
    sys.stdout.flush()
    for chunk in chunks:
        if sys.stdout.isatty():
            sys.stdout.write(plain(chunk.decode(errors="replace").replace("\r\n", "\n"), "\n\t"))
            sys.stdout.flush()
        else:
            sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()


# -- events --------------------------------------------------------------------------------------------------------------


def events(args: Args, runtime: Runtime) -> None:
    begin = time.time() - args.since
    # Those to come are watched before those so far are read: nothing falls between.
    stream = runtime.machines.events() if args.follow else None
    shown = set()
    for event in past(runtime, begin):
        shown.add(_key(event))
        _print(event, args.format)

    async def follow(stream: Stream) -> None:
        async for event in stream:
            if event.get("time", 0.0) >= begin and _key(event) not in shown:
                _print(event, args.format)

    if stream is not None:
        asyncio.run(follow(stream))


def past(runtime: Runtime, begin: float) -> list[Event]:
    """The events of all machines since then, live and ended, by time."""
    events = []
    for machine in runtime.machines.list(ended=True):
        if machine.ended is None or machine.ended >= begin:
            events += [{**event, "machine": machine.id} for event in read(machine.folder)]
    return sorted((event for event in events if event.get("time", 0.0) >= begin), key=lambda event: event["time"])


def _print(event: Event, form: str) -> None:
    print(as_json(event, indent=None) if form == "json" else f"{event['machine']}  {story(event)}", flush=True)


def _key(event: Event) -> tuple[object, ...]:
    return event["machine"], event.get("time"), event.get("event"), event.get("state")


VERBS = acts(
    f"""
    # logs | Show the records of a machine. Without an option: its journal (what belljar did), its serial console, QEMU's messages.
    $ %(prog)s [-h] [-f] [--stdout | --stderr | --console | --qemu | --virtiofsd | --journal |
    $              --collected | --joboutputs | --joboutput NAME] ID
    {MACHINE}
    / --stdout @which | standard output of a detached machine's job
    / --stderr @which | its standard error
    / --console @which | the guest's serial console
    / --qemu @which | what QEMU wrote to stderr
    / --virtiofsd @which | messages of virtiofsd, which shares folders
    / --journal @which | what belljar did, event by event
    / --collected @which | the tar archive of `run --collect`
    / --joboutputs @which | names of the files that the guest left as job outputs
    / --joboutput NAME | the content of one of them
    -f --follow | show new lines until the machine has ended (the journal's, unless you name another)
    # events +format | Show what happened to your machines, oldest first.
    -f --follow | show new events as they happen, until interrupted
    --since TIME =1d | begin this long ago, such as 1h (default: 1d)""",
    globals(),
)
