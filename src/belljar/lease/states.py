"""Where a lease, a slot and an instance stand, what may follow, and why each ended: one table of moves each.

A lease that may have a job in the batch system ends by way of `draining`: it has ended when nothing of it is left."""

from __future__ import annotations

from enum import Enum


class LeaseState(str, Enum):
    REQUESTED = "requested"  # accepted, and written down; from here on a job of its name may exist
    QUEUED = "queued"  # the batch system has its job
    CLAIMING = "claiming"  # pilots have said hello, but not all of them
    ACTIVE = "active"  # all nodes are there; its time runs
    DRAINING = "draining"  # it ends: machines stop, pilots go, the job is cancelled
    RELEASED = "released"  # its owner gave it back
    EXPIRED = "expired"  # its time was over
    CANCELLED = "cancelled"  # its owner gave it up before it was active
    PREEMPTED = "preempted"  # the batch system took its nodes
    FAILED = "failed"


class InstanceState(str, Enum):
    QUEUED = "queued"  # waits for a node
    CLAIMED = "claimed"  # has one
    STAGING = "staging"  # its image is on its way there
    BOOTING = "booting"
    RUNNING = "running"  # its guest is up; from here on it is charged
    STOPPING = "stopping"
    TERMINATED = "terminated"


class SlotState(str, Enum):
    """A node that a pilot holds."""

    CLAIMED = "claimed"  # its pilot said hello, and waits for the others
    GO = "go"  # it takes machines
    RELEASING = "releasing"  # it was told to end
    ENDED = "ended"  # its pilot is gone


class Cause(str, Enum):
    """Why a lease or an instance ended: the codes of EC2's stateReason."""

    USER = "Client.UserInitiatedShutdown"
    GUEST = "Client.InstanceInitiatedShutdown"  # the guest powered itself off
    EXPIRED = "Server.LeaseExpired"
    PREEMPTED = "Server.LrmPreempted"
    REJECTED = "Server.LrmRejected"
    NODE_LOST = "Server.NodeLost"
    STAGING = "Server.StagingFailed"
    BOOT = "Server.BootFailed"
    CAPACITY = "Server.InsufficientInstanceCapacity"  # it did not start in time
    INTERNAL = "Server.InternalError"


L, I, S = LeaseState, InstanceState, SlotState  # noqa: E741
LEASE_ENDS = frozenset({L.RELEASED, L.EXPIRED, L.CANCELLED, L.PREEMPTED, L.FAILED})
LEASE_MOVES: dict[LeaseState, frozenset[LeaseState]] = {
    L.REQUESTED: frozenset({L.QUEUED, L.CLAIMING, L.DRAINING}),  # claiming: on nodes that its owner has already
    L.QUEUED: frozenset({L.CLAIMING, L.REQUESTED, L.DRAINING}),  # requested: once more, in a job of another name
    L.CLAIMING: frozenset({L.ACTIVE, L.REQUESTED, L.DRAINING}),
    L.ACTIVE: frozenset({L.DRAINING}),
    L.DRAINING: LEASE_ENDS,
} | {end: frozenset() for end in LEASE_ENDS}

# Reports of a pilot tell what is so, not each step to it.
INSTANCE_MOVES: dict[InstanceState, frozenset[InstanceState]] = {
    I.QUEUED: frozenset({I.CLAIMED, I.TERMINATED}),
    I.CLAIMED: frozenset({I.STAGING, I.BOOTING, I.RUNNING, I.STOPPING, I.TERMINATED}),
    I.STAGING: frozenset({I.BOOTING, I.RUNNING, I.STOPPING, I.TERMINATED}),
    I.BOOTING: frozenset({I.RUNNING, I.STOPPING, I.TERMINATED}),
    I.RUNNING: frozenset({I.STOPPING, I.TERMINATED}),
    I.STOPPING: frozenset({I.TERMINATED}),
    I.TERMINATED: frozenset(),
}
SLOT_MOVES: dict[SlotState, frozenset[SlotState]] = {
    S.CLAIMED: frozenset({S.GO, S.RELEASING, S.ENDED}),
    S.GO: frozenset({S.RELEASING, S.ENDED}),
    S.RELEASING: frozenset({S.ENDED}),
    S.ENDED: frozenset(),
}

# EC2's words and codes for the states of an instance.
EC2 = dict.fromkeys(I, (0, "pending"))
EC2 |= {I.RUNNING: (16, "running"), I.STOPPING: (32, "shutting-down"), I.TERMINATED: (48, "terminated")}

_ENDS = {Cause.EXPIRED: L.EXPIRED, Cause.PREEMPTED: L.PREEMPTED, Cause.GUEST: L.RELEASED}


def end_of(cause: Cause, *, was_active: bool) -> LeaseState:
    """How a lease that drained for this cause has ended."""
    if cause is Cause.USER:
        return L.RELEASED if was_active else L.CANCELLED
    return _ENDS.get(cause, L.FAILED)
