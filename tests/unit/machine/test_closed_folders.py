"""A machine's folder that its own user cannot enter, or that holds what belljar never puts there, is that machine's trouble alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.jobs.paper_node import ALICE, BOB, Node, make_node, request_for

from belljar.assembly import Runtime
from belljar.errors import BelljarError
from belljar.host.privileges import as_user
from belljar.jobs.starting import finish_the_dead, widen_limits
from belljar.machine.life.claim import claim

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root enters every folder, and becomes somebody else")
BROKEN, DEAD = "0123456789ab", "0123456789ac"


@pytest.fixture
def node() -> Iterator[Node]:
    made = make_node()
    yield made
    made.close()


def alices(node: Node, look: Callable[[Runtime], object]) -> object:
    theirs = node.runtime.of_user(ALICE.uid, ALICE.home)
    return json.loads(as_user(ALICE, lambda: json.dumps(look(theirs)).encode(), timeout=20, what="look"))


def closed(folder: Path) -> None:
    folder.chmod(0)


def with_a_pipe_as_journal(folder: Path) -> None:
    (folder / "journal.jsonl").unlink()
    os.mkfifo(folder / "journal.jsonl", 0o600)
    os.chown(folder / "journal.jsonl", ALICE.uid, ALICE.gid)


def with_a_pipe_as_lock(folder: Path) -> None:
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock", 0o600)
    os.chown(folder / "lock", ALICE.uid, ALICE.gid)


def with_a_closed_journal(folder: Path) -> None:
    (folder / "journal.jsonl").chmod(0)


def with_a_closed_lock(folder: Path) -> None:
    (folder / "lock").chmod(0)


CLOSED = (closed, with_a_closed_journal, with_a_closed_lock)


@pytest.mark.parametrize("broken", [*CLOSED, with_a_pipe_as_journal, with_a_pipe_as_lock])
def test_a_broken_folder_keeps_no_other_machine_from_being_finished(node: Node, broken: Callable[[Path], None]) -> None:
    for id in (BROKEN, DEAD):
        node.ended(ALICE, id, f"slurm:{id}", None, abandoned=True)
    machines = node.runtime.of_user(ALICE.uid, ALICE.home).folders.machines
    broken(machines / BROKEN)
    assert alices(node, lambda runtime: [view.id for view in runtime.machines.list()]) == [BROKEN, DEAD]
    assert {BROKEN, DEAD} <= {row[0] for row in alices(node, leftovers)}  # type: ignore[attr-defined]
    alices(node, finish_the_dead)
    assert not (machines / DEAD).exists(), "a start finishes the others"
    rows = alices(node, lambda runtime: [[one.machine, one.error] for one in runtime.reaper.full()])
    if broken in CLOSED:
        assert rows and all(row == [BROKEN, "Permission denied"] for row in rows)  # type: ignore[attr-defined]
    else:
        assert not (machines / BROKEN).exists(), "what can be finished is"


def leftovers(runtime: Runtime) -> object:
    return [[one.machine, one.what] for one in runtime.reaper.leftovers()]


def test_a_umask_that_denies_ourselves_everything_is_not_followed(node: Node) -> None:
    node.prolog(ALICE)

    def start(runtime: Runtime) -> object:
        os.umask(0o777)
        widen_limits()
        runtime.reaper.quick()
        claim(request_for(DEAD, "slurm:7"), runtime.folders, lambda point: None).release()
        return [one.machine for one in runtime.reaper.full() if one.what == "machine"]

    assert alices(node, start) == [DEAD]


def test_it_is_told_whose_machines_they_are_or_what_keeps_out(node: Node) -> None:
    """Not that they are somebody else's, where in truth a mode is in the way."""
    node.ended(ALICE, DEAD, "slurm:7", None, abandoned=True)
    theirs = node.runtime.of_user(ALICE.uid, ALICE.home)

    def refusal() -> bytes:
        try:
            theirs.machines.list()
        except BelljarError as exc:
            return exc.message.encode()
        return b""

    assert as_user(BOB, refusal, timeout=20, what="look").decode() == (
        f"{node.node}/65534: uid 2 may not enter it (mode 0700, of uid 65534)"
    )
    theirs.folders.machines.chmod(0o100)
    assert as_user(ALICE, refusal, timeout=20, what="look").decode() == (
        f"{theirs.folders.machines}: Permission denied"
    )
    node.node.chmod(0o700)
    assert as_user(ALICE, refusal, timeout=20, what="look").decode() == (
        f"{node.node}: uid 65534 may not enter it (mode 0700, of uid 0)"
    )
