"""`belljar vacuum`: factories of machines without a head node: this host's, the settings, and what the factories of a space tell."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.host.doctor import report
from belljar.cli.parser import Args, Verb, acts, state_folder
from belljar.cli.render import duration, moment, setting, show
from belljar.errors import BadOption, BadSetting
from belljar.host.files import private_folder, read_secret
from belljar.host.toml import Mistake
from belljar.jobs import complain, plain
from belljar.records import fields, replace
from belljar.service import kept
from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus
from belljar.vacuum.factory import monitor
from belljar.vacuum.factory.state import STATUS, Status, decision_at
from belljar.vacuum.protocol.poll import ROUNDS, Poller
from belljar.vacuum.protocol.query import QUERIES
from belljar.vacuum.settings.copies import Copy, refresh
from belljar.vacuum.settings.copies import kept as kept_copy
from belljar.vacuum.settings.pipes import FOLDER, with_pipes
from belljar.vacuum.settings.settings import FILE, REMEDY, Loaded, inspect, keys, load, wrong_here

DAY = 86400.0
LONGEST_CELL = 60


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
    status = kept.read(state_folder(args, runtime, "vacuum") / STATUS, Status)
    level, line = monitor.check(status, time.time())
    print(line)
    return int(level)


# -- what the factories of a space tell --------------------------------------------------------------------------------


def ask(args: Args, runtime: Runtime) -> int:
    """Exit 1 where a factory did not answer, or not whole."""
    kind, space = QUERIES[args.act], _space(args)
    heads, row = SHOWN[args.act]
    key = read_secret(space.key_file) if space.key_file else b""
    answers = asyncio.run(Poller(space, client="command", key=key).ask(kind))

    def name_of(item: Any) -> str:
        return str(getattr(item, "machine", "") or getattr(item, "machinetype", ""))

    items = [item for name in sorted(answers.found) for item in sorted(answers.found[name], key=name_of)]
    value = {kind.verb: items, "silent": answers.silent, "short": answers.short, "refused": answers.refused}
    show(value, heads, [row(item) for item in items], as_=args.format)
    trouble = [f"{name} does not answer" for name in answers.silent]
    trouble += [f"{name} told less than it announced" for name in answers.short]
    trouble += [f"{count} packets were ignored: {why}" for why, count in answers.refused.items()]
    for line in trouble:
        complain(line, "")
    return 1 if answers.silent else 0


def _space(args: Args) -> Space:
    """By the settings; where the command line says all that is needed, whatever is wrong with them."""
    file = args.settings or FILE
    space = inspect(file).space if args.space and args.factories else load(file)
    limit = args.timeout or space.poll_limit
    return replace(
        space,
        name=args.space or space.name,
        factories=tuple(args.factories) or space.factories,
        port=args.port or space.port,
        poll_limit=limit,
        poll_silence=min(space.poll_silence, limit / ROUNDS),
    )


def _machine(machine: MachineStatus) -> tuple[object, ...]:
    began = machine.started or machine.created
    age = duration(max(0.0, time.time() - began)) if began and machine.state != "Shut down" else ""
    cpu = f"{machine.cpu_percentage:.1f} %" if machine.state == "Running" else ""
    use = machine.processors, round(machine.hs06, 2), age, cpu
    return machine.machine, machine.machinetype or "", machine.state, *use, machine.message or ""


def _type(kind: TypeStatus) -> tuple[object, ...]:
    use = kind.running_machines, f"{kind.running_processors:g}", round(kind.running_hs06, 2), kind.young
    return kind.factory, kind.machinetype, *use, moment(kind.message_time), kind.message or ""


def _factory(host: FactoryStatus) -> tuple[object, ...]:
    free, used, memory = (f"{kb / 1e6:.1f}" for kb in (host.daemon_free_kb, host.memory_used_kb, host.memory_total_kb))
    processors = f"{host.running_processors:g}/{host.max_processors}"
    use = f"{host.running_machines}/{host.max_machines}", processors, f"{host.running_hs06:g}/{host.max_hs06:g}"
    state = f"{host.load_average:.2f}", free, f"{used}/{memory}", moment(host.factory_heartbeat)
    return host.factory, *use, *state, host.version


# By the act: heads, and how a row is made.
SHOWN: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[object, ...]]]] = {
    "machines": (("MACHINE", "TYPE", "STATE", "CPUS", "HS06", "AGE", "CPU", "MESSAGE"), _machine),
    "machinetypes": (("FACTORY", "TYPE", "MACHINES", "CPUS", "HS06", "YOUNG", "LAST END", "MESSAGE"), _type),
    "factories": (("FACTORY", "MACHINES", "CPUS", "HS06", "LOAD", "FREE GB", "MEMORY GB", "SEEN", "VERSION"), _factory),
}


machines = machinetypes = factories = ask


# -- settings ----------------------------------------------------------------------------------------------------------


def config(args: Args, runtime: Runtime) -> None:
    """The space as it is understood, pipes as they were last seen."""
    loaded, copies = _loaded(args, runtime, asks=False)
    space, _ = with_pipes(loaded.space, copies)
    ages = {name: copy.age(time.time()) if copy.document is not None else None for name, copy in copies.items()}
    value = {"space": space, "origins": loaded.origins, "pipes": ages}
    show(value, ("SETTING", "VALUE", "ORIGIN"), list(_rows(space, loaded)), as_=args.format)
    if loaded.mistakes:
        raise BadSetting.of(loaded.mistakes, hint=REMEDY)


def check_config(args: Args, runtime: Runtime) -> int:
    """Every mistake, and what does not fit this host; exit 1 where there is one."""
    loaded, copies = _loaded(args, runtime, asks=args.pipes)
    space, notes = with_pipes(loaded.space, copies)
    mistakes = loaded.mistakes or tuple(
        Mistake(loaded.origins.get(key, str(loaded.files[0])), key, what, hint)
        for key, what, hint in wrong_here(space, runtime.images.resolve)
    )
    now = time.time()
    told_of_pipes = [line for name, copy in copies.items() if (line := copy.told(f"pipe {name}", now))]
    types = ", ".join(kind.name for kind in space.types) or "none"
    good = f"The space {space.name} is good (machinetypes: {types})."
    return report(mistakes, [*told_of_pipes, *map(str, notes)], good, args.format)


def _loaded(args: Args, runtime: Runtime, *, asks: bool) -> tuple[Loaded, dict[str, Copy]]:
    """The settings, and the documents of their pipes: as they are kept, or asked for now."""
    loaded = inspect(args.file or FILE)
    folder = runtime.settings.paths.store / FOLDER
    if asks and loaded.space.pipes:
        private_folder(folder)
    now = time.time()
    copies = {pipe.name: refresh(pipe, folder, now) if asks else kept_copy(pipe, folder) for pipe in loaded.space.pipes}
    return loaded, copies


def _rows(space: Space, loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    """What holds in [space] and [factory], and what was set of the rest."""

    def row(name: str, value: Any, metadata: Any, origin: str = "default") -> tuple[str, str, str]:
        is_table = isinstance(value, tuple) and bool(value) and isinstance(value[0], tuple)
        text = ", ".join(f"{key}={item}" for key, item in value) if is_table else setting(value, metadata)
        short = text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."
        return name, short, loaded.origins.get(name, origin)

    for section in ("space", "factory"):
        for key, known in keys(section).items():
            yield row(f"{section}.{key}", getattr(space, known.field.name), known.field.metadata)
    for kind in space.types:
        usual = {field.name: field.default for field in fields(type(kind))}
        for key, known in keys("machinetype").items():
            if getattr(kind, key) != usual[key]:
                origin = f"pipe {kind.pipe}" if kind.pipe else "default"
                yield row(f"machinetype.{kind.name}.{key}", getattr(kind, key), known.field.metadata, origin)
    for pipe in space.pipes:
        yield row(f"pipe.{pipe.name}.url", pipe.url, {})
        yield row(f"pipe.{pipe.name}.share", pipe.share, {})


FILE_ROW = "FILE ? | settings file (default: /etc/belljar/vacuum.toml), with vacuum.d/*.toml beside it"
OF_SPACE = """
FACTORY * @factories | names of factories (default: all of the space)
--space NAME | name of the space (default: from the settings)
--port N | UDP port of the factories (default: from the settings)
--timeout TIME | how long to wait for answers
--settings FILE | settings file (default: /etc/belljar/vacuum.toml); not needed with --space and FACTORY"""
STATE = "--state DIR | folder of the factory's state (default: vacuum/ below `paths.store`)"
ROWS = f"""
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
# machines +all +format | list the slots of factories and what runs in them; exits 1 if a factory does not answer
# machinetypes +all +format | list for each machine type how many run at each factory, and how the last one ended
# factories +all +format | list factories with their use, load and free space
# config +format | show the settings in force, and the machine types of vacuum pipes as last fetched
{FILE_ROW}
# check-config +format | find every mistake in the settings; exits 1 if there is one
{FILE_ROW}
--pipes | also fetch the vacuum pipes (experiments' documents of machine types)
"""
WHAT = (
    "Hosts without a batch system: each host's factory decides which experiment's machine to start next, by target "
    "shares, and asks the other factories of its space what they run."
)
VERBS = {"vacuum": Verb(WHAT, acts=acts(ROWS, globals(), state=STATE, all=OF_SPACE))}
