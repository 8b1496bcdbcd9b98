"""`belljar lease`: machines of an image for so long, by the site's batch system; `belljar lease cluster`: machines of one lease that
learn from each other what they need. All but `serve` and `belljar pilot`, the job that it starts on each node, ask the service by its
socket."""

from __future__ import annotations

import asyncio
import os
import select
import shlex
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.lease.asking import DOOR, ask, connected, public_key, receive, send, watched
from belljar.cli.machine.request import above_zero
from belljar.cli.parser import Args, Verb, acts, after_dashes, state_folder
from belljar.cli.render import as_json, duration, show, utc
from belljar.errors import BadOption, HostError
from belljar.host.commands import which
from belljar.host.files import write_all
from belljar.jobs import plain
from belljar.lease import LARGEST_USER_DATA, settings
from belljar.lease.broker.document import load
from belljar.machine.outside.detached import command
from belljar.model import to_json

ENDED = ("terminated", "released", "expired", "cancelled", "preempted", "failed")
SUMS, SUM_HEADS = ("core_seconds", "gb_seconds", "vm_minutes"), ("CORE-SECONDS", "GB-SECONDS", "VM-MINUTES")


def serve(args: Args, runtime: Runtime) -> None:
    from belljar.lease.service.start import serve
    from belljar.service.telling import teller

    def names() -> dict[str, tuple[float, int]]:
        return {name: (image.created, image.virtual_size) for image in runtime.images.images() for name in image.names}

    tell = teller(sys.stdout, as_json=args.format == "json")
    asyncio.run(serve(lambda: settings.load(args.file), state_folder(args, runtime, "lease"), tell, names))


def pilot(args: Args, runtime: Runtime) -> int:
    from belljar.lease.pilot.start import run

    return run(args.file, args.rank, runtime.folders.logs / "pilots", runtime.folders.scratch, os.environ)


# -- leases ------------------------------------------------------------------------------------------------------------


def run(args: Args, runtime: Runtime) -> None:
    terms = _wanted(args) | {"token": args.token, "user_data": _user_data(args.user_data)}
    answer = ask(args.door, "run", wanted=terms, public=public_key(args.key))
    if args.wait is not None:
        _until_running(args.door, answer["lease"]["id"], float(args.wait))
    _made(answer, args)


def grow(args: Args, runtime: Runtime) -> None:
    _made(ask(args.door, "grow", id=args.lease, count=int(args.count)), args)


def _made(answer: dict[str, Any], args: Args) -> None:
    lease, machines = answer["lease"]["id"], [machine["id"] for machine in answer["instances"]]
    rows = [(machine, lease) for machine in machines]
    show({"lease": lease, "machines": machines}, ("MACHINE", "LEASE"), rows, as_=args.format)


def explain(args: Args, runtime: Runtime) -> int:
    """1 where it would be denied."""
    steps = ask(args.door, "explain", wanted=_wanted(args))["steps"]
    rows = [("yes" if step["met"] else "NO", step["what"]) for step in steps]
    show({"steps": steps}, ("MET", "STEP"), rows, as_=args.format)
    return 0 if all(step["met"] for step in steps) else 1


def _wanted(args: Args) -> dict[str, Any]:
    above_zero("--time", args.time)
    return {
        "image": args.image, "count": int(args.count), "least": int(args.least), "per_node": int(args.per_node),
        "size": {"cpus": int(args.cpus), "memory": int(args.memory or 0), "disk": int(args.disk or 0)}, "type": args.type,
        "seconds": float(args.time or 0), "queue": args.queue, "network": args.network,
        "preemptible": args.preemptible,
    }  # fmt: skip


def _user_data(path: Path | None) -> str:
    try:
        data = b"" if path is None else path.read_bytes()
    except OSError as exc:
        raise BadOption(f"--user-data {path}: {exc.strerror}") from exc
    if len(data) > LARGEST_USER_DATA:
        what = f"--user-data {path}: {len(data)} bytes; {LARGEST_USER_DATA} are the most"
        raise BadOption(what, hint="A short script can fetch the rest.")
    return data.decode("latin-1")


def status(args: Args, runtime: Runtime) -> None:
    answer = ask(args.door, "status", lease=args.lease or "")
    rows = []
    for lease in answer["leases"]:
        left = duration(lease["ends"] - time.time()) if lease["state"] == "active" else ""
        rows.append((lease["id"], "", lease["state"], lease["wanted"]["image"], lease["job"], "", left, lease["why"]))
        rows += [
            ("", machine["id"], *(machine[key] for key in ("state", "image", "host", "address")), "", machine["why"])
            for machine in answer["machines"]
            if machine["lease"] == lease["id"]
        ]
    heads = ("LEASE", "MACHINE", "STATE", "IMAGE", "JOB OR HOST", "ADDRESS", "LEFT", "WHY")
    show(answer, heads, rows, as_=args.format)


def extend(args: Args, runtime: Runtime) -> None:
    ask(args.door, "extend", id=args.lease, seconds=float(args.time))


def release(args: Args, runtime: Runtime) -> None:
    for id in args.ids:
        ask(args.door, args.act, id=id)


