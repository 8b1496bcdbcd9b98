"""A machine is written to a folder and goes on, here or from there; whatever fails on the way, it goes on as if nothing had been."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import BelljarError, CheckpointUnfit, MachineBusy, NoSpace, QmpError
from belljar.guest import Streams
from belljar.machine.checkpoints import content, take
from belljar.machine.extras import Equipment, Extra
from belljar.machine.extras import disks as extra_disks
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import Freeze, Kill, Orders, Signal
from belljar.model import Cause, NetworkMode, Outcome, Request, Share

RUNS = Script(runs_for=100.0, exit_code=3, stdout=b"12345")


@pytest.fixture(autouse=True)
def disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a fake machine they are no qcow2."""

    async def write(disk: Path, layers: Sequence[Path], base: Path, target: Path) -> None:
        target.write_bytes(b"disk")  # noqa: ASYNC240

    async def read(source: Path, base: Path, disk: Path) -> None:
        disk.write_bytes(source.read_bytes())  # noqa: ASYNC240

    monkeypatch.setattr(content, "PACKERS", {"cat": ((), ())})
    monkeypatch.setattr(content, "write_disk", write)
    monkeypatch.setattr(content, "read_disk", read)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def freeze(
    runtime: Runtime, folder: Path, *, stop: bool = False, within: float | None = None, at: float = 10.0, request: Request | None = None,
    then: Callable[[Orders], object] | None = None, extras: Sequence[Extra] = (),
) -> tuple[Outcome, int | BelljarError | None]:  # fmt: skip
    """Keep a machine to its end that is written to a folder meanwhile: its outcome, and what was answered."""

    async def keep() -> tuple[Outcome, int | BelljarError | None]:
        loop, orders = asyncio.get_running_loop(), Orders()
        order = Freeze(folder, loop.create_future(), stop, within)
        loop.call_later(at, orders.give, order)
        if then is not None:
            loop.call_later(at + 0.001, then, orders)
        asked, streams = request or runtime.request(), Streams(None, None, None)
        outcome = await runtime.supervisor().keep(asked, streams, orders, extras)
        if not order.done.done():
            return outcome, None
        return outcome, order.done.exception() or order.done.result()  # type: ignore[return-value]

    runtime.scripts = runtime.scripts or [RUNS]
    return runtime.leap(keep())


def goes_on(runtime: Runtime, folder: Path, **changes: Any) -> Outcome:
    """Another machine, from there."""
    return runtime.run(replace(runtime.request(), id="ba9876543210", restore=str(folder), **changes))


def test_it_goes_on_after_it_was_written(runtime: Runtime, folder: Path) -> None:
    outcome, answer = freeze(runtime, folder)
    assert (answer, outcome.cause, outcome.exit_code, outcome.restarts) == (1, Cause.FINISHED, 3, 0)
    done = runtime.guests[-1].done
    assert done[done.index("hold_still") :] == ["hold_still", "go_on", "set_clock"]
    assert [act for act in runtime.domain().done if act in ("pause", "resume")] == ["pause", "resume"]
    assert os.listdir(folder) and runtime.leftovers() == []


def test_it_ends_and_goes_on_from_there(runtime: Runtime, folder: Path) -> None:
    outcome, answer = freeze(runtime, folder, stop=True)
    assert (answer, outcome.cause, outcome.exit_code, outcome.klass.value) == (1, Cause.CHECKPOINTED, None, "cancelled")
    assert "go_on" not in runtime.guests[-1].done and runtime.leftovers() == []
    proved = next(event for event in runtime.journal() if event["event"] == "identity")
    again = goes_on(runtime, folder, labels=(("a", "b"),))
    assert (again.cause, again.exit_code, again.restarts, again.start) == (Cause.FINISHED, 3, 1, "restored")
    assert again.labels == (("a", "b"),) and runtime.leftovers() == []
    assert "take_up 1 5" in runtime.guests[-1].done and "start" not in runtime.guests[-1].done
    assert runtime.hypervisor.loaded == [b"memory of guest=belljar-0123456789ab"]
    from belljar.journal import read

    after = next(event for event in read(runtime.folders.ended("ba9876543210")) if event["event"] == "identity")
    assert (after["hostname"], after["machine_id"]) == (proved["hostname"], proved["machine_id"])


class Notes(Extra):
    """Something that goes on with its machine."""

    def __init__(self) -> None:
        self.found = b""

    async def freeze(self, draft: Path) -> None:
        (draft / "notes").write_bytes(b"of its first life")

    async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
        if life.checkpoint is not None:
            self.found = (life.checkpoint.folder / "notes").read_bytes()
        return there


def test_what_belongs_to_a_machine_is_frozen_with_it_and_found_again(runtime: Runtime, folder: Path) -> None:
    first, second = Notes(), Notes()
    freeze(runtime, folder, stop=True, extras=(first,))
    request = replace(runtime.request(), id="ba9876543210", restore=str(folder))
    outcome, _ = freeze(runtime, folder, request=request, extras=(second,))
    assert (outcome.restarts, first.found, second.found) == (1, b"", b"of its first life")
    for number, notes in ((2, b"others"), (1, b"")):  # they are a part of what has to be whole
        (folder / str(number) / "notes").write_bytes(notes)
    anew = runtime.run(replace(request, id="cccccccccccc"))
    assert anew.restarts == 0 and "notes is not what was written" in anew.troubles[0]


