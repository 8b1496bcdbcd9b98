"""`belljar vacuum machines`, `machinetypes` and `factories`: what the factories of a space tell now."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import FORMAT, Args, acts
from belljar.cli.render import duration, moment, show
from belljar.host.files import read_secret
from belljar.jobs import complain
from belljar.records import replace
from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus
from belljar.vacuum.protocol.poll import ROUNDS, Poller
from belljar.vacuum.protocol.query import QUERIES
from belljar.vacuum.settings.settings import FILE, inspect, load


def ask(args: Args, runtime: Runtime) -> int:
    """Exit 1 where a factory did not answer, or not whole."""
    import asyncio

    kind, space = QUERIES[args.act], _space(args)
    heads, row = SHOWN[args.act]
    key = read_secret(space.key_file) if space.key_file else b""
    answers = asyncio.run(Poller(space, client="command", key=key).ask(kind))
    items = [item for name in sorted(answers.found) for item in sorted(answers.found[name], key=_name)]
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


def _name(item: Any) -> str:
    return str(getattr(item, "machine", "") or getattr(item, "machinetype", ""))


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


OPTIONS = f"""FACTORY * @factories | names of factories (default: all of the space)
    --space NAME | name of the space (default: from the settings)
    --port N | UDP port of the factories (default: from the settings)
    --timeout TIME | how long to wait for answers
    --settings FILE | settings file (default: /etc/belljar/vacuum.toml); not needed with --space and FACTORY
    {FORMAT}"""
ROWS = """
# machines +all | list the slots of factories and what runs in them; exits 1 if a factory does not answer
# machinetypes +all | list for each machine type how many run at each factory, and how the last one ended
# factories +all | list factories with their use, load and free space
"""
ACTS = acts(ROWS, dict.fromkeys(SHOWN, ask), all=OPTIONS)