reboot = release


def _until_running(door: Path, lease: str, limit: float) -> None:
    """Return when all that are left run, and are enough for its owner. Raises HostError when it has ended, or the time is over."""
    state = why = ""
    for answer in watched(door, "status", limit, lease=lease):
        live = [machine["state"] for machine in answer["machines"] if machine["state"] != "terminated"]
        state, why, terms = (answer["leases"][0][key] for key in ("state", "why", "wanted"))
        is_enough = len(live) >= (terms["least"] or terms["count"])
        if is_enough and {*live} == {"running"}:
            return
        if state in ENDED or not is_enough:
            whys = why or next((machine["why"] for machine in answer["machines"] if machine["why"]), "")
            raise HostError(f"{lease}: {state}: {whys}", hint="See `belljar lease status`.")
    raise HostError(f"{lease}: not running after {limit:.0f} s: {state}: {why}", hint="It goes on.")


# -- into a machine ----------------------------------------------------------------------------------------------------


def console(args: Args, runtime: Runtime) -> None:
    sys.stdout.buffer.write(ask(args.door, "console", id=args.machine)["text"].encode("latin-1"))


def ssh(args: Args, runtime: Runtime) -> int:
    """OpenSSH's own client, which knows the host's keys from the service, and nobody else's."""
    machine, client = _running(args), which("ssh")
    if client is None or not machine["host_keys"]:
        raise HostError(
            "ssh: no such program here" if client is None else f"{machine['id']}: it has no ssh server that is known",
            hint="Lease an image with an ssh server, and have OpenSSH's client on this host.",
        )
    proxy = [*command(), "lease", "connect", "--door", str(args.door), machine["id"]]
    with tempfile.NamedTemporaryFile("w", prefix="belljar-known-") as known:  # 0600
        known.writelines(f"{machine['id']} {key}\n" for key in machine["host_keys"])
        known.flush()
        options = {
            # ssh fills in what begins with %, and a shell reads the rest
            "ProxyCommand": shlex.join(word.replace("%", "%%") for word in proxy), "HostKeyAlias": machine["id"],
            "UserKnownHostsFile": known.name, "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes",
            "UpdateHostKeys": "no",
        }  # fmt: skip
        argv = [client, *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]
        argv += ["-i", str(args.identity), "-o", "IdentitiesOnly=yes"] if args.identity else []
        argv += [f"{args.user}@{machine['id']}", *after_dashes(args)]
        return os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, client, argv) << 8)


def _running(args: Args) -> dict[str, Any]:
    """The machine that is meant. Raises HostError where not just one runs."""
    id = machine_of(args.door, args.machine) if "/" in args.machine else args.machine
    machines = [row for row in ask(args.door, "status")["machines"] if id in (row["id"], row["lease"])]
    running: list[dict[str, Any]] = [row for row in machines if row["state"] == "running"]
    if len(running) != 1:
        states = ", ".join(f"{row['id']} is {row['state']}" for row in machines) or "there is none"
        why = f"{id}: only one machine that runs can be logged in to: {states}"
        raise HostError(why, hint="`belljar lease status` says what a machine waits for.")
    return running[0]


def connect(args: Args, runtime: Runtime) -> None:
    """Standard streams to the machine's ssh server: for ssh's ProxyCommand."""
    with connected(args.door) as door:
        send(door, "connect", id=args.machine)
        receive(door, exactly=True)
        door.settimeout(None)  # ssh's own from here on
        inputs = [0, door.fileno()]
        while True:
            for ready in select.select(inputs, [], [])[0]:
                data = os.read(ready, 1 << 16)
                if ready == 0 and data:
                    door.sendall(data)
                elif ready == 0:
                    inputs.remove(0)
                    door.shutdown(socket.SHUT_WR)
                elif data:
                    write_all(1, data)
                else:
                    return


# -- keys, use, history ------------------------------------------------------------------------------------------------


def key(args: Args, runtime: Runtime) -> None:
    if (args.do == "revoke") != bool(args.id):
        raise BadOption(f"`belljar lease key {args.do}`: an ID is given with revoke, and with nothing else")
    answer = ask(args.door, "keys", act=args.do, id=args.id or "", owner=args.owner)
    if args.do == "list":
        rows = [
            (key["id"], key["owner"], duration(time.time() - key["created"]), "yes" if key["enabled"] else "revoked")
            for key in answer["keys"]
        ]
        show(answer, ("ACCESS KEY", "OWNER", "MADE AGO", "VALID"), rows, as_=args.format)
    elif args.format == "json":
        print(as_json(answer))
    elif args.do == "new":
        print(f"AWS_ACCESS_KEY_ID={answer['id']}\nAWS_SECRET_ACCESS_KEY={answer['secret']}")


