"""What a pilot says, applied to what is written down, and what it is answered. Pure.

A pilot asks before it holds anything: `go`, `wait` (for the others of its group) or `void` (nobody wants it: it exits at once). Its
numbered reports are applied in their order, each once; where one is missing nothing is applied until it has come. What it was ordered
is told again at each hello, so an order that was lost with a connection is not missed.

Durations are those of the pilot's monotonic clock; its wall clock only tells whether the node can be used.
"""

from __future__ import annotations

import re

from belljar.lease import Instance, Lease, Settings, Slot
from belljar.lease.decisions.advance import again, without_its_node
from belljar.lease.decisions.case import Case, Seen
from belljar.lease.orders import Do, Facts, Order, Report, Tell
from belljar.lease.states import INSTANCE_MOVES, Cause, InstanceState, LeaseState, SlotState
from belljar.records import replace

L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741
VOID = (Order(Do.VOID, why="nobody waits for this pilot"),)
NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")  # a failed one is named to the batch system
ADDRESS = re.compile(r"[0-9A-Fa-f.:]{2,45}(/[0-9]{1,3})?")  # other machines of a cluster are told
MOST_KEYS, LONGEST_KEY = 8, 8192
Answer = tuple[Case, tuple[Order, ...]]  # what to write down; after that, what the pilot is told


def heard(case: Case, report: Report, now: float, settings: Settings) -> Answer:
    """*case*: of the lease that the report's instance is of, else that of its pilot."""
    id = report.slot
    slot = next((slot for slot in case.slots if slot.id == id), None)
    if slot is not None and (slot.pilot != report.pilot or not slot.is_live):
        return case, VOID
    if report.tell is Tell.HELLO:
        return _hello(case, slot, report, now, settings)
    if slot is None:
        return case, VOID
    slot, report = replace(slot, heard=max(slot.heard, now)), _possible(report, now - slot.zero, settings)
    if report.tell is Tell.HEARTBEAT or report.seq != slot.seq + 1:
        return case.with_slot(slot), ()
    slot = replace(slot, seq=report.seq)
    if report.tell is Tell.ENDED:
        return _ended(case.with_slot(slot), slot, report, now), ()
    machine = next((machine for machine in case.instances if machine.id == report.instance), None)
    case = case.with_slot(slot)
    if machine is None or report.state is None or machine.slot != slot.id:
        return case, (Order(Do.STOP, report.instance, why="no such machine"),)
    after = _moved(machine, slot, report, now)
    is_over = not machine.is_live and report.state is not I.TERMINATED
    orders = (Order(Do.STOP, machine.id, why="it has ended"),) if is_over else ()
    instances = tuple(after if other is machine else other for other in case.instances)
    return replace(case, instances=instances), orders


def _possible(report: Report, age: float, settings: Settings) -> Report:
    """A pilot's own clock says how long things took. Nothing of it was before its start, or is yet to come."""
    latest = max(0.0, age) + settings.skew
    return report if 0 <= report.mono <= latest else replace(report, mono=min(max(report.mono, 0.0), latest))


# -- the gate ----------------------------------------------------------------------------------------------------------


def _hello(case: Case, slot: Slot | None, report: Report, now: float, settings: Settings) -> Answer:
    lease, node, report = case.lease, report.facts, _possible(report, now - case.lease.created, settings)
    if slot is not None:
        is_next = report.seq == slot.seq + 1
        slot = replace(slot, heard=max(slot.heard, now), seq=report.seq if is_next else slot.seq)
        return case.with_slot(slot), told_again(case, slot, now)
    waits = lease.state in (L.REQUESTED, L.QUEUED, L.CLAIMING)
    if not waits or report.attempt != lease.attempt or report.rank >= lease.wanted.nodes or node is None:
        return case, VOID
    if wrong := unfit(lease, node, settings):
        if NODE.fullmatch(node.host):
            case = case.but(shunned=(*lease.shunned, node.host))
        step = again(case, Cause.NODE_LOST, f"{node.host[:80]}: {wrong}", Seen(now, now, None), settings)
        return step.case, (Order(Do.VOID, why=wrong),)
    slot = Slot(lease.id, report.attempt, report.rank, report.pilot, facts=node, since=now, begun=now, heard=now,
                zero=now - report.mono, seq=report.seq)  # fmt: skip
    case = case if lease.state is L.CLAIMING else case.moved(L.CLAIMING, now)  # a thousand may come at once
    return replace(case, slots=(*case.slots, slot)), (Order(Do.WAIT),)


