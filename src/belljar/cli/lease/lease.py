"""`belljar lease`: machines of an image for so long, by the site's batch system. All but `serve` ask the service by its socket."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from belljar.assembly import House
from belljar.cli.lease import cluster, reading
from belljar.cli.lease.asking import DOOR, answer, ask, connected, public_key, say, watched
from belljar.cli.parser import FORMAT, Args, Verb, acts
from belljar.cli.render import as_json, duration, show
from belljar.errors import BadOption, HostError

ENDED = ("terminated", "released", "expired", "cancelled", "preempted", "failed")


def serve(args: Args, house: House) -> int:
    from belljar.lease import settings
    from belljar.lease.service.start import serve
    from belljar.service.telling import teller

    folder = args.state or house.folders.store / "lease"
    tell = teller(sys.stdout, as_json=args.format == "json")
    names = lambda: {name: (one.created, one.virtual_size) for one in house.images.images() for name in one.names}  # noqa: E731
    asyncio.run(serve(lambda: settings.load(args.file), folder, tell, names))
    return 0


def run(args: Args, house: House) -> int:
    more = {"token": args.token, "user_data": _user_data(args.user_data)}
    answer = ask(args.door, "run", wanted=_wanted(args) | more, public=public_key(args.key))
    lease = answer["lease"]["id"]
    if args.wait is not None:
        _until_running(args.door, lease, float(args.wait or 0))
    return _made(answer, args)


def grow(args: Args, house: House) -> int:
    return _made(ask(args.door, "grow", id=args.lease, count=int(args.count)), args)


def _made(answer: dict[str, Any], args: Args) -> int:
    lease = answer["lease"]["id"]
    machines = [(one["id"], lease) for one in answer["instances"]]
    show({"lease": lease, "machines": [one for one, _ in machines]}, ("MACHINE", "LEASE"), machines, as_=args.format)
    return 0


def explain(args: Args, house: House) -> int:
    """1 where it would be denied."""
    steps = ask(args.door, "explain", wanted=_wanted(args))["steps"]
    rows = [("yes" if one["met"] else "NO", one["what"]) for one in steps]
    show({"steps": steps}, ("MET", "STEP"), rows, as_=args.format)
    return 0 if all(one["met"] for one in steps) else 1


def _wanted(args: Args) -> dict[str, Any]:
    return {
        "image": args.image, "count": int(args.count), "least": int(args.least), "per_node": int(args.per_node),
        "size": {"cpus": int(args.cpus), "memory": int(args.memory or 0), "disk": int(args.disk or 0)}, "type": args.type,
        "seconds": _seconds(args), "queue": args.queue, "network": args.network,
        "preemptible": args.preemptible,
    }  # fmt: skip


def status(args: Args, house: House) -> int:
    found = ask(args.door, "status", lease=args.lease or "")
    rows = []
    for lease in found["leases"]:
        now = time.time()
        left = duration(lease["ends"] - now) if lease["state"] == "active" else ""
        machines = [one for one in found["machines"] if one["lease"] == lease["id"]]
        rows.append((lease["id"], "", lease["state"], lease["wanted"]["image"], lease["job"], "", left, lease["why"]))
        rows += [
            ("", one["id"], one["state"], one["image"], one["host"], one["address"], "", one["why"]) for one in machines
        ]
    show(found, ("LEASE", "MACHINE", "STATE", "IMAGE", "JOB OR HOST", "ADDRESS", "LEFT", "WHY"), rows, as_=args.format)
    return 0


def extend(args: Args, house: House) -> int:
    ask(args.door, "extend", id=args.lease, seconds=float(args.time))
    return 0


def release(args: Args, house: House) -> int:
    for one in args.leases:
        ask(args.door, "release", id=one)
    return 0


def reboot(args: Args, house: House) -> int:
    for one in args.machines:
        ask(args.door, "reboot", id=one)
    return 0


def console(args: Args, house: House) -> int:
    sys.stdout.buffer.write(ask(args.door, "console", id=args.machine)["text"].encode("latin-1"))
    return 0


def ssh(args: Args, house: House) -> int:
    """OpenSSH's own client, which knows the host's keys from the service, and nobody else's."""
    from belljar.host.commands import which
    from belljar.machine.outside.detached import command

    if "/" in args.machine:
        args.machine = cluster.machine(args.door, args.machine)
    machines = ask(args.door, "status")["machines"]
    found = [
        one
        for one in machines
        if args.machine in (one["id"], one["lease"] if one["state"] == "running" else "") and one["state"] not in ENDED
    ]
    if len(found) != 1:
        many = (
            f"{args.machine} has {len(found)} machines that run" if found else f"{args.machine}: no machine that runs"
        )
        raise BadOption(many, hint="See `belljar lease status`.")
    one, client = found[0], which("ssh")
    if one["state"] != "running":
        why = f"{one['id']} is {one['state']}: only a machine that runs can be logged in to"
        raise HostError(why, hint="`belljar lease status` says what it waits for.")
    if client is None or not one["host_keys"]:
        raise HostError(
            "ssh: no such program here" if client is None else f"{one['id']}: it has no ssh server that is known",
            hint="Lease an image with an ssh server, and have OpenSSH's client on this host.",
        )
    with tempfile.NamedTemporaryFile("w", prefix="belljar-known-") as known:  # 0600
        known.writelines(f"{one['id']} {key}\n" for key in one["host_keys"])
        known.flush()
        words = [*command(), "lease", "connect", "--door", str(args.door), one["id"]]
        options = {
            "ProxyCommand": " ".join(_quoted(word) for word in words), "HostKeyAlias": one["id"], "UserKnownHostsFile": known.name,
            "GlobalKnownHostsFile": "/dev/null", "StrictHostKeyChecking": "yes", "UpdateHostKeys": "no",
        }  # fmt: skip
        argv = [
            client,
            *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
            *_identity(args),
        ]
        argv += [f"{args.user}@{one['id']}", *(args.command[1:] if args.command[:1] == ["--"] else args.command)]
        return os.waitstatus_to_exitcode(os.spawnv(os.P_WAIT, client, argv) << 8)


