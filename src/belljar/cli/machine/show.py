"""`belljar ps`, `show`, `logs` and `events`: the machines of this user, what is known about one and what it wrote, also after its
end; and what happens to all machines, in one stream."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import MACHINE, Args, acts
from belljar.cli.render import as_json, duration, moment
from belljar.cli.render import show as put
from belljar.errors import BadOption, NotPermitted, OutputMissing
from belljar.host.watch import changes
from belljar.jobs import complain, plain, size
from belljar.jobs.users import reach, rows_of_all
from belljar.journal import JOURNAL, Event, follow, read
from belljar.machine import (
    COLLECTED,
    CONSOLE_LOG,
    JOBOUTPUTS,
    KEPT_DISK,
    OUTCOME,
    REQUEST,
    STDERR_LOG,
    STDOUT_LOG,
    MachineView,
)
from belljar.machine.life.claim import room_now
from belljar.machine.life.control import published
from belljar.machine.life.output import kept
from belljar.machine.outside.registry import jobs_of
from belljar.machine.outside.watching import Stream
from belljar.model import QEMU_LOG, VIRTIOFSD_LOG, Pages

HEADS = ("ID", "NAME", "STATE", "IMAGE", "START", "CPUS", "MEMORY", "REQUESTER", "AGE", "RESULT")
SHOWN = ("cause", "class", "exit_code", "signal", "reason", "hint")  # of an outcome, as they are
Facts = list[tuple[str, Any]]


def ps(args: Args, runtime: Runtime) -> int:
    if args.all_users and args.quiet:
        raise BadOption("--quiet with --all-users: an id without its user names no machine")
    machines, now = runtime.machines.list(ended=args.all)[:: -1 if args.all else 1], time.time()
    rows = [row(machine, now) for machine in machines]
    if args.all_users:
        return _of_all(runtime, rows, args)
    if args.quiet:
        print("".join(f"{machine.id}\n" for machine in machines), end="")
        return 0
    put(machines, HEADS, rows, as_=args.format)
    if args.format == "table" and any(machine.alive for machine in machines):
        room = room_now(runtime.folders, runtime.settings.host)
        cpus = "" if room.cpus == float("inf") else f" of {room.cpus:g}"
        memory = f"{size(room.memory_reserved)} of memory ({size(room.memory)} left)"
        print(f"reserved: {memory}, {room.cpus_taken}{cpus} cpus")
    return 0


def _of_all(runtime: Runtime, own: list[tuple[object, ...]], args: Args) -> int:
    """Exit 1 when some user's machines could not be listed."""
    if os.geteuid() != 0:
        raise NotPermitted("--all-users: only root sees everybody's machines")
    now = time.time()
    theirs, trouble = rows_of_all(runtime, lambda view: dict(zip(HEADS, row(view, now), strict=True)), ended=args.all)
    rows = [dict(zip(("USER", *HEADS), ("root", *line), strict=True)) for line in own] + theirs
    put(rows, ("USER", *HEADS), [tuple(map(line.get, ("USER", *HEADS))) for line in rows], as_=args.format)
    for line in trouble:
        complain(line, "")
    return 1 if trouble else 0


def row(machine: MachineView, now: float) -> tuple[object, ...]:
    age = duration(max(0.0, now - machine.created)) if machine.created else ""
    return (
        machine.id, machine.name, state_of(machine), machine.image, machine.start, machine.cpus, size(machine.memory),
        machine.requester, age, result(machine),
    )  # fmt: skip


def state_of(machine: MachineView) -> str:
    """A supervisor that is dead left its last state behind; `belljar reap` will finish what it began."""
    return machine.state if machine.alive or machine.ended else f"{machine.state} (abandoned)"


def result(machine: MachineView) -> str:
    """How it ended, briefly."""
    outcome = machine.outcome or {}
    signal, code, cause = (outcome.get(name) for name in ("signal", "exit_code", "cause"))
    end = f"signal {signal}" if signal is not None else f"exit {code}" if code is not None else ""
    return end if cause == "finished" else f"{cause or ''} {end}".strip()


# -- show ----------------------------------------------------------------------------------------------------------------


def show(args: Args, runtime: Runtime) -> None:
    runtime, machine = reach(runtime, args.machine)
    if args.format == "json":
        print(as_json(_described(machine, runtime)))
        return
    for title, rows in sections(machine, runtime):
        lines = [f"  {name:<14} {plain(str(value))}" for name, value in rows if value not in ("", None, [], {})]
        if lines:
            print("\n".join((title, *lines)))


