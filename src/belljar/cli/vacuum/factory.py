"""`belljar vacuum`: factories of machines without a head node. Here `run`, `drain`, `explain` and `check`, of this host's factory."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import Args, Verb, acts, state_folder
from belljar.cli.render import duration, moment, show
from belljar.cli.vacuum import asking, settings
from belljar.errors import BadOption
from belljar.jobs import plain
from belljar.service import kept
from belljar.vacuum import Space
from belljar.vacuum.factory import monitor, state
from belljar.vacuum.factory.state import STATUS, Status, decision_at

DAY = 86400.0


def run(args: Args, runtime: Runtime) -> None:
    from belljar.service.telling import teller
    from belljar.vacuum.factory.daemon import serve

    tell = teller(sys.stdout, as_json=args.format == "json")
    asyncio.run(serve(args.file, state_folder(args, runtime, "vacuum"), tell, metrics=_address(args.metrics)))


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise BadOption(f"--metrics {text}: not [ADDRESS:]PORT", hint="Such as 127.0.0.1:9095.")
    return host.strip("[]") or "127.0.0.1", int(port)


def drain(args: Args, runtime: Runtime) -> None:
    from belljar.vacuum.factory.daemon import Order, give_order
    from belljar.vacuum.factory.keeper import Machines

    folder = state_folder(args, runtime, "vacuum")
    if args.off:
        if args.by is not None:
            raise BadOption("--off with --by: one of them only")
        give_order(folder, Order())
        print("Machines are started again.")
        return
    if args.by is not None and args.by <= time.time():
        raise BadOption(f"--by: {moment(args.by)} has passed", hint="Such as 18:00, 2026-12-24T18:00 or +2h.")
    give_order(folder, Order(True, args.by))
    gone = "" if args.by is None else f"; all are gone by {_until(args.by)}"
    print(f"No more machines are started on this host{gone}.")
    status = kept.read(folder / STATUS, Status)
    for machine in Machines(Space(status.space, status.factory)).living() if status else ():
        end = min(machine.ends, args.by or machine.ends)
        print(f"  {machine.id} {machine.machinetype}: until {_until(end)} at most")


def _until(then: float) -> str:
    is_tomorrow = time.localtime(then)[:3] == time.localtime(time.time() + DAY)[:3]
    return f"{moment(then)} ({'tomorrow, ' * is_tomorrow}in {duration(max(then - time.time(), 0))})"


def explain(args: Args, runtime: Runtime) -> None:
    now = time.time()
    at = now - (args.ago or 0.0) if args.at is None else args.at
    at -= DAY * (at > now)  # 14:05 is the last, not the next
    decision = decision_at(state_folder(args, runtime, "vacuum"), at)
    if decision is None:
        hint = "Is the factory started? `belljar vacuum check` tells."
        raise BadOption("no decision is known of that time", hint=hint)
    verdicts = [verdict for verdict in decision["verdicts"] if not args.types or verdict["machinetype"] in args.types]
    for name in set(args.types) - {verdict["machinetype"] for verdict in verdicts}:
        raise BadOption(f"{name}: no such machinetype in this decision")
    if args.format == "table":
        silent = ", ".join(decision.get("silent", ()))
        print(f"Decided {moment(decision['time'])}" + (f"; no answer from {plain(silent)}" if silent else ""))
    heads = ("TYPE", "SHARE", "HS06", "TARGET", "SCORE", "WHY", "UNTIL")
    show({**decision, "verdicts": verdicts}, heads, [_row(verdict) for verdict in verdicts], as_=args.format)


def _row(verdict: dict[str, Any]) -> tuple[object, ...]:
    until = time.strftime("%H:%M:%S", time.localtime(verdict["until"])) if verdict["until"] else ""
    target = "" if verdict["target"] is None else f"{verdict['target']:.1f}"
    use = f"{verdict['share']:g}", f"{verdict['hs06']:.1f}", target, f"{verdict['score']:.1f}"
    return verdict["machinetype"], *use, verdict["why"], until


def check(args: Args, runtime: Runtime) -> int:
    level, line = monitor.check(
        kept.read(state_folder(args, runtime, "vacuum") / state.STATUS, state.Status), time.time()
    )
    print(line)
    return int(level)


STATE_OPTION = "--state DIR | folder of the factory's state (default: vacuum/ below `paths.store`)"
ROWS = """
# run +state +format | run this host's factory, until SIGTERM; SIGHUP reads the settings again. Machines go on without it
FILE ? =/etc/belljar/vacuum.toml | settings file (default: /etc/belljar/vacuum.toml), with vacuum.d/*.toml beside it
--metrics PLACE | [ADDRESS:]PORT where Prometheus reads metrics (default: none)
# drain +state | start no more machines on this host; running ones go on to their end
--by MOMENT | end all machines by this time, such as 18:00
--off | start machines again
# explain +state +format | say for each machine type why it is started or not
TYPE * @types | only these machine types
/ --at MOMENT | the decision at that time: 14:05 or 2026-12-24T14:05
/ --ago TIME | the decision that long ago, such as 10m
# check +state | a plugin for Nagios and Icinga: one line with performance data; exits 0, 1, 2 or 3
"""
WHAT = (
    "Hosts without a batch system: each host's factory decides which experiment's machine to start next, by target "
    "shares, and asks the other factories of its space what they run."
)
VERBS = {"vacuum": Verb(WHAT, acts={**acts(ROWS, globals(), state=STATE_OPTION), **asking.ACTS, **settings.ACTS})}
