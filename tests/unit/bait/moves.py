"""What may follow a state of a bait's job: whatever the handlers are shown, they make no other move."""

from __future__ import annotations

from belljar.bait.decisions.step import State

S = State
MOVES: dict[State, frozenset[State]] = {  # a part of another bait's job is running when that is: it sees no move
    S.ARRIVED: frozenset({S.STOPPED, S.FINISHED, S.REQUEUE}),
    S.STOPPED: frozenset({S.VM_REQUESTED, S.VM_BOOTING, S.REJECTED, S.REQUEUE, S.FINISHED, S.ARRIVED}),
    S.VM_REQUESTED: frozenset({S.IMAGE_WAIT, S.VM_BOOTING, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.IMAGE_WAIT: frozenset({S.VM_BOOTING, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.VM_BOOTING: frozenset({S.VM_READY, S.RUNNING, S.REPROCESS, S.FINISHED}),
    S.VM_READY: frozenset({S.MIGRATING, S.RUNNING, S.REPROCESS, S.FINISHED, S.LOST}),
    S.MIGRATING: frozenset({S.RUNNING, S.REPROCESS, S.REQUEUE, S.FINISHED, S.LOST}),
    S.RUNNING: frozenset({S.FINISHED, S.LOST, S.REPROCESS, S.REQUEUE}),
    S.FINISHED: frozenset({S.CLOSED, S.PROVING, S.REPROCESS}),
    S.REPROCESS: frozenset({S.STOPPED, S.REQUEUE, S.REJECTED, S.FINISHED}),
    S.REQUEUE: frozenset({S.CLOSED, S.REJECTED, S.FINISHED}),
    S.REJECTED: frozenset({S.CLOSED, S.FINISHED}),
    S.LOST: frozenset({S.REPROCESS, S.FINISHED}),
    S.CLOSED: frozenset(),
    S.PROVING: frozenset({S.KEPT, S.FINISHED}),
    S.KEPT: frozenset({S.CLOSED, S.FINISHED}),
}