def _described(machine: MachineView, runtime: Runtime) -> dict[str, Any]:
    """What the table shows, for programs."""
    return {
        **{name: getattr(machine, name) for name in machine.__dataclass_fields__},
        "network": _events(machine, "network", "network-refused"),
        "ports": published(machine.folder),
        "placement": _events(machine, "placement", "pinned"),
        "records": [{"what": what, "path": path, "size": path.stat().st_size} for what, path in _files(machine)],
        "qemu": _last(machine, "spawned", "argv") or [],
        "other_starts": [start.id for start in _same_job(machine, runtime)],
    }


def sections(machine: MachineView, runtime: Runtime) -> list[tuple[str, Facts]]:
    """What the table shows, by heading; empty facts are left out when it is printed."""
    phases = (machine.outcome or {}).get("phases", {})
    argv = shlex.join(map(str, _last(machine, "spawned", "argv") or ())) if runtime.verbose else ""
    wall, starts = machine.request.get("wall_limit"), _same_job(machine, runtime)
    limit = f"{wall:.0f} s" if isinstance(wall, (int, float)) else "none" if machine.pairs else ""
    return [
        (f"machine {machine.id}", _machine(machine)),
        ("job", [*machine.pairs, ("wall limit", limit)]),  # its queue, its name, its other ids, its earlier starts
        ("payload", _payload(machine.payload)),
        ("outcome", _outcome(machine.outcome or {})),
        ("seconds per phase", [(name, f"{seconds:.3f}") for name, seconds in phases.items()]),
        ("network", _network(machine)),
        ("records", [(what, f"{path} ({size(path.stat().st_size)})") for what, path in _files(machine)]),
        ("QEMU", [("started as", argv)]),
        (
            "other starts of this job",
            [(view.id, f"{moment(view.created)}  {result(view) or view.state}") for view in starts],
        ),
    ]


def _machine(machine: MachineView) -> Facts:
    asked = machine.request.get("machine") or {}
    shares = [
        f"{share['source']} on {share['target']}{' (read-only)' * bool(share.get('readonly'))}"
        for share in asked.get("shares", [])
    ]
    secrets = (f"{secret['name']} for {', '.join(secret['hosts'])}" for secret in asked.get("secrets", ()))
    return [
        ("name", machine.name),
        ("state", state_of(machine).replace("(abandoned)", "(abandoned: see `belljar reap`)")),
        ("image", machine.image),
        ("image digest", (machine.outcome or {}).get("image_digest")),
        ("image manifest", (machine.outcome or {}).get("image_manifest")),
        ("cpus", machine.cpus),
        ("memory", size(machine.memory)),
        ("network", ":".join(filter(None, (asked.get("network"), asked.get("network_name"))))),
        ("ports", "; ".join(f"{port.place} to {port.guest}" for port in published(machine.folder))),
        ("reaches only", ", ".join(asked.get("allow", ()))),
        ("secrets", "; ".join(secrets)),
        ("shares", "; ".join(shares)),
        *_placement(machine),
        ("start", machine.start),
        ("requester", machine.requester),
        ("owner", _user(machine.owner)),
        ("created", moment(machine.created)),
        ("ended", moment(machine.ended)),
        ("deadline", moment(_last(machine, "deadline", "at"))),
        ("QEMU's pid", machine.pid),
        ("folder", machine.folder),
    ]


def _placement(machine: MachineView) -> Facts:
    """Where its virtual processors run, and what its memory consists of."""
    pages = (machine.request.get("machine") or {}).get("pages")
    cpus, nodes = (", ".join(map(str, _last(machine, "placement", name) or ())) for name in ("cpus", "nodes"))
    return [
        ("pinned to", cpus and f"cpu {cpus} of this host, NUMA node {nodes}"),
        ("not pinned", _last(machine, "placement", "reason")),
        ("memory pages", "" if pages == Pages.DEFAULT.value else pages),
    ]


def _same_job(machine: MachineView, runtime: Runtime) -> list[MachineView]:
    """The machines that the same batch job had before, or has elsewhere on this node."""
    jobs = jobs_of(machine)
    others = runtime.machines.list(ended=True) if jobs else []
    return [other for other in others if jobs_of(other) & jobs and other.id != machine.id]


