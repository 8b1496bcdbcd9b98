"""A cluster as it stands: generations, barriers, what each machine is told, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from belljar.lease import Instance
from belljar.lease.broker import Cluster, Context, Member, Role
from belljar.lease.broker.plan import Node, Scene, program, scene, standing
from belljar.lease.states import InstanceState
from belljar.records import replace

CLUSTER = Cluster(
    "pi", data=(("motd", "welcome"),), limit=100.0,
    roles=(
        Role("head", "slurm", requires=("worker",), provides=("munge_key",), files=(("4-restarts/worker", b"#!/bin/sh\n"),)),
        Role("worker", "slurm", 2, requires=("head",), needs=("munge_key", "motd")),
    ),
)  # fmt: skip
KEY = "ssh-ed25519 AAAA root@i"


def machines(count: int = 3, address: str = "10.98.0.{}") -> list[Instance]:
    return [
        Instance(f"i-{n}", "r-1", n, "ada", state=InstanceState.RUNNING, launched=1000.0 + n, address=address.format(n + 1), host_keys=(KEY,))
        for n in range(count)
    ]  # fmt: skip


def play(instances: Sequence[Instance], members: Sequence[Member] = (), context: Context | None = None) -> Scene:
    return scene(context or Context("r-1", "ada", CLUSTER), instances, {one.id: one for one in members}, 2000.0)


def text(found: Scene, number: int) -> str:
    """What this machine's shell is told."""
    return program(found, found.nodes[number])


def said(node: Node, context: Context, code: int = 0, **facts: object) -> Member:
    return Member(node.instance.id, context.id, context.generation, node.plan, code, **facts)  # type: ignore[arg-type]


def stands(found: Scene) -> list[str]:
    return [one.stand for one in found.nodes]


def test_nobody_is_told_anything_before_all_are_there() -> None:
    booting = [*machines(2), replace(machines()[2], state=InstanceState.BOOTING)]
    found = play(booting)
    assert stands(found) == ["forming"] * 3 and not found.context.generation
    assert standing(found, 1050.0) == ("forming", "role worker: 1 of 2 machines are there")


def test_a_role_that_is_never_filled_fails_the_cluster_at_its_limit() -> None:
    found = play([*machines(2), replace(machines()[2], state=InstanceState.TERMINATED, why="it did not boot")])
    assert standing(found, 1100.0)[0] == "forming"
    stand, why = standing(found, 1101.0)
    assert stand == "failed" and why == "not ready after 100 s: role worker: 1 of 2 machines are there"


def test_machines_without_an_address_are_told_of() -> None:
    found = play(machines(address=""))
    assert "its network class gives machines no addresses" in standing(found, 1050.0)[1]


def test_a_machine_waits_for_the_data_that_another_provides() -> None:
    found = play(machines())
    assert found.context.generation == 1 and found.context.roster == ("i-0", "i-1", "i-2")
    assert stands(found) == ["configuring", "waiting", "waiting"]
    assert found.nodes[1].why == "for head, which provides munge_key"
    head = said(found.nodes[0], found.context, data=(("munge_key", b"\x01\x02"),))
    found = play(machines(), [head], found.context)
    assert stands(found) == ["ready", "configuring", "configuring"]
    assert "put data/munge_key/head AQI=" in text(found, 1)
    workers = [said(one, found.context) for one in found.nodes[1:]]
    found = play(machines(), [head, *workers], found.context)
    assert standing(found, 2001.0) == ("ready", "") and stands(found) == ["ready"] * 3


def test_scripts_are_called_in_the_order_of_the_convention() -> None:
    found = play(machines())
    wanted = text(found, 0).partition("wanted='")[2].partition("'")[0].splitlines()
    assert [line.split()[1] for line in wanted] == [
        "0-etchosts.sh", "0-etchosts.sh", "0-etchosts.sh", "1-ipandhost/worker", "1-ipandhost/worker", "2-thishost/localnic",
        "2-thishost/publicnic", "4-restarts/worker", "5-thishost-finalize/localnic", "5-thishost-finalize/publicnic",
    ]  # fmt: skip
    assert wanted[3] == "- 1-ipandhost/worker 10.98.0.2 worker1 worker1.pi"
    assert wanted[5] == "- 2-thishost/localnic 10.98.0.1 head head.pi"
    assert "worker1.pi,worker1,10.98.0.2 ssh-ed25519 AAAA\n" in text(found, 0)


