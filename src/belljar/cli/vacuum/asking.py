"""`belljar vacuum machines`, `machinetypes` and `factories`: what the factories of a space tell now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, Args, acts
from belljar.cli.render import duration, moment, show
from belljar.jobs import plain
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus


def ask(args: Args, house: House) -> int:
    """Exit 1 where a factory did not answer, or not whole."""
    import asyncio

    from belljar.host.files import read_secret
    from belljar.vacuum.protocol.poll import Poller
    from belljar.vacuum.protocol.query import QUERIES

    kind, space = QUERIES[args.act], _space(args)
    heads, row = SHOWN[args.act]
    key = read_secret(space.key_file) if space.key_file else b""

    async def poll() -> Any:
        return await Poller(space, client="command", key=key).ask(kind)

    answers = asyncio.run(poll())
    found = [one for name in sorted(answers.found) for one in sorted(answers.found[name], key=_name)]
    facts = {kind.verb: found, "silent": answers.silent, "short": answers.short, "refused": answers.refused}
    show(facts, heads, [row(one) for one in found], as_=args.format)
    for name in answers.silent:
        print(f"belljar: {plain(name)} does not answer", file=sys.stderr)
    for name in answers.short:
        print(f"belljar: {plain(name)} told less than it announced", file=sys.stderr)
    for why, count in answers.refused.items():
        print(f"belljar: {count} packets were ignored: {why}", file=sys.stderr)
    return 1 if answers.silent else 0


def _space(args: Args) -> Space:
    """By the settings; where the command line says all that is needed, whatever is wrong with them."""
    from belljar.vacuum.protocol.poll import ROUNDS
    from belljar.vacuum.settings.settings import FILE, inspect, load

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


def _name(one: Any) -> str:
    return str(getattr(one, "machine", "") or getattr(one, "machinetype", ""))


def _machine(one: MachineStatus) -> tuple[object, ...]:
    began = one.started or one.created
    is_there = began and one.state != "Shut down"
    age = duration(max(0.0, time.time() - began)) if began and is_there else ""
    cpu = f"{one.cpu_percentage:.1f} %" if one.state == "Running" else ""
    use = one.processors, round(one.hs06, 2), age, cpu
    return one.machine, one.machinetype or "", one.state, *use, one.message or ""


def _type(one: TypeStatus) -> tuple[object, ...]:
    use = one.running_machines, f"{one.running_processors:g}", round(one.running_hs06, 2), one.young
    return one.factory, one.machinetype, *use, moment(one.message_time), one.message or ""


def _factory(one: FactoryStatus) -> tuple[object, ...]:
    free, used, memory = (f"{kb / 1e6:.1f}" for kb in (one.daemon_free_kb, one.memory_used_kb, one.memory_total_kb))
    processors = f"{one.running_processors:g}/{one.max_processors}"
    use = f"{one.running_machines}/{one.max_machines}", processors, f"{one.running_hs06:g}/{one.max_hs06:g}"
    state = f"{one.load_average:.2f}", free, f"{used}/{memory}", moment(one.factory_heartbeat)
    return one.factory, *use, *state, one.version


# By the act: heads, and how a row is made.
SHOWN: dict[str, tuple[tuple[str, ...], Callable[[Any], tuple[object, ...]]]] = {
    "machines": (("MACHINE", "TYPE", "STATE", "CPUS", "HS06", "AGE", "CPU", "MESSAGE"), _machine),
    "machinetypes": (("FACTORY", "TYPE", "MACHINES", "CPUS", "HS06", "YOUNG", "LAST END", "MESSAGE"), _type),
    "factories": (("FACTORY", "MACHINES", "CPUS", "HS06", "LOAD", "FREE GB", "MEMORY GB", "SEEN", "VERSION"), _factory),
}


OPTIONS = f"""FACTORY * @factories | names of factories; default: all of the space
    --space NAME | another space than that of the settings
    --port N | another UDP port
    --timeout TIME | wait no longer for answers
    --settings FILE | default: /etc/belljar/vacuum.toml; not needed where --space and FACTORY are given
    {FORMAT}"""
ACTS = acts(
    f"""
    # machines | list the slots of factories and what runs in them; exit 1 when a factory does not answer
    {OPTIONS}
    # machinetypes | list what runs of each machinetype at each factory, and how its last machine ended
    {OPTIONS}
    # factories | list factories with their use, load and free space
    {OPTIONS}""",
    dict.fromkeys(SHOWN, ask),
)