@pytest.mark.parametrize("point", ["freeze-held", "freeze-paused", "freeze-memory", "freeze-disks", "freeze-manifest"])
def test_whatever_fails_the_machine_goes_on_and_nothing_is_left(runtime: Runtime, folder: Path, point: str) -> None:
    def fail() -> None:
        raise NoSpace("the disk is full")

    runtime.at = {point: fail}
    outcome, answer = freeze(runtime, folder, stop=True)
    assert isinstance(answer, NoSpace) and (outcome.cause, outcome.exit_code) == (Cause.FINISHED, 3)
    assert "go_on" in runtime.guests[-1].done and "resume" in runtime.domain().done
    assert os.listdir(folder) == ["lock"] and runtime.leftovers() == []


def test_a_memory_that_cannot_be_written_is_told(runtime: Runtime, folder: Path) -> None:
    runtime.hypervisor.faults.write_memory = [QmpError("QEMU could not write its state")]
    outcome, answer = freeze(runtime, folder)
    assert isinstance(answer, QmpError) and outcome.exit_code == 3 and os.listdir(folder) == ["lock"]


def test_what_takes_longer_than_it_may_is_given_up(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(content, "write_disk", slow)
    outcome, answer = freeze(runtime, folder, stop=True, within=30.0)
    assert str(answer) == "not written within 30 s" and outcome.exit_code == 3
    assert "go_on" in runtime.guests[-1].done and os.listdir(folder) == ["lock"]


def test_what_has_no_room_is_refused_before_anything_stands_still(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extra_disks, "free_bytes", lambda path: 1 << 20)
    outcome, answer = freeze(runtime, folder)
    assert isinstance(answer, NoSpace) and "1 MiB free, this machine needs up to" in str(answer)
    assert "hold_still" not in runtime.guests[-1].done and outcome.exit_code == 3


def test_signals_wait_until_it_is_written_and_a_kill_does_not(
    runtime: Runtime, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome, answer = freeze(runtime, folder, then=lambda orders: orders.give(Signal(15)))
    assert answer == 1 and outcome.signal == 15

    async def slow(*_: object) -> None:
        await asyncio.sleep(1000)

    monkeypatch.setattr(content, "write_disk", slow)
    other = replace(runtime.request(), id="ba9876543210")
    outcome, answer = freeze(runtime, folder, request=other, then=lambda orders: orders.give(Kill()))
    assert answer is None and outcome.cause is Cause.CANCELLED
    assert sorted(os.listdir(folder)) == ["1", "lock"] and runtime.leftovers() == []


def test_what_has_not_begun_or_cannot_go_elsewhere_is_not_written(
    runtime: Runtime, folder: Path, tmp_path: Path
) -> None:
    _, answer = freeze(runtime, folder, at=0.5)
    assert isinstance(answer, MachineBusy)
    shared = runtime.request(machine={"shares": (Share(str(tmp_path), "/mnt"),)})
    _, answer = freeze(runtime, folder, request=replace(shared, id="ba9876543210"))
    assert "it shares folders of this host" in str(answer) and not folder.exists()


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        ({"shares": (Share("/tmp", "/mnt"),)}, "it shares folders of this host"),
        ({"cache": 1 << 30}, "it has a cache disk, which other machines change"),
        ({"network": NetworkMode.ISOLATED, "network_name": "us"}, "others reach it by its network"),
    ],
)
def test_what_may_be_written_later_is_refused_at_its_start(runtime: Runtime, machine: dict[str, Any], why: str) -> None:
    outcome = runtime.run(replace(runtime.request(machine=machine), checkpointable=True))
    assert outcome.cause is Cause.REFUSED and why in outcome.reason and outcome.hint
    assert runtime.leftovers() == []


def test_a_damaged_one_falls_back_to_the_one_before_and_then_to_a_new_start(runtime: Runtime, folder: Path) -> None:
    freeze(runtime, folder)
    freeze(runtime, folder, request=replace(runtime.request(), id="aaaaaaaaaaaa"))
    (folder / "2" / "memory").write_bytes(b"x")
    again = goes_on(runtime, folder)
    assert again.start == "restored" and "checkpoint 2 in" in again.troubles[0]
    (folder / "1" / "memory").write_bytes(b"x")
    anew = runtime.run(replace(runtime.request(), id="bbbbbbbbbbbb", restore=str(folder)))
    assert (anew.exit_code, anew.restarts) == (3, 0) and anew.start != "restored"
    assert anew.troubles[-1] == f"no checkpoint in {folder} is whole: the command began anew"


def test_a_batch_job_begins_anew_where_nothing_is_there_yet(runtime: Runtime, folder: Path) -> None:
    runtime.scripts = [RUNS]
    outcome = goes_on(runtime, folder)
    assert (outcome.exit_code, outcome.troubles, outcome.restarts) == (3, (), 0)


def test_a_host_that_is_unfit_says_so_and_the_checkpoint_stays(runtime: Runtime, folder: Path) -> None:
    freeze(runtime, folder, stop=True)
    runtime.hypervisor.own_traits["QEMU"] = "10.0"
    outcome = goes_on(runtime, folder)
    assert (outcome.error, outcome.klass.value) == (CheckpointUnfit.__name__, "node")
    assert "written with another QEMU 7.2 than this host has 10.0" in outcome.reason
    runtime.hypervisor.own_traits["QEMU"] = "7.2"
    again = runtime.run(replace(runtime.request(), id="cccccccccccc", restore=str(folder)))
    assert again.exit_code == 3 and runtime.leftovers() == []


def test_of_two_that_go_on_from_one_folder_one_is_told(runtime: Runtime, folder: Path) -> None:
    freeze(runtime, folder, stop=True)
    taken = take(folder)
    refused = goes_on(runtime, folder)
    assert (refused.error, refused.cause) == (MachineBusy.__name__, Cause.REFUSED)
    assert "a machine is written to this folder or goes on from it now" in refused.reason
    taken.release()
    assert runtime.run(replace(runtime.request(), id="cccccccccccc", restore=str(folder))).exit_code == 3