def usage(args: Args, runtime: Runtime) -> None:
    machines = ask(args.door, "usage", all=args.all, owner=args.owner, back=float(args.since or 0))["machines"]
    if args.machines:
        rows = [(row["owner"], row["machine"], *(row[name] for name in SUMS)) for row in machines]
        show({"machines": machines}, ("OWNER", "MACHINE", *SUM_HEADS), rows, as_=args.format)
        return
    sums = []
    for owner in sorted({row["owner"] for row in machines}):
        own = [row for row in machines if row["owner"] == owner]
        sums.append({"owner": owner, "machines": len(own), **{name: sum(row[name] for row in own) for name in SUMS}})
    show({"owners": sums}, ("OWNER", "MACHINES", *SUM_HEADS), [[*row.values()] for row in sums], as_=args.format)


def events(args: Args, runtime: Runtime) -> None:
    events: list[dict[str, Any]] = []
    while more := ask(args.door, "events", lease=args.lease, after=events[-1]["position"] if events else 0)["events"]:
        events += more
    rows = [
        (utc(event["wall"]), *(event[key] or "" for key in ("of", "before", "after", "cause", "why")))
        for event in events
    ]
    show({"events": events}, ("WHEN", "WHAT", "FROM", "TO", "CAUSE", "WHY"), rows, as_=args.format)


# -- clusters ----------------------------------------------------------------------------------------------------------


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


def clusters(args: Args, runtime: Runtime) -> None:
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


def release_clusters(args: Args, runtime: Runtime) -> None:
    for name in args.names:
        ask(args.door, "cluster", act="release", name=name)


def machine_of(door: Path, place: str) -> str:
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


WANTED = """\
IMAGE | the image's name
--time TIME | for how long, such as 2h (default: `lease.default_time`)
-n --count N =1 | number of machines (default: 1)
--least N =0 | begin also with fewer, but not less than this
--per-node N =1 | how many of them may share a node (default: 1)
--type NAME = | a machine type of `lease.types` (default: the first)
--cpus N =0 | processors, if not the type's
--memory SIZE | memory, if not the type's
--disk SIZE | disk, if not the type's
--network NAME = | a network class of `lease.networks` (default: the first)
--queue NAME = | partition or queue
--preemptible | in the preemptible queue: the batch system may take the nodes back"""
ROWS = f"""
# serve +format | run the site's lease service, until SIGTERM; machines go on without it
FILE ? =/etc/belljar/lease.toml | settings file (default: /etc/belljar/lease.toml)
--state DIR | folder of its records, key and certificate (default: lease/ below `paths.store`)
# run +door +format | ask for machines; they start when the batch system gives nodes
{WANTED}
--key FILE | your public key, for ssh as root (default: from ~/.ssh)
--user-data FILE | user data, for cloud-init or a script
--token TEXT = | any word; the same word gives the same lease again
--wait TIME ? | return when all machines run; fail after this time, if given
# explain +door +format | show whether you would get such machines, and which limits decide; nothing is asked for
{WANTED}
# status +door +format | list your leases and their machines
LEASE ? | only this lease
# extend +door | make a lease longer, if its job's limit allows
LEASE | the lease's ID
TIME | how much longer, such as 1h
# grow +door +format | ask for more machines like those of a lease, for its remaining time; they are a lease of their own
LEASE | the lease's ID
-n --count N =1 | number of machines (default: 1)
# release +door | give back leases, or single machines
LEASE + @ids | IDs of leases or machines
# reboot +door | reboot machines; their disks are kept
MACHINE + @ids | IDs of machines
# ssh +door | log in to a machine; its host key is known
MACHINE | the machine's ID, that of a lease with one machine, or CLUSTER/NAME
COMMAND * | what to run (default: a shell)
--user NAME =root | the user in the machine (default: root)
-i --identity FILE | your private key
# key +door +format | make, list or revoke access keys for the EC2 API; a secret is shown only once
{{new,list,revoke}} @do | what to do
ID ? | the key to revoke
--owner NAME = | another user's (root and the service's account only)
# connect +door | connect standard input and output to a machine's ssh server, as ssh's ProxyCommand
MACHINE | the machine's ID
# console +door | show the latest output of a machine's console
MACHINE | the machine's ID
# usage +door +format | sum up what your machines have used
--since TIME | only machines that ended within this time, such as 30d
--machines | one line per machine
--owner NAME = | another user's (root and the service's account only)
--all | everybody's (root and the service's account only)
# events +door +format | show each change of a lease, its nodes and machines
LEASE | the lease's ID
"""
PILOT = """
# pilot | Hold a node for a lease: make its machines as its service says, and end them in time.
FILE | the job file that the service wrote, mode 0600
--rank N | number of this node among those of its job; default: as the batch system says"""
CLUSTER = """
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
OF_CLUSTER = "Leased machines that work together as a cluster, described by a document."
FUNCTIONS = {"up": up, "status": clusters, "release": release_clusters, "check": check}
TOGETHER = Verb(OF_CLUSTER, acts=acts(CLUSTER, FUNCTIONS, door=DOOR))
WHAT = "Machines for a limited time. Jobs of the site's batch system hold the nodes that they run on."
LEASE = Verb(WHAT, acts={**acts(ROWS, globals(), door=DOOR), "cluster": TOGETHER})
VERBS = {"lease": LEASE, **acts(PILOT, globals())}
