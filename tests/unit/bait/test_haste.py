"""How soon a bait looks again."""

from __future__ import annotations

import time
from pathlib import Path

from tests.unit.bait.test_daemon import RUNNING, House

from belljar.bait.decisions.step import Entry, State
from belljar.bait.journal import read
from belljar.pool import JobState, NodeState
from belljar.records import replace


async def test_a_node_whose_name_alone_stays_is_not_looked_at_in_haste(tmp_path: Path) -> None:
    house, node = House(tmp_path), f"vm{'a' * 12}x"
    house.side.saves = 10.0  # type: ignore[misc]
    over = replace(RUNNING, state=JobState.ENDED, on=())
    house.daemon.journal.write(Entry("7", State.FINISHED, time.time(), ("a" * 12,), home="batch"))
    house.machines.alive = {"a" * 12}
    house.see(over, **{node: NodeState.DRAINING})
    assert await house.daemon.look()  # it is quiet in a moment
    house.machines.alive.clear()
    house.see(over, **{node: NodeState.OUT})
    assert not await house.daemon.look() and read(house.daemon.folder)["7"].state is State.FINISHED
    assert ("remove", node) not in house.side.asked
