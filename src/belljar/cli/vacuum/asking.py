"""`belljar vacuum machines`, `machinetypes` and `factories`: what the factories of a space tell now."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from belljar.cli.parser import FORMAT, acts
from belljar.cli.render import duration, moment, show
from belljar.jobs import plain
from belljar.records import replace

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.vacuum import FactoryStatus, MachineStatus, Space, TypeStatus
    from belljar.vacuum.protocol.query import Kind

MACHINES = ("MACHINE", "TYPE", "STATE", "CPUS", "HS06", "AGE", "CPU", "MESSAGE")
TYPES = ("FACTORY", "TYPE", "MACHINES", "CPUS", "HS06", "YOUNG", "LAST END", "MESSAGE")
FACTORIES = ("FACTORY", "MACHINES", "CPUS", "HS06", "LOAD", "FREE GB", "MEMORY GB", "SEEN", "VERSION")


def machines(args: argparse.Namespace, house: House) -> int:
    from belljar.vacuum.protocol.query import Kind

    return _tell(args, Kind.MACHINES, MACHINES, _machine)


def machinetypes(args: argparse.Namespace, house: House) -> int:
    from belljar.vacuum.protocol.query import Kind

    return _tell(args, Kind.MACHINETYPES, TYPES, _type)


def factories(args: argparse.Namespace, house: House) -> int:
    from belljar.vacuum.protocol.query import Kind

    return _tell(args, Kind.FACTORIES, FACTORIES, _factory)


def _tell(args: argparse.Namespace, kind: Kind, heads: tuple[str, ...], row: Any) -> int:
    """Exit 1 where a factory did not answer, or not whole."""
    import asyncio

    from belljar.host.files import read_secret
    from belljar.vacuum.protocol.poll import Poller

    space = _space(args)
    key = read_secret(space.key_file) if space.key_file else b""

    async def ask() -> Any:
        return await Poller(space, client="command", key=key).ask(kind)

    answers = asyncio.run(ask())
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


def _space(args: argparse.Namespace) -> Space:
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
    return (
        one.machine,
        one.machinetype or "",
        one.state,
        one.processors,
        round(one.hs06, 2),
        age,
        cpu,
        one.message or "",
    )


def _type(one: TypeStatus) -> tuple[object, ...]:
    use = one.running_machines, f"{one.running_processors:g}", round(one.running_hs06, 2), one.young
    return one.factory, one.machinetype, *use, moment(one.message_time), one.message or ""


def _factory(one: FactoryStatus) -> tuple[object, ...]:
    free, used, memory = (f"{kb / 1e6:.1f}" for kb in (one.daemon_free_kb, one.memory_used_kb, one.memory_total_kb))
    return (
        one.factory,
        f"{one.running_machines}/{one.max_machines}",
        f"{one.running_processors:g}/{one.max_processors}",
        f"{one.running_hs06:g}/{one.max_hs06:g}",
        one.load_average,
        free,
        f"{used}/{memory}",
        moment(one.factory_heartbeat),
        one.version,
    )


OPTIONS = f"""FACTORY * @factories | names of factories; default: all of the space
    --space NAME | another space than that of the settings
    --port N | another UDP port
    --timeout TIME | wait no longer for answers
    --settings FILE :path | default: /etc/belljar/vacuum.toml; not needed where --space and FACTORY are given
    {FORMAT}"""
ACTS = acts(
    f"""
    # machines | list the slots of factories and what runs in them; exit 1 when a factory does not answer
    {OPTIONS}
    # machinetypes | list what runs of each machinetype at each factory, and how its last machine ended
    {OPTIONS}
    # factories | list factories with their use, load and free space
    {OPTIONS}""",
    {"machines": machines, "machinetypes": machinetypes, "factories": factories},
)