def key(args: Args, house: House) -> int:
    if (args.do == "revoke") != bool(args.id):
        raise BadOption(f"`belljar lease key {args.do}`: an ID is given with revoke, and with nothing else")
    found = ask(args.door, "keys", act=args.do, id=args.id or "", owner=args.owner)
    if args.do == "list":
        now = time.time()
        rows = [
            (one["id"], one["owner"], duration(now - one["created"]), "yes" if one["enabled"] else "revoked")
            for one in found["keys"]
        ]
        show(found, ("ACCESS KEY", "OWNER", "MADE AGO", "VALID"), rows, as_=args.format)
    elif args.format == "json":
        print(as_json(found))
    elif args.do == "new":
        print(f"AWS_ACCESS_KEY_ID={found['id']}\nAWS_SECRET_ACCESS_KEY={found['secret']}")
    return 0


def connect(args: Args, house: House) -> int:
    """Standard streams to the machine's ssh server: for ssh's ProxyCommand."""
    with connected(args.door) as door:
        say(door, "connect", id=args.machine)
        answer(door)
        door.settimeout(None)  # ssh's own from here on
        inputs = [0, door.fileno()]
        while True:
            for ready in select.select(inputs, [], [])[0]:
                data = os.read(ready, 1 << 16)
                if ready != 0:
                    if not data:
                        return 0
                    _write(1, data)
                elif data:
                    door.sendall(data)
                else:
                    inputs.remove(0)
                    door.shutdown(socket.SHUT_WR)


def _until_running(door: Path, lease: str, limit: float) -> None:
    """Return when all that are left run, and are enough for its owner. Raises HostError when it has ended, or the time is over."""
    state = why = ""
    for found in watched(door, "status", limit, lease=lease):
        live = [one["state"] for one in found["machines"] if one["state"] != "terminated"]
        state, why, wanted = (found["leases"][0][key] for key in ("state", "why", "wanted"))
        is_enough = len(live) >= (wanted["least"] or wanted["count"])
        if is_enough and {*live} == {"running"}:
            return
        if state in ENDED or not is_enough:
            whys = why or next((one["why"] for one in found["machines"] if one["why"]), "")
            raise HostError(f"{lease}: {state}: {whys}", hint="See `belljar lease status`.")
    raise HostError(f"{lease}: not running after {limit:.0f} s: {state}: {why}", hint="It goes on.")


# -- small helps -------------------------------------------------------------------------------------------------------


