"""A bait of a system that knows its nodes beforehand, tells no reasons and moves arrays as a whole: Grid Engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.bait.test_daemon import FREE, HELD, SETTINGS, House, Side, arrives, house
from tests.unit.bait.test_requests import GOOD

from belljar.bait import Order, settings
from belljar.bait.arrivals import Answer
from belljar.bait.journal import give_order
from belljar.bait.machines.keeper import request_for, secret
from belljar.errors import BadSetting
from belljar.model import RunPayload
from belljar.pool import JobState, JobView, NodeState, NodeView
from belljar.pool.gridengine.nodes import BOOTSTRAP
from belljar.records import replace

__all__ = ["house"]


def test_a_bait_of_grid_engines_has_settings_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "bait.toml"
    text = GOOD + 'system = "gridengine"\nname = "vm.q@wn01"\nnodes = ["10.99.0.10 vm10"]\n'
    file.write_text(text)
    said = settings.load(file)
    assert (said.conf, said.key, said.gone_after) == (BOOTSTRAP, Path(), 5.0) and secret(said) == b""
    file.write_text(text + "gone_after = 9\n")
    assert settings.load(file).gone_after == 9.0
    for bad, what in (
        (text.replace("vm.q@", ""), f"{file}:5, bait.name: 'wn01' is not a queue of a host"),
        (text.replace(" vm10", ""), f"{file}:6, bait.nodes: '10.99.0.10' is not an IPv4 address and a name"),
    ):
        file.write_text(bad)
        with pytest.raises(BadSetting) as caught:
            settings.load(file)
        assert what in caught.value.message


def test_a_request_for_grid_engine_asks_for_the_address_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BELLJAR_PATHS_STORE", str(tmp_path))
    for name, text in (("bootstrap", "security_mode none\n"), ("act_qmaster", "head\n")):
        (tmp_path / name).write_text(text)
    said = replace(
        SETTINGS, system="gridengine", name="vm.q@wn01", nodes=("10.99.0.10 vm10",), conf=tmp_path / "bootstrap"
    )
    pool = settings.pool_of(said)
    id = pool.new_machine(())
    request = request_for(replace(HELD, uid=0), id, said, pool)
    assert (request.id, request.name, request.machine.network_class) == (id, "vm10", "bridge:br0@10.99.0.10")
    assert isinstance(request.work, RunPayload)
    files = {file.path: file.data for file in request.work.payload.files}
    assert files[bytes(tmp_path / "act_qmaster")] == b"head\n" and len(files) == 2


def task(number: int, state: JobState) -> JobView:
    return replace(HELD, id=f"7.{number}", array=("7", str(number)), state=state)


async def test_an_array_that_is_moved_as_a_whole_comes_to_one_bait_and_moves_task_by_task(house: House) -> None:
    house.side.moves_whole_arrays = True
    running, others = task(1, JobState.RUNNING), [task(2, JobState.WAITING), task(3, JobState.WAITING)]
    house.side.seen["jobs"] = {one.id: one for one in (running, *others)}
    asking = asyncio.ensure_future(house.daemon.arrived("7.1", False))
    await house.side.taken_back.wait()
    tasks = {f"7.{number}": task(number, JobState.HELD) for number in (1, 2, 3)}
    house.side.seen["jobs"] = {"7.1": tasks["7.1"], **{one.id: one for one in others}}
    assert await asking is Answer.TAKEN
    await house.looks(1)
    assert [one for one in house.side.asked if one[0] == "take_back"] == [
        ("take_back", f"7.{one}") for one in (1, 2, 3)
    ]
    house.side.seen["jobs"] = tasks
    await house.looks(6)
    ids = {job: entry.machines[0] for job, entry in house.daemon.journal.entries.items()}
    house.side.seen["nodes"] |= {f"vm{id}x": NodeView(f"vm{id}x", NodeState.IDLE) for id in ids.values()}
    await house.looks(4)
    assert {one[1] for one in house.side.asked if one[0] == "move"} == {"7.1"}
    tasks["7.1"] = task(1, JobState.WAITING)  # released, and not started yet
    await house.looks(2)
    assert {one[1] for one in house.side.asked if one[0] == "move"} == {"7.1"}
    tasks["7.1"] = replace(running, on=(f"vm{ids['7.1']}x",))
    await house.looks(2)
    assert {one[1] for one in house.side.asked if one[0] == "move"} == {"7.1", "7.2"}


@pytest.mark.parametrize("came", [(1, 2, 10), (2, 10, 1), (10, 2, 1)])
async def test_of_tasks_that_are_ready_at_once_one_is_released_in_whatever_order_they_came(
    house: House, came: tuple[int, ...]
) -> None:
    """Else the first one would start where the second one is to run."""
    house.side.moves_whole_arrays, jobs = True, house.side.seen["jobs"]
    for number in came:
        jobs[f"7.{number}"] = task(number, JobState.RUNNING)
        house.side.taken_back.clear()
        asking = asyncio.ensure_future(house.daemon.arrived(f"7.{number}", False))
        await house.side.taken_back.wait()
        jobs[f"7.{number}"] = task(number, JobState.HELD)
        assert await asking is Answer.TAKEN
    await house.looks(6)
    nodes = {job: f"vm{entry.machines[0]}x" for job, entry in house.daemon.journal.entries.items()}
    house.side.seen["nodes"] |= {name: NodeView(name, NodeState.IDLE) for name in nodes.values()}
    for number in came:
        await house.looks(1)
        first, *others = [one[1] for one in house.side.asked if one[0] == "move"]
        assert (first, others) == (f"7.{number}", [])
        jobs[first] = replace(task(number, JobState.RUNNING), on=(nodes[first],))
        house.side.asked.clear()


async def test_a_bait_without_a_reason_is_opened_by_who_closed_it(house: House, tmp_path: Path) -> None:
    house.side.tells_reasons = False
    shut = NodeView("bait1", NodeState.OUT, (), "d")
    house.side.seen["nodes"]["bait1"] = shut
    await house.looks(1)
    assert house.side.asked == []  # somebody else did
    house.side.seen["nodes"]["bait1"] = FREE
    give_order(house.daemon.folder, Order(False, "disk swap"))
    await house.looks(1)
    again = House(tmp_path)  # it remembers
    again.side.tells_reasons = False
    again.side.seen["nodes"]["bait1"] = shut
    give_order(again.daemon.folder, Order())
    await again.looks(3)
    assert again.side.asked == [("open", "bait1")]  # once: after that it is somebody else who closes it


async def test_a_job_waits_while_no_node_has_a_name_left(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Side, "new_machine", lambda self, nodes: "")
    await arrives(house)
    await house.looks(4)
    assert house.states == ["arrived", "stopped"] and "waits for a name" in house.daemon.status.waits
