"""`belljar lease cluster`: machines of one lease that learn from each other what they need, and become a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from belljar.assembly import House
from belljar.cli.lease.asking import DOOR, ask, public_key, watched
from belljar.cli.parser import FORMAT, Args, Verb, acts
from belljar.cli.render import as_json, show
from belljar.errors import BadOption, HostError


def check(args: Args, house: House) -> int:
    from belljar.lease.broker.document import load

    cluster = load(args.file)
    rows = [(name, role.name, role.image) for role, name in cluster.seats]
    show(
        {"name": cluster.name, "machines": [one for one, _, _ in rows]},
        ("NAME", "ROLE", "IMAGE"),
        rows,
        as_=args.format,
    )
    return 0


def up(args: Args, house: House) -> int:
    from belljar.lease.broker.document import load
    from belljar.model import to_json

    cluster = load(args.file)
    found = ask(args.door, "cluster", act="up", cluster=to_json(cluster), public=public_key(args.key))
    if args.wait is not None:
        _until_ready(args.door, cluster.name, float(args.wait or 0))
    print(as_json(found) if args.format == "json" else f"{found['name']} {found['lease']}")
    return 0


def status(args: Args, house: House) -> int:
    clusters = _asked(args.door, args.name or "")
    rows, logs = [], []
    for one in clusters:
        rows.append((one["name"], one["state"], one["lease"], "", one["why"]))
        rows += [
            (f"  {node['name']}", node["state"], node["machine"], node["address"], node["why"]) for node in one["nodes"]
        ]
        logs += [(node["name"], node["log"]) for node in one["nodes"] if node["state"] == "failed"]
    show({"clusters": clusters}, ("NAME", "STATE", "LEASE OR MACHINE", "ADDRESS", "WHY"), rows, as_=args.format)
    for name, log in logs if args.format == "table" else ():
        print(f"\n{name}, the last that its scripts wrote:\n{_plain(log)}")
    return 0


def release(args: Args, house: House) -> int:
    for name in args.names:
        ask(args.door, "cluster", act="release", name=name)
    return 0


def machine(door: Path, place: str) -> str:
    """The id of CLUSTER/NAME. Raises BadOption."""
    cluster, _, name = place.partition("/")
    nodes = [node for one in _asked(door, cluster) if one["state"] != "ended" for node in one["nodes"]]
    found = [node["machine"] for node in nodes if node["name"] == name]
    if not found:
        raise BadOption(
            f"{place}: no such machine", hint=f"There are {', '.join(node['name'] for node in nodes) or 'none'}."
        )
    return str(found[0])


def _asked(door: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(door, "cluster", act="status", name=name)["clusters"]
    return found


def _until_ready(door: Path, name: str, limit: float) -> None:
    """Raises HostError when it has failed or ended, or the time is over."""
    for answer in watched(door, "cluster", limit, act="status", name=name):
        found = answer["clusters"][-1]
        if found["state"] == "ready":
            return
        if found["state"] in ("failed", "ended"):
            raise HostError(
                f"{name}: {found['state']}: {found['why']}", hint=f"See `belljar lease cluster status {name}`."
            )
    raise HostError(f"{name}: not ready after {limit:.0f} s: {found['why'] or found['state']}", hint="It goes on.")


def _plain(text: str) -> str:
    """What a guest wrote, without what would steer a terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


ROWS = f"""
# up | lease the machines of a cluster document, and make a cluster of them
FILE | the document; its folders of scripts are beside it
--key FILE | your public key, for ssh as root; default: of ~/.ssh
--wait TIME ? | return when it is ready; fail after this time
{DOOR}
{FORMAT}
# status | list your clusters and their machines, with what failing scripts wrote
NAME ? | this one alone
{DOOR}
{FORMAT}
# release | give clusters back with all of their machines
NAME + @names | their names
{DOOR}
# check | read a cluster document, and say what is wrong with it; nothing is asked of the service
FILE | the document
{FORMAT}
"""
FUNCTIONS = {"up": up, "status": status, "release": release, "check": check}
ACTS = {
    "cluster": Verb("Machines that become a cluster, by a document with roles and scripts.", acts=acts(ROWS, FUNCTIONS))
}
