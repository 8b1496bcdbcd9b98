"""`belljar accounting`: usage records of ended machines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from belljar.accounting import CloudRecord
from belljar.accounting.publish import Publisher
from belljar.assembly import Runtime
from belljar.cli.lease.asking import DOOR, ask
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import show, utc

DAY = 86400.0
SHOWN = ("LocalJobId", "Queue", "LocalUserId", "Processors", "WallDuration", "CpuDuration", "ServiceLevel")


def publish(args: Args, runtime: Runtime) -> None:
    from belljar.journal import Ledger

    if args.leases:
        done = Publisher(runtime.settings.accounting).publish_cloud(lambda position: _leased(args.door, position))
    else:
        done = Publisher(runtime.settings.accounting).publish(Ledger(runtime.folders.logs), from_start=args.from_start)
    row = (done.rows, done.archived, done.queued, done.unreported)
    show(done, ("ROWS READ", "ARCHIVED", "QUEUED", "NOT REPORTABLE"), [row], as_=args.format)


def _leased(door: Path, position: str) -> Iterator[tuple[CloudRecord | None, str]]:
    """Of leased machines that ended, oldest first. Raises what the lease service refuses with."""
    while (answer := ask(door, "over", after=position))["position"] != position:
        for use in answer["machines"]:
            record = CloudRecord(
                use["machine"], os.uname().nodename, use["owner"], use["group"], use["image"], int(use["began"]), int(use["ended"]),
                use["seconds"], use["cpus"], use["memory"], use["disk"],
            )  # fmt: skip
            yield record, position
        position = answer["position"]
        yield None, position


def sync(args: Args, runtime: Runtime) -> None:
    now = time.time()
    months = args.months or [month_of(now - DAY)]
    publisher = Publisher(runtime.settings.accounting)
    made = [{"month": month, "file": str(path)} for month in months for path in publisher.count(month, now)]
    show(made, ("MONTH", "FILE"), as_=args.format)


def list_(args: Args, runtime: Runtime) -> None:
    records = Publisher(runtime.settings.accounting).records(args.month or month_of(time.time()))
    heads = ("END", "JOB", "TYPE", "FACTORY", "CPUS", "WALL", "CPU", "BENCHMARK")
    rows = [(utc(int(record["EndTime"])), *(record.get(key, "") for key in SHOWN)) for record in records]
    show(records, heads, rows, as_=args.format)


def republish(args: Args, runtime: Runtime) -> None:
    publisher = Publisher(runtime.settings.accounting)
    counts = [{"month": month, "queued": publisher.republish(month)} for month in args.months]
    show(counts, ("MONTH", "QUEUED"), as_=args.format)


def month_of(moment: float) -> str:
    return time.strftime("%Y%m", time.gmtime(moment))


ACTS = f"""
# publish +format | write records of all machines that ended since the last time; may run, and be killed, at any time
--leases | cloud records of leased machines, from this host's lease service (root and its account only)
{DOOR}
--from-start | read the ledger from its beginning; nothing is recorded twice
# sync +format | queue APEL's sync records, the number of records of each month
YYYYMM * @months | months, such as 202611 (default: yesterday's)
# list +format | list the records of a month
YYYYMM ? @month | the month, such as 202611 (default: this month)
# republish +format | queue the records of these months again
YYYYMM + @months | months, such as 202611
"""
WHAT = (
    "Usage records of the machines that a factory started: an archive, a queue for APEL's ssmsend and, if wanted, "
    "PBS and BLAH logs."
)
VERBS = {"accounting": Verb(WHAT, acts=acts(ACTS, globals()))}
