"""`belljar internal`: what batch systems and programs call. No help for people: launchers, hooks and programs say it."""

from __future__ import annotations

from belljar.assembly import Runtime
from belljar.cli.parser import Args, Parser, acts, add

ACTS = ("wrap", "prolog", "epilog", "hook", "ask", "keep")


def internal(args: Args, runtime: Runtime) -> int:
    if args.act == "keep":
        from belljar.cli.machine import keep

        parser = Parser(prog="belljar internal keep")
        add(parser, keep.OPTIONS)
        return keep.run(parser.parse_args(args.rest), runtime)
    system, *words = args.rest or [""]
    if args.act == "wrap":
        from belljar.jobs import wrap

        return wrap.run(system, words, runtime)
    from belljar.jobs.batch import hooks

    if args.act == "hook":
        return hooks.own(system, words, runtime)
    if args.act == "ask":
        print(f"it knows of {hooks.ask(system, runtime)} running jobs")
        return 0
    return hooks.run(args.act, system, words, runtime)


ROWS = f"""
# internal | What batch systems and programs call. wrap SYSTEM: in place of a job's script. prolog SYSTEM, epilog SYSTEM: around each
| job, as root. hook SYSTEM NAME: a program that only this system has. ask SYSTEM: which jobs the system knows, as a user's job would
| ask it. keep: keep the machine whose request is on standard input.
$ belljar internal ACT [SYSTEM] [ARG ...]
{{{",".join(ACTS)}}} ACT @act | {", ".join(ACTS)}
ARG ... @rest | the system's name, and what it gives"""
VERBS = acts(ROWS, globals())
