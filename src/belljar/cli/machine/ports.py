"""`belljar port ID [PORT]`: publish a port of a machine that runs, or list those that are."""

from __future__ import annotations

from belljar.assembly import Runtime
from belljar.cli.parser import FORMAT, MACHINE, Args, Verb
from belljar.cli.render import show
from belljar.errors import NoSuchMachine
from belljar.jobs.shares import port_of
from belljar.jobs.users import reach
from belljar.machine.life import control


def port(args: Args, runtime: Runtime) -> None:
    asked = None if args.port is None else port_of(args.port, "")
    runtime, view = reach(runtime, args.machine)
    if not view.alive:
        raise NoSuchMachine(f"{view.id}: the machine has ended")
    if asked is not None:
        print(control.publish(view, asked).place)
        return
    ports = control.published(view.folder)
    show(ports, ("PLACE", "GUEST"), [(it.place, it.guest) for it in ports], as_=args.format)


VERBS = {
    "port": Verb(
        "Publish a port of a running machine on this host, and print where: connections there go to that port in the machine, "
        "until it ends. Without PORT: list the ports that are published.",
        port,
        f"""
        {MACHINE}
        PORT ? | [[ADDR:]HOST:]GUEST, as `belljar run --publish` takes it; GUEST alone: a free port of 127.0.0.1
        {FORMAT}""",
    ),
}
