"""`belljar device ...`: devices of this host that machines can have; root binds and releases them."""

from __future__ import annotations

import os

from belljar.assembly import Runtime
from belljar.cli.parser import Args, Verb, acts
from belljar.cli.render import show, show_findings
from belljar.errors import BadOption, NotPermitted
from belljar.host.privileges import user_of
from belljar.jobs import devices


def list_(args: Args, runtime: Runtime) -> None:
    heads = ("ADDRESS", "CLASS", "ID", "KIND", "GROUP", "DRIVER", "NUMA", "HELD BY")
    show([*devices.rows(runtime, every=args.all)], heads, as_=args.format)


def check(args: Args, runtime: Runtime) -> int:
    return show_findings(devices.findings(runtime.devices), as_=args.format)


def bind(args: Args, runtime: Runtime) -> None:
    user = user_of(args.user)
    check_root()
    devices.bindings(runtime).bind(args.addresses, (user.uid, user.gid), args.job, runtime.devices)


def release(args: Args, runtime: Runtime) -> None:
    if bool(args.addresses) == bool(args.job):
        raise BadOption("name the devices, or give --job")
    check_root()
    for address in devices.bindings(runtime).release(args.addresses, args.job):
        print(address)


def check_root() -> None:
    if os.geteuid() != 0:
        raise NotPermitted("devices are bound and released by root", hint="Run this as root, or ask the site.")


ROWS = """
# list +format | list the devices: IOMMU group, driver, NUMA node, who has it
--all | also those that the site gives to no machine
# check +format | say what stands in the way, and what to do about it
# bind | take devices from the host's drivers, for a user (root)
ADDRESS + @addresses | such as 0000:41:00.0
--user NAME ! | who may use them
--job JOB = | the batch job that they are for (slurm:4711); its epilog releases them
# release | reset devices and give them back to the host's drivers (root)
ADDRESS * @addresses | such as 0000:41:00.0
--job JOB = | all that this job had"""
WHAT = "PCI devices of this host that machines can have for themselves (`belljar run --device`): by the site's devices.toml."
VERBS = {"device": Verb(WHAT, acts=acts(ROWS, globals()))}
