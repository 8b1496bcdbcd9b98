"""`belljar lease cluster`: machines of one lease that learn from each other what they need, and become a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.lease.asking import DOOR, ask, public_key, watched
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import as_json, show
from belljar.errors import BadOption, HostError
from belljar.jobs import plain
from belljar.lease.broker.document import load
from belljar.model import to_json


def check(args: Args, runtime: Runtime) -> None:
    cluster = load(args.file)
    rows = [(name, role.name, role.image) for role, name in cluster.seats]
    document = {"name": cluster.name, "machines": [name for _, name in cluster.seats]}
    show(document, ("NAME", "ROLE", "IMAGE"), rows, as_=args.format)


def up(args: Args, runtime: Runtime) -> None:
    cluster = load(args.file)
    answer = ask(args.door, "cluster", act="up", cluster=to_json(cluster), public=public_key(args.key))
    if args.wait is not None:
        _until_ready(args.door, cluster.name, float(args.wait))
    print(as_json(answer) if args.format == "json" else f"{answer['name']} {answer['lease']}")


def status(args: Args, runtime: Runtime) -> None:
    clusters = _clusters(args.door, args.name or "")
    rows, logs = [], []
    for cluster in clusters:
        rows.append((cluster["name"], cluster["state"], cluster["lease"], "", cluster["why"]))
        for node in cluster["nodes"]:
            rows.append((f"  {node['name']}", *(node[key] for key in ("state", "machine", "address", "why"))))
            if node["state"] == "failed":
                text = plain(node["log"], "\n\t")
                logs.append(f"\n{node['name']}, the last that its scripts wrote:\n{text}")
    show({"clusters": clusters}, ("NAME", "STATE", "LEASE OR MACHINE", "ADDRESS", "WHY"), rows, as_=args.format)
    if logs and args.format == "table":
        print("\n".join(logs))


def release(args: Args, runtime: Runtime) -> None:
    for name in args.names:
        ask(args.door, "cluster", act="release", name=name)


def machine(door: Path, place: str) -> str:
    """The id of CLUSTER/NAME. Raises BadOption."""
    cluster, _, name = place.partition("/")
    live = [row for row in _clusters(door, cluster) if row["state"] != "ended"]
    machines = {node["name"]: str(node["machine"]) for row in live for node in row["nodes"]}
    if name not in machines:
        raise BadOption(f"{place}: no such machine", hint=f"There are {', '.join(machines) or 'none'}.")
    return machines[name]


def _clusters(door: Path, name: str) -> list[dict[str, Any]]:
    clusters: list[dict[str, Any]] = ask(door, "cluster", act="status", name=name)["clusters"]
    return clusters


def _until_ready(door: Path, name: str, limit: float) -> None:
    """Raises HostError when it has failed or ended, or the time is over."""
    for answer in watched(door, "cluster", limit, act="status", name=name):
        state, why = answer["clusters"][-1]["state"], answer["clusters"][-1]["why"]
        if state == "ready":
            return
        if state in ("failed", "ended"):
            raise HostError(f"{name}: {state}: {why}", hint=f"See `belljar lease cluster status {name}`.")
    raise HostError(f"{name}: not ready after {limit:.0f} s: {why or state}", hint="It goes on.")


ROWS = """
# up +door +format | lease the machines of a cluster document, and set the cluster up
FILE | the document; the folders of its scripts are beside it
--key FILE | your public key, for ssh as root (default: from ~/.ssh)
--wait TIME ? | return when the cluster is ready; fail after this time, if given
# status +door +format | list your clusters and their machines, and the output of scripts that failed
NAME ? | only this cluster
# release +door | give back clusters with all their machines
NAME + @names | names of clusters
# check +format | find every mistake in a cluster document, without the service
FILE | the document
"""
WHAT = "Leased machines that work together as a cluster, described by a document."
CLUSTER = Verb(WHAT, acts=acts(ROWS, globals(), door=DOOR))