def unfit(lease: Lease, node: Facts, settings: Settings) -> str:
    """Why a node cannot be used for this lease; "": it can."""
    size, share = lease.wanted.size, min(lease.wanted.per_node, lease.wanted.count)
    memory = size.memory * share + settings.overhead
    if not NODE.fullmatch(node.host) or len(f"{node.boot} {node.reach}") > 512:
        return "a host is not called so"
    if node.cpus < size.cpus * share:
        return f"the pilot was granted {node.cpus} processors of {size.cpus * share}"
    if node.memory < memory:
        return f"the pilot was granted {node.memory >> 20} MiB of memory of {memory >> 20}"
    if 0 < node.disk < size.disk * share:
        return f"its scratch has {node.disk >> 20} MiB of {size.disk * share >> 20} free"
    if abs(node.offset) > settings.skew:
        return f"its clock is {node.offset:+.0f} s off"
    return ""


def told_again(case: Case, slot: Slot, now: float) -> tuple[Order, ...]:
    """All that this pilot should know, when it is there again."""
    if slot.state is S.RELEASING or slot.attempt != case.lease.attempt:
        return (Order(Do.RELEASE),)
    if slot.state is S.CLAIMED:
        return (Order(Do.WAIT),)
    orders = (
        Order(Do.STOP, machine.id) if machine.stop else Order(Do.EXTEND, machine.id, seconds=machine.seconds)
        for machine in case.live
        if machine.slot == slot.id
    )
    return (Order(Do.GO, seconds=slot.left(now)), *orders)


# -- machines ----------------------------------------------------------------------------------------------------------


def _moved(machine: Instance, slot: Slot, report: Report, now: float) -> Instance:
    """A report of what cannot follow changes nothing but what is known of the machine."""
    state, moment = report.state, min(now, slot.zero + report.mono)
    keys = tuple(key[:LONGEST_KEY] for key in report.host_keys[:MOST_KEYS] if key.isprintable())
    address = machine.address or (report.address if ADDRESS.fullmatch(report.address) else "")
    machine = replace(machine, address=address, host_keys=keys or machine.host_keys)
    machine = replace(machine, rebooted=moment) if report.rebooted else machine
    if state is I.RUNNING and machine.is_live and machine.launched is None:  # charged, though it is to stop already
        machine = replace(machine, launched=moment, ran_from=report.mono, deadline=moment + machine.seconds)
    if state is None or state not in INSTANCE_MOVES[machine.state]:
        return machine
    machine = replace(machine, state=state, since=moment, why=report.why or machine.why)
    if state is I.TERMINATED:
        cause = machine.cause or report.cause or Cause.INTERNAL
        return replace(machine, ended=moment, ran_until=max(report.mono, machine.ran_from), cause=cause)
    return machine


def _ended(case: Case, slot: Slot, report: Report, now: float) -> Case:
    """The pilot is about to exit: none of its machines is left."""
    cause, why = report.cause or Cause.NODE_LOST, report.why or "its pilot ended"
    last = replace(slot, heard=slot.zero + report.mono)
    return case.with_slot(replace(slot, state=S.ENDED, since=now)).each(
        lambda machine: without_its_node(machine, last, cause, why, now) if machine.slot == slot.id else machine
    )
