"""`belljar batch node SYSTEM status|close|open|test`: this node in its batch system, and whether machines work on it."""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

from belljar import batch
from belljar.batch.node import faults as node
from belljar.cli.batch.client import runner
from belljar.errors import BadOption, BelljarError, CommandFailed
from belljar.host.privileges import User, as_user, user_of

if TYPE_CHECKING:
    from belljar.assembly import House
    from belljar.batch.job.ending import Run
    from belljar.batch.job.terms import Dialect
    from belljar.model import Outcome, Start

TEST_TIMEOUT = 300.0  # seconds for the self-check's machine: it may have to boot a template first
TESTERS = ("belljar", "nobody")
OUR_WORD = "belljar"  # begins every reason of ours


def run(args: argparse.Namespace, house: House) -> int:
    dialect = batch.load(args.system)
    name = args.node or node.name_of(args.system, os.environ, os.uname().nodename)
    if not node.NODE_NAME.fullmatch(name):
        raise BadOption(f"{name!r}: not a node's name")
    from belljar.cli.batch.hooks import memory_folder

    memory = node.Memory(memory_folder(house), args.system, name)
    ask = runner(house, args.system, house.settings.batch.ask_timeout)
    if args.what == "close":
        if not args.reason:
            raise BadOption("close: wants a reason", hint="belljar batch node SYSTEM close 'broken disk'")
        close(dialect, name, f"{OUR_WORD}: {node.one_line(args.reason)}", memory, ask)
        return 0
    if args.what == "open":
        reopen(dialect, name, memory, ask)
        return 0
    if args.what == "test":
        return test(args, house, dialect, name, memory, ask)
    return status(args, dialect, name, memory, ask)


def status(args: argparse.Namespace, dialect: Dialect, name: str, memory: node.Memory, ask: Run) -> int:
    """What the system says and what is remembered."""
    from belljar.cli.host.kvm import of_users
    from belljar.cli.render import as_json, plain

    now, right = memory.read(), of_users()
    try:
        by_us: bool | None = is_closed_by_us(dialect, name, ask)
        trouble = ""
    except BelljarError as exc:
        by_us, trouble = None, exc.message
    if args.format == "json":
        facts = {**_facts(now), "kvm_is_lost": right.is_lost, "kvm": right.text}
        print(as_json({"node": name, "closed_by_belljar": by_us, "trouble": trouble, **facts}))
        return 1 if trouble else 0
    print(
        plain(
            f"node {name}: {'unknown: ' + trouble if trouble else 'closed by belljar' if by_us else 'not closed by belljar'}"
        )
    )
    print(f"faults in a row: {now.faults}; passed self-checks in a row: {now.passes}")
    if now.reason:
        print(plain(f"last reason: {now.reason}"))
    print(plain(f"kvm{' IS LOST' if right.is_lost else ''}: {right.text}"))
    return 1 if trouble else 0


def _facts(now: node.Node) -> dict[str, object]:
    return {"faults": now.faults, "passes": now.passes, "reason": now.reason, "closed": bool(now.closed)}


def is_closed_by_us(dialect: Dialect, name: str, ask: Run) -> bool:
    """Asked of the system: it knows what an administrator did meanwhile."""
    command = dialect.why_closed(name)
    return bool(command) and dialect.closed_by_us(ask(command))


def close(dialect: Dialect, name: str, reason: str, memory: node.Memory, ask: Run) -> None:
    """Take the node out of service. It is remembered as closed only when the system took it."""
    for argv in dialect.close_node(name, reason):
        ask(argv)
    with memory.locked():
        memory.write(_with(memory.read(), closed=time.time(), reason=reason, passes=0))


def reopen(dialect: Dialect, name: str, memory: node.Memory, ask: Run) -> None:
    """Put the node into service again and begin to count from nothing."""
    for argv in dialect.open_node(name):
        ask(argv)
    with memory.locked():
        memory.write(_with(memory.read(), closed=0.0, faults=0, jobs=(), passes=0))


def _with(now: node.Node, **changes: object) -> node.Node:
    from dataclasses import replace

    return replace(now, **changes)  # type: ignore[arg-type]


def test(args: argparse.Namespace, house: House, dialect: Dialect, name: str, memory: node.Memory, ask: Run) -> int:
    """Start a small machine. A node that belljar closed is opened after enough passes in a row, and one on which too many
    of these fail is closed; exit 1: it failed."""
    settings = house.settings.batch
    begin = time.monotonic()
    try:
        as_a_job(house, settings.check_image or house.settings.image.default)
        passed, reason = True, f"a machine ran in {time.monotonic() - begin:.1f} s"
    except (BelljarError, OSError) as exc:
        passed, reason = False, str(exc)
    with memory.locked():
        now, may_open = node.checked(memory.read(), passed, reason, settings.node_passes)
        memory.write(now)
    if node.is_hopeless(now, settings.node_faults):
        close(dialect, name, f"{OUR_WORD}: self-check: {node.one_line(reason)}", memory, ask)
    opened = False
    if may_open and is_closed_by_us(dialect, name, ask):
        reopen(dialect, name, memory, ask)
        opened = True
    if args.format == "json":
        from belljar.cli.render import as_json

        print(as_json({"node": name, "passed": passed, "reason": reason, "opened": opened, "passes": now.passes}))
    else:
        from belljar.cli.render import plain

        print(plain(f"node {name}: {'passed' if passed else 'FAILED'}: {reason}{'; opened again' if opened else ''}"))
    return 0 if passed else 1


def as_a_job(house: House, image: str) -> None:
    """The self-check as an ordinary user in a folder of the node's, where jobs are; without such folders as it is called.
    Raises CommandFailed when no machine could be had."""
    if os.geteuid() != 0 or house.settings.paths.node is None:
        self_check(house, image)
        return
    from belljar.cli.batch.hooks import make_folder

    user = tester()
    make_folder(house, user)

    def check() -> bytes:
        self_check(house.of_user(user.uid, user.home), image)
        return b""

    as_user(user, check, timeout=TEST_TIMEOUT + 30, what="start a machine")


def tester() -> User:
    """belljar's own user where there is one, else nobody."""
    for name in TESTERS:
        try:
            return user_of(name).with_groups()
        except BelljarError:
            continue
    return user_of("65534")


def self_check(house: House, image: str, start: Start | None = None) -> Outcome:
    """A machine of this image that ran `true`, started as the settings say unless told how. Raises CommandFailed."""
    from belljar.cli.machine.attend import attend
    from belljar.cli.machine.request import account_of
    from belljar.cli.machine.run import widen_limits
    from belljar.model import MachineSpec, Payload, Request, RunPayload, StdinKind

    null = StdinKind.NULL
    payload = Payload((b"true",), account_of(None), cwd=b"/", stdin=null, stdout=null, stderr=null)
    machine = house.settings.machine
    begin = start or machine.start
    spec = MachineSpec(image, 1, machine.memory, network=machine.network, start=begin, context=machine.context)
    request = Request(
        os.urandom(6).hex(), spec, RunPayload(payload), name="self-check", requester="node test", created=time.time(),
        timeout=TEST_TIMEOUT, grace=1.0,
    )  # fmt: skip
    widen_limits()
    house.reaper.quick()
    outcome = attend(house, request)
    if outcome.exit_code != 0 or outcome.error:
        raise CommandFailed(outcome.reason or f"the machine ended with {outcome.exit_code}", hint=outcome.hint)
    return outcome
