"""What a pilot says, applied to what is written down, and what it is answered. Pure.

A pilot asks before it holds anything: `go`, `wait` (for the others of its group) or `void` (nobody wants it: it exits at once). Its
numbered reports are applied in their order, each once; where one is missing nothing is applied until it has come. What it was ordered
is told again at each hello, so an order that was lost with a connection is not missed.

Durations are those of the pilot's monotonic clock; its wall clock only tells whether the node can be used.
"""

from __future__ import annotations

from belljar.lease import Do, Facts, Instance, Lease, Order, Report, Settings, Slot, Tell
from belljar.lease.advance import again, without_its_node
from belljar.lease.case import Case, Seen
from belljar.lease.states import INSTANCE_MOVES, Cause, InstanceState, LeaseState, SlotState
from belljar.records import dataclass, replace

L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741
VOID = "nobody waits for this pilot"


@dataclass(frozen=True)
class Answer:
    """What to write down; after that, what the pilot is told. `acked`: the last numbered report that was applied."""

    case: Case
    orders: tuple[Order, ...] = ()
    acked: int = 0


def heard(case: Case | None, report: Report, now: float, settings: Settings) -> Answer | None:
    """*case*: of the lease that the report's instance is of, else that of its pilot. None: no such lease, the pilot is void."""
    if case is None:
        return None
    slot = next((one for one in case.slots if one.id == report.slot), None)
    if slot is not None and (slot.pilot != report.pilot or not slot.is_live):
        return Answer(case, (Order(Do.VOID, why=VOID),), slot.seq if slot.pilot == report.pilot else 0)
    if report.tell is Tell.HELLO:
        return _hello(case, slot, report, now, settings)
    if slot is None:
        return Answer(case, (Order(Do.VOID, why=VOID),))
    slot = replace(slot, heard=max(slot.heard, now))
    if report.tell is Tell.HEARTBEAT or report.seq != slot.seq + 1:
        return Answer(_with_slot(case, slot), (), slot.seq)
    slot = replace(slot, seq=report.seq)
    if report.tell is Tell.ENDED:
        return Answer(_ended(_with_slot(case, slot), slot, report, now), (), slot.seq)
    found = next((one for one in case.instances if one.id == report.instance), None)
    case = _with_slot(case, slot)
    if found is None or report.state is None or found.slot != slot.id:
        return Answer(case, (Order(Do.STOP, report.instance, why="no such machine"),), slot.seq)
    after = _moved(found, slot, report, now)
    orders = (
        (Order(Do.STOP, found.id, why="it has ended"),)
        if not found.is_live and report.state is not I.TERMINATED
        else ()
    )
    return Answer(
        replace(case, instances=tuple(after if one is found else one for one in case.instances)), orders, slot.seq
    )


# -- the gate ----------------------------------------------------------------------------------------------------------


def _hello(case: Case, slot: Slot | None, report: Report, now: float, settings: Settings) -> Answer:
    lease, facts = case.lease, report.facts
    if slot is not None:
        is_next = report.seq == slot.seq + 1
        slot = replace(slot, heard=max(slot.heard, now), seq=report.seq if is_next else slot.seq)
        return Answer(_with_slot(case, slot), told_again(case, slot, now), slot.seq)
    waits = lease.state in (L.REQUESTED, L.QUEUED, L.CLAIMING) and not lease.carrier
    if not waits or report.attempt != lease.attempt or report.rank >= lease.wanted.nodes or facts is None:
        return Answer(case, (Order(Do.VOID, why=VOID),))
    if wrong := unfit(lease, facts, settings):
        case = replace(case, lease=replace(lease, shunned=(*lease.shunned, facts.host)))
        step = again(case, Cause.NODE_LOST, f"{facts.host}: {wrong}", Seen(now, now, None), settings)
        return Answer(step.case, (Order(Do.VOID, why=wrong),))
    slot = Slot(
        lease.id, report.attempt, report.rank, report.pilot, facts=facts,
        since=now, begun=now, heard=now, zero=now - report.mono, seq=report.seq,
    )  # fmt: skip
    if lease.state is not L.CLAIMING:
        lease = replace(lease, state=L.CLAIMING, since=now)
    return Answer(replace(case, lease=lease, slots=(*case.slots, slot)), (Order(Do.WAIT),), slot.seq)


def unfit(lease: Lease, facts: Facts, settings: Settings) -> str:
    """Why a node cannot be used for this lease; "": it can."""
    size, share = lease.wanted.size, min(lease.wanted.per_node, lease.wanted.count)
    wanted = size.memory * share + settings.overhead
    if facts.cpus < size.cpus * share:
        return f"the pilot was granted {facts.cpus} processors of {size.cpus * share}"
    if facts.memory < wanted:
        return f"the pilot was granted {facts.memory >> 20} MiB of memory of {wanted >> 20}"
    if abs(facts.offset) > settings.skew:
        return f"its clock is {facts.offset:+.0f} s off"
    return ""


def told_again(case: Case, slot: Slot, now: float) -> tuple[Order, ...]:
    """All that this pilot should know, when it is there again."""
    if slot.state is S.RELEASING or slot.attempt != case.lease.attempt:
        return (Order(Do.RELEASE),)
    if slot.state is S.CLAIMED:
        return (Order(Do.WAIT),)
    machines = (one for one in (*case.instances, *case.guests) if one.slot == slot.id and one.is_live)
    return (
        Order(Do.GO, seconds=max(0.0, slot.ends - now)),
        *(Order(Do.STOP, one.id) if one.stop else Order(Do.EXTEND, one.id, seconds=one.seconds) for one in machines),
    )


# -- machines ----------------------------------------------------------------------------------------------------------


def _moved(one: Instance, slot: Slot, report: Report, now: float) -> Instance:
    """A report of what cannot follow changes nothing but what is known of the machine."""
    state, moment = report.state, min(now, slot.zero + report.mono)
    one = replace(one, address=report.address or one.address, host_keys=report.host_keys or one.host_keys)
    if state is I.RUNNING and one.is_live and not one.launched:  # though it is to stop already: it is charged
        one = replace(one, launched=moment, began_at=report.mono, deadline=moment + one.seconds)
    if state is None or state not in INSTANCE_MOVES[one.state]:
        return one
    one = replace(one, state=state, since=moment, why=report.why or one.why)
    if state is I.TERMINATED:
        cause = one.cause or report.cause or Cause.INTERNAL
        return replace(one, ended=moment, ended_at=max(report.mono, one.began_at), cause=cause)
    return one


def _ended(case: Case, slot: Slot, report: Report, now: float) -> Case:
    """The pilot is about to exit: none of its machines is left."""
    cause, why = report.cause or Cause.NODE_LOST, report.why or "its pilot ended"
    instances = tuple(
        without_its_node(one, replace(slot, heard=slot.zero + report.mono), cause, why, now)
        if one.slot == slot.id and one.is_live
        else one
        for one in case.instances
    )
    return _with_slot(replace(case, instances=instances), replace(slot, state=S.ENDED, since=now))


def _with_slot(case: Case, slot: Slot) -> Case:
    return replace(case, slots=tuple(slot if one.id == slot.id else one for one in case.slots))
