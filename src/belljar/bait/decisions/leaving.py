"""The way out of machines and their nodes, in the order that a batch system survives. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from belljar.bait.decisions.step import Act, Do, Entry, Seen
from belljar.pool import NodeState

WAIT = Act(Do.END, "")  # stands for: not yet
LATER = Act(Do.REMOVE, "")  # stands for: it takes no job, and stays known for a while


def leave(machine: str, seen: Seen, *, is_late: bool, is_here: bool = True) -> tuple[Act, ...]:
    """The next act on the way out of one machine and its node; none: both are gone.

    Its node takes no further job; when it is quiet its machine ends; then it is removed. slurmctld 22.05.8 crashed when a node was
    removed while it still had something to say to it; and one that begins anew fails a job that names a node it does not know, or
    never ends it: one that was killed before it had saved that the job has left, and one whose job was requeued as its nodes went
    down, for it clears its list of nodes only when it starts again. A machine on another host is ended by its own bait, which removes
    its node; where that does not come to it, the node at least goes."""
    node, state = seen.node(machine), seen.state(machine)
    if (machine not in seen.machines) if is_here else (is_late or state is None):
        if state in (None, NodeState.OUT):
            return () if state is None else (LATER,) if node in seen.named else (Act(Do.REMOVE, node),)
        return (Act(Do.LOSE, node),)
    if is_here and (state in (None, NodeState.OUT) or is_late):
        return (Act(Do.END, machine),)
    return (WAIT,) if state in (NodeState.OUT, NodeState.DRAINING) else (Act(Do.CLOSE, node),)


def but_removals(acts: Iterable[Act]) -> tuple[Act, ...]:
    """What can be done while a job that wants these nodes is not held: until then it cannot be unpinned from them."""
    return tuple(act for act in acts if act is not WAIT and act.do not in (Do.REMOVE, Do.UNPIN))


def but_waits(acts: Iterable[Act]) -> tuple[Act, ...]:
    return tuple(act for act in acts if act not in (WAIT, LATER))


def recover(entries: Iterable[Entry], seen: Seen, ours: frozenset[str]) -> tuple[Act, ...]:
    """For machines and nodes of ours that no entry names: the journal was lost, or a machine joined under a name that is not its
    own. *ours*: nodes with this bait's own feature."""
    known = {machine for entry in entries for machine in entry.machines}
    ours -= {seen.node(machine) for machine in known}
    strays = {seen.machine(node) for node in ours - set(map(seen.node, seen.machines))} | seen.machines
    acts = [act for machine in sorted(strays - known - {""}) for act in leave(machine, seen, is_late=False)]
    for node in sorted(node for node in ours if not seen.machine(node)):
        # A node of a name that we never gave takes no job. It is removed when no machine lives that could be it: when each one has joined
        # under its own name.
        state = seen.nodes[node].state
        if state is NodeState.OUT and None not in map(seen.state, seen.machines):
            acts.append(Act(Do.REMOVE, node))
        elif state not in (NodeState.OUT, NodeState.DRAINING):
            acts.append(Act(Do.CLOSE, node))
    return but_waits(acts)
