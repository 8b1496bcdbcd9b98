"""`belljar reap`: finish what dead supervisors left; with --batch also end machines whose batch job is gone. `belljar
kill-all`: kill every QEMU of ours, found by the mark on its command line in /proc, even when settings, store and all
else are broken."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from belljar.cli.parser import Args, acts
from belljar.errors import BadOption
from belljar.hints import TYPE_CHECKING
from belljar.host import processes
from belljar.jobs import complain

if TYPE_CHECKING:
    from belljar.assembly import Runtime

MARK = re.compile(rb"(?:^|,)guest=belljar-([A-Za-z0-9._-]{1,80})(?:,|$)")
FIRST = 2  # of real-time priorities; those that it kills have the one below
DEADLINE = 10.0  # seconds until a killed process must be gone


def reap(args: Args, runtime: Runtime) -> int:
    """Exit 1 when a system or a user's folder could not be asked, or something of a machine could not be cleared away."""
    from belljar import batch
    from belljar.cli.render import show
    from belljar.jobs import reap as reaping

    if args.batch and args.batch not in batch.names():
        raise BadOption(f"--batch {args.batch}: no such system", hint=f"Known are {', '.join(batch.names())}.")
    systems = () if args.batch is None else (args.batch,) if args.batch else batch.names()
    rows, trouble = reaping.reap(runtime, systems, dry=args.dry_run)
    if rows or args.format == "json":
        cells = [(row.user, row.machine, row.what, row.where, row.error) for row in rows]
        show(rows, ("USER", "MACHINE", "WHAT", "WHERE", "ERROR"), cells, as_=args.format)
    for line in trouble:
        complain(line, "")
    return 1 if trouble or any(row.error for row in rows) else 0


# -- kill-all ------------------------------------------------------------------------------------------------------------


def kill_all(args: Args, runtime: None) -> int:
    """Each is killed as soon as it is found; all else comes after."""
    machines: list[tuple[str, int, int]] = []

    def ours() -> Iterator[int]:
        for mark, pid, owner in processes.with_option(b"-name", MARK):
            if os.geteuid() in (0, owner):
                machines.append((mark[1].decode(), pid, owner))
                yield pid

    pids = list(ours()) if args.dry_run else ours()
    survivors = [] if args.dry_run else _killed(pids)
    from belljar.cli.render import show

    held = f"still there after {DEADLINE:.0f} s (the kernel holds it)"
    done = "would be killed" if args.dry_run else "killed"
    rows = [
        {"machine": machine, "pid": pid, "owner": owner, "result": held if pid in survivors else done}
        for machine, pid, owner in machines
    ]
    show(rows, ("MACHINE", "PID", "OWNER", "RESULT"), as_=args.format)
    return 1 if survivors else 0


def _killed(pids: Iterable[int]) -> list[int]:
    """Those that survive. Machines, and those who keep them, may take all processors: root comes before all else, and then the ends
    of what it killed, which are work as well."""

    def each() -> Iterator[int]:
        for pid in pids:
            yield pid
            _rank(pid, FIRST - 1)

    _rank(os.getpid(), FIRST)
    try:
        return processes.kill_and_wait(each(), timeout=DEADLINE)
    finally:
        _rank(os.getpid(), 0)


def _rank(pid: int, priority: int) -> None:
    """All threads of this process; 0: as others are. A nice value would count among processes of one session alone (sched(7))."""
    with suppress(OSError):  # root alone may do that, and it may have ended
        for thread in os.listdir(processes.PROC / str(pid) / "task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR if priority else os.SCHED_OTHER, os.sched_param(priority))


REAP = """
    # reap +format | Clean up after belljar processes that were killed: end their QEMU, remove their files, record how the machines
    | ended. Each `belljar run` does this in passing. As root: for all users of the node (`paths.node`). Exits 1 when something could
    | not be cleaned up.
    -n --dry-run | only show what would be done
    --batch SYSTEM ? | also end machines whose job the batch system no longer knows, asked twice, `batch.gone_after` apart"""
KILL_ALL = """
    # kill-all +format | Kill every QEMU process of belljar on this host at once, and report what became of each. Root: those of all
    | users; others: their own.
    -n --dry-run | only show what would be done"""
VERBS = {**acts(REAP, globals()), **acts(KILL_ALL, globals(), needs_runtime=False)}