def test_a_barrier_holds_until_every_machine_of_the_role_is_done() -> None:
    roles = (Role("store", "nfs", 2), Role("worker", "nfs", after=("store",)))
    context = Context("r-1", "ada", replace(CLUSTER, roles=roles))
    found = play(machines(), (), context)
    first = said(found.nodes[0], found.context)
    found = play(machines(), [first], found.context)
    assert stands(found) == ["ready", "configuring", "waiting"] and found.nodes[2].why == "for store2"
    found = play(machines(), [first, said(found.nodes[1], found.context)], found.context)
    assert stands(found) == ["ready", "ready", "configuring"]


def test_a_failed_script_fails_the_cluster_with_its_name() -> None:
    found = play(machines())
    failed = said(found.nodes[0], found.context, 3, script="4-restarts/worker", log=b"no munge")
    found = play(machines(), [failed], found.context)
    assert standing(found, 2001.0) == ("failed", "head: 4-restarts/worker: exit 3")
    assert "configuring" not in stands(found)  # it is not tried again by itself, and the others wait


def test_scripts_that_do_not_end_fail_the_cluster_at_its_limit() -> None:
    found = play(machines())
    assert standing(found, 2100.0)[0] == "configuring"
    assert standing(found, 2101.0) == (
        "failed",
        "not ready after 100 s: worker1 waits for head, which provides munge_key",
    )


@pytest.mark.parametrize(
    "gone", [{"state": InstanceState.STOPPING}, {"stop": True}, {"state": InstanceState.TERMINATED}]
)
def test_a_machine_that_leaves_begins_a_generation_in_which_the_others_are_told_again(gone: dict[str, object]) -> None:
    found = play(machines())
    head = said(found.nodes[0], found.context, data=(("munge_key", b"k"),))
    after = play([*machines(2), replace(machines()[2], **gone)], [head], found.context)
    assert after.context.generation == 2 and after.context.roster == ("i-0", "i-1")
    assert stands(after)[0] == "configuring" and "worker2" not in text(after, 0)
    assert after.nodes[1].stand == "waiting"  # for the head's answer of this generation


def test_a_machine_that_has_rebooted_starts_its_services_again_and_has_the_limit_for_that() -> None:
    found = play(machines())
    head = said(found.nodes[0], found.context, data=(("munge_key", b"k"),))
    found = play(machines(), [head], found.context)
    members = [head, *(said(one, found.context) for one in found.nodes[1:])]
    after = play([replace(machines()[0], rebooted=9000.0), *machines()[1:]], members, found.context)
    assert stands(after) == ["configuring", "ready", "ready"]
    calls = [{*text(one, 0).partition("wanted='")[2].partition("'")[0].splitlines()} for one in (found, after)]
    assert {line.split()[1].partition("/")[0] for line in calls[1] - calls[0]} == {"4-restarts", "5-thishost-finalize"}
    assert text(found, 1) == text(after, 1)
    assert [standing(after, now)[0] for now in (9100.0, 9101.0)] == ["configuring", "failed"]


def test_one_machine_that_comes_to_a_generation_again_changes_nothing() -> None:
    found = play(machines())
    assert play(machines(), (), found.context).context == found.context


def test_an_answer_of_another_generation_does_not_count() -> None:
    found = play(machines())
    late = replace(said(found.nodes[0], found.context), generation=7)
    assert stands(play(machines(), [late], found.context))[0] == "configuring"


def test_words_of_a_document_are_no_shell() -> None:
    role = Role("head", "slurm", files=(("a'; reboot; '", b"x"),))
    found = play(machines(1), (), Context("r-1", "ada", Cluster("pi", roles=(role,))))
    assert "put 'scripts/a'\"'\"'; reboot; '\"'\"'' eA==" in text(found, 0)
