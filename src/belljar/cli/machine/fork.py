"""`belljar fork ID [-n N] [-- CMD...]`: machines that go on where a running one stands."""

from __future__ import annotations

from belljar.assembly import Runtime
from belljar.cli.machine import request as words
from belljar.cli.parser import MACHINE, Args, Verb
from belljar.errors import BadOption
from belljar.jobs.forking import fork as fork_it
from belljar.jobs.starting import container_of
from belljar.jobs.users import reach
from belljar.machine.life.control import account_of
from belljar.model import StdinKind
from belljar.records import replace


def fork(args: Args, runtime: Runtime) -> None:
    if args.count < 1:
        raise BadOption(f"--count {args.count}: not a number of machines")
    words.check_name(args.name)
    runtime, view = reach(runtime, args.machine)
    payload = None
    if args.command not in ([], ["--"]):
        args.command = ["--", *(args.command[1:] if args.command[:1] == ["--"] else args.command)]
        args.inputs, args.outputs, args.tty, args.no_input, args.inherit_env = [], [], False, True, False
        args.cwd = args.cwd or str(view.payload.get("cwd") or "/")
        user = words.account_of(args.user) if args.user else account_of(view) or words.account_of(None)
        payload = words.payload(args, user, container_of(runtime, view.image))
        payload = replace(payload, stdin=StdinKind.NULL, stdout=StdinKind.STREAM, stderr=StdinKind.STREAM)
    for id in fork_it(runtime, view, args.count, payload, name=args.name or ""):
        print(id, flush=True)


VERBS = {
    "fork": Verb(
        "Start machines that go on where a running one stands, with its memory and disk, and print their IDs. Each runs the command, "
        "or stands ready for `belljar exec`.",
        fork,
        f"""
        {MACHINE}
        -n --count N =1 | so many
        --name NAME = | their name; of several, NAME-1 and so on
        -e --env K=V * | set a variable; K alone passes on yours
        --cwd PATH | its working directory (default: the machine's)
        --user NAME|UID[:GID] | its user in the guest (default: the machine's)
        CMD ... @command""",
        usage="belljar fork [options] ID [-- CMD ARG...]",
    ),
}