def _network(machine: MachineView) -> Facts:
    """Its addresses, where they are its own, and where it was kept from going."""
    lines: Facts = []
    for event in _events(machine, "network"):
        lines += [("MAC address", event.get("mac")), ("address", event.get("address"))]
    refused = _events(machine, "network-refused")
    for event in refused[:20]:
        place = f"{event['address']}:{event.get('port')}/{event.get('transport')}" if event.get("address") else ""
        lines.append(("refused", f"{place} ({event.get('reason')})" if place else event.get("reason")))
    return [*lines, *(("refusals", f"at least {event.get('count')}") for event in refused[-1:])]


def _files(machine: MachineView) -> list[tuple[str, Path]]:
    names = (
        ("request", REQUEST), ("outcome", OUTCOME), ("journal", JOURNAL), ("console", CONSOLE_LOG), ("QEMU's words", QEMU_LOG),
        ("virtiofsd", VIRTIOFSD_LOG), ("collected", COLLECTED), ("disk", KEPT_DISK),
    )  # fmt: skip
    paths = [(what, machine.folder / name) for what, name in names]
    paths += [(f"joboutput {path.name}", path) for path in joboutputs(machine.folder)]
    return [(what, path) for what, path in paths if path.is_file()]


def _events(machine: MachineView, *kinds: str) -> list[Event]:
    """Those of these kinds in its journal."""
    return [event for event in read(machine.folder) if event["event"] in kinds]


def _last(machine: MachineView, kind: str, key: str) -> Any:
    """What the journal's last event of this kind tells."""
    events = _events(machine, kind)
    return events[-1].get(key) if events else None


def _payload(payload: dict[str, Any]) -> Facts:
    account = payload.get("account") or {}
    return [
        ("command", shlex.join(map(str, payload.get("argv") or []))),
        ("user", f"{account.get('name')} ({account.get('uid')}:{account.get('gid')})" if account else ""),
        ("folder", payload.get("cwd")),
        ("files in", "; ".join(f"{file['outside']} to {file['inside']}" for file in payload.get("inputs") or [])),
        ("files out", "; ".join(f"{file['inside']} to {file['outside']}" for file in payload.get("outputs") or [])),
    ]


def _outcome(outcome: dict[str, Any]) -> Facts:
    guest, host, why = outcome.get("guest") or {}, outcome.get("host") or {}, outcome.get("context_reason")
    return [
        *((name.replace("_", " "), outcome.get(name)) for name in SHOWN),
        ("started as", " ".join(filter(None, (outcome.get("start"), outcome.get("accelerator"))))),
        ("why so", outcome.get("start_reason")),
        (f"why {outcome.get('accelerator')}", outcome.get("accelerator_reason")),
        ("context", f"{outcome.get('context') or ''}{f' ({why})' if why else ''}".strip()),
        ("guest used", _usage(guest)),
        ("host used", _usage(host)),
        *(("trouble at its end", trouble) for trouble in outcome.get("troubles") or ()),
    ]


def _usage(usage: dict[str, Any]) -> str:
    if not usage.get("peak_memory"):
        return ""
    return f"{usage.get('user', 0):.2f} s user, {usage.get('system', 0):.2f} s system, {size(usage['peak_memory'])} at most"


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} ({uid})"
    except KeyError:
        return str(uid)


# -- logs -----------------------------------------------------------------------------------------------------------------


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
    """One event as one line: the time, what happened, the details."""
    seconds = event.get("time", 0.0)
    clock = f"{moment(seconds)}.{int(seconds % 1 * 1000):03}"
    what = str(event.get("state") if event["event"] == "state" else event["event"])
    details = [
        f"{name}={_fact(value)}"
        for name, value in event.items()
        if name not in ("time", "event", "state", "machine", "argv") and value not in ("", None)
    ]
    return plain(" ".join((clock, f"{what:<10}", *details))).rstrip()


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
    # ps +format | List machines, the newest first.
    -a --all | also those that have ended, while their records are kept
    --all-users | as root: those of all users of this node (`paths.node`)
    -q --quiet | only the IDs, one per line
    # show +format | Show what was asked of a machine, its state, how it ended, and how long each phase took. `belljar -v show` adds
    | QEMU's command line.
    {MACHINE}
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