def _seconds(args: Args) -> float:
    """0: as is usual at this site."""
    option, said, unit = ("--time", args.time, 1) if args.hours is None else ("--hours", args.hours, 3600)
    return 0.0 if said is None else unit * _number(option, said, "As in --time 90m or --hours 0.5.")


def _number(option: str, said: str | float, hint: str) -> float:
    """Raises BadOption."""
    with suppress(ValueError):
        if 0 < (found := float(said)) < 1e9:
            return found
    raise BadOption(f"{option} {said}: not a number above 0", hint=hint)


def _user_data(path: Path | None) -> str:
    from belljar.lease import LARGEST_USER_DATA

    if path is None:
        return ""
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise BadOption(f"--user-data {path}: {exc.strerror}") from exc
    if len(data) > LARGEST_USER_DATA:
        what = f"--user-data {path}: {len(data)} bytes; {LARGEST_USER_DATA} are the most"
        raise BadOption(what, hint="A short script can fetch the rest.")
    return data.decode("latin-1")


def _identity(args: Args) -> list[str]:
    return ["-i", str(args.identity), "-o", "IdentitiesOnly=yes"] if args.identity else []


def _quoted(word: str) -> str:
    """For ssh: `%` begins what it fills in, and a shell reads the rest."""
    import shlex

    return shlex.quote(word.replace("%", "%%"))


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


WANTED = """\
IMAGE | its name
/ --time TIME | how long they are wanted, as in 2h (`lease.default_time`)
/ --hours HOURS | the same, in hours, as in 0.5
-n --count N =1 | so many machines
--least N =0 | start with so many, too
--per-node N =1 | so many of them may share a node
--type NAME = | of `lease.types`; default: the first
--cpus N =0 | other than the type has
--memory SIZE | other than the type has
--disk SIZE | other than the type has
--network NAME = | of `lease.networks`; default: the first
--queue NAME = | partition or queue
--preemptible | in the site's preemptible queue: the batch system may take the nodes back for other jobs"""
ROWS = f"""
# serve | be the site's lease service: until TERM; leases and their machines go on without it
FILE ? =/etc/belljar/lease.toml | its settings
--state DIR | folder of its records, key and certificate; default: lease/ below `paths.store`
{FORMAT}
# run | ask for machines; they come when the batch system gives nodes
{WANTED}
--key FILE | your public key, for ssh as root; default: of ~/.ssh
--user-data FILE | for the guest's own init
--token TEXT = | asked again with the same one, it is the same lease
--wait TIME ? | return when all run; fail after this time
{DOOR}
{FORMAT}
# explain | say whether such machines would be granted, and by which limits; ask for none
{WANTED}
{DOOR}
{FORMAT}
# status | list your leases and their machines
LEASE ? | this one alone
{DOOR}
{FORMAT}
# extend | let a lease last longer, where its job's limit allows it
LEASE | its id
TIME | by so much, as in 1h
{DOOR}
# grow | ask for more machines like a lease's, for the time that it has left: a lease of their own
LEASE | its id
-n --count N =1 | so many machines
{DOOR}
{FORMAT}
# release | give leases, or single machines, back
LEASE + @leases | ids of leases or machines
{DOOR}
# reboot | start guests again, each from the disk that it has
MACHINE + @machines | ids of machines
{DOOR}
# ssh | log in to a machine; its host key is known
MACHINE | its id, that of a lease with one machine, or CLUSTER/NAME
COMMAND * | what to run there
--user NAME =root | the user in the machine
-i --identity FILE | your private key
{DOOR}
# key | make, list or revoke access keys, for clients of the EC2 API; a secret is shown once
{{new,list,revoke}} @do | what to do
ID ? | which one is revoked
--owner NAME = | another user's, as root or as the service's account
{DOOR}
{FORMAT}
# connect | carry standard input and output to a machine's ssh server (ProxyCommand)
MACHINE | its id
{DOOR}
# console | show what a machine wrote on its console last
MACHINE | its id
{DOOR}
"""
FUNCTIONS = {
    "serve": serve, "run": run, "status": status, "extend": extend, "grow": grow, "release": release, "ssh": ssh, "connect": connect,
    "key": key, "explain": explain, "console": console, "reboot": reboot,
}  # fmt: skip
VERBS = {
    "lease": Verb(
        "Machines of an image for so long: pilot jobs of the site's batch system hold their nodes.",
        acts={**acts(ROWS, FUNCTIONS), **reading.ACTS, **cluster.ACTS},
    )
}
