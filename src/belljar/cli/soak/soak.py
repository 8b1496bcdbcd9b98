"""`belljar soak`: thousands of jobs, each in a machine of its own, and a report of all that ever ran in a folder."""

from __future__ import annotations

import sys
from typing import Any

from belljar.assembly import Runtime
from belljar.cli.parser import Args, acts
from belljar.cli.render import duration, moment, show, table
from belljar.errors import BadOption
from belljar.soak import BATCH, Plan, plots, report


def soak(args: Args, runtime: Runtime) -> int:
    """Exit 1 where a job failed, or what is the machines' own grows."""
    for path in args.plot:
        plots.check(path)
    if not args.report:
        run(args, runtime)
    made = report.of(args.state)
    for path in args.plot:
        plots.draw(args.state, path)
    if args.format == "table":
        _as_table(made)
    else:
        show(made["starts"] if args.format == "csv" else made, (), (), as_=args.format)
    return 1 if made["failed"] or any(row["grows"] and row["what"] in report.OWN for row in made["growth"]) else 0


def run(args: Args, runtime: Runtime) -> None:
    import asyncio

    from belljar.machine.outside.detached import command
    from belljar.soak.run import Soak

    contexts = tuple(args.contexts.split(","))
    if wrong := set(contexts) - {"ramdisk", "cloud-init", "inject"}:
        raise BadOption(f"--contexts {','.join(wrong)!r}: not one of ramdisk, cloud-init, inject")
    if min(args.jobs, args.at_once) < 1 or args.queue < 0:
        raise BadOption("--jobs and --at-once: at least one")
    runtime.in_job = args.batch != "none"  # the folders are then those of jobs
    folders, config = runtime.folders, ("--config", str(runtime.config_file)) if runtime.config_file else ()
    plan = Plan(
        args.jobs, args.at_once, args.queue, contexts, args.batch, args.image or runtime.settings.image.default, (*command(), *config),
        tuple(args.ledger) or (folders.logs,), (folders.run, folders.scratch, folders.store / "templates"),
        tuple(args.option), args.longest,
    )  # fmt: skip
    asyncio.run(Soak(plan, args.state, _tell).run())


def _tell(row: dict[str, Any], jobs: int) -> None:
    if row["failure"] or sys.stderr.isatty():
        print(f"{jobs} {row['context']} {row['id']} {row['start']} s {row['failure']}", file=sys.stderr, flush=True)


def _as_table(made: dict[str, Any]) -> None:
    print(f"{made['jobs']} jobs, {made['failed']} failed, {moment(made['began'])} to {moment(made['ended'])}, in {made['runs']} runs of "
          f"{duration(made['hours'] * 3600)} together, on {'; '.join(made['hosts'])}")  # fmt: skip
    print(f"VmBatch: {report.VMBATCH['jobs']} jobs in {duration(report.VMBATCH_HOURS * 3600)}")
    for what, text in (
        ("starts", "seconds from belljar's beginning to the payload's"),
        ("failures", "failures"),
        ("growth", "this host"),
    ):
        rows = [[f"{cell:.3f}" if isinstance(cell, float) else cell for cell in row.values()] for row in made[what]]
        if rows:
            print(f"\n{text}:\n{table([name.upper() for name in made[what][0]], rows)}")


ROWS = f"""
# soak | Run job after job, each in a fresh machine, and report how they started, what failed and whether memory, files, processes or
| disk grow on this host. A soak that was ended goes on when it is started again. INT or TERM: running jobs end, none starts. Exit 1
| when a job failed, or files or disk of machines grow.
$ belljar soak [options]
$ belljar soak --report [--plot FILE] [--format FORMAT] [--state DIR]
--jobs N =20000 | so many jobs in all, with those of earlier runs in the folder (20000)
--at-once N =2 | jobs that run at a time (2)
--queue N =5 | jobs that wait in the batch system beside them (5)
--contexts LIST =ramdisk | contexts, in turn: ramdisk,cloud-init,inject (ramdisk)
--batch {{{",".join(BATCH)}}} =none | submit to this batch system; none: `belljar run` (none)
--image IMAGE | the machines' image (default: `image.default`)
--option WORD * | a word for `belljar run`, sbatch or qsub, as --option=--mem=600; repeatable
--ledger DIR * | the ledgers of nodes, for their start times (default: this user's here); repeatable
--longest TIME =1h | a job that takes longer has failed (1h)
--state DIR =belljar-soak | the folder
--report | run nothing, only report
--plot FILE * | draw the report as .png or .svg, too; repeatable
--format {{table,json,csv}} =table | for people or for programs; csv: the starts alone"""
VERBS = acts(ROWS, globals())
