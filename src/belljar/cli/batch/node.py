"""`belljar batch node SYSTEM status|close|open|test`: this node in its batch system, and whether machines work on it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from belljar import batch
from belljar.batch.node import faults
from belljar.errors import BadOption, BelljarError
from belljar.jobs import node
from belljar.jobs.client import runner
from belljar.jobs.words import plain

if TYPE_CHECKING:
    from belljar.assembly import House


def run(args: argparse.Namespace, house: House) -> int:
    """Exit 1 where the system cannot be asked, or the self-check failed."""
    system = batch.load(args.system)
    name = args.node or faults.name_of(system.node_variable, os.environ, os.uname().nodename)
    if not faults.NODE_NAME.fullmatch(name):
        raise BadOption(f"{name!r}: not a node's name")
    memory = faults.Memory(node.memory_folder(house), args.system, name)
    known = node.Known(system.dialect, name, memory, runner(house, args.system, house.settings.batch.ask_timeout))
    if args.what == "close":
        if not args.reason:
            raise BadOption("close: wants a reason", hint="belljar batch node SYSTEM close 'broken disk'")
        known.close(f"{node.OUR_WORD}: {faults.one_line(args.reason)}")
        return 0
    if args.what == "open":
        known.reopen()
        return 0
    facts, text, code = _test(known, house) if args.what == "test" else _status(known)
    if args.format == "json":
        from belljar.cli.render import as_json

        print(as_json({"node": name, **facts}))
    else:
        print("\n".join(plain(line) for line in (f"node {name}: {text[0]}", *text[1:])))
    return code


def _status(known: node.Known) -> tuple[dict[str, object], list[str], int]:
    """What the system says and what is remembered."""
    from belljar.cli.host.kvm import of_users

    now, right, trouble = known.memory.read(), of_users(), ""
    by_us: bool | None = None
    try:
        by_us = known.is_closed_by_us()
    except BelljarError as exc:
        trouble = exc.message
    facts: dict[str, object] = {
        "closed_by_belljar": by_us, "trouble": trouble, "faults": now.faults, "passes": now.passes, "reason": now.reason,
        "closed": bool(now.closed), "kvm_is_lost": right.is_lost, "kvm": right.text,
    }  # fmt: skip
    state = f"unknown: {trouble}" if trouble else "closed by belljar" if by_us else "not closed by belljar"
    counted = f"faults in a row: {now.faults}; passed self-checks in a row: {now.passes}"
    text = [state, counted, *([f"last reason: {now.reason}"] if now.reason else [])]
    return facts, [*text, f"kvm{' IS LOST' if right.is_lost else ''}: {right.text}"], 1 if trouble else 0


def _test(known: node.Known, house: House) -> tuple[dict[str, object], list[str], int]:
    """A small machine; exit 1: it failed."""
    done = node.test(house, known)
    end = f"{'passed' if done.passed else 'FAILED'}: {done.reason}{'; opened again' if done.opened else ''}"
    return {**vars(done)}, [end], 0 if done.passed else 1
