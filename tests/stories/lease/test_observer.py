"""The observer sees what it is there for: records that lie, each in one way, and none that are right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.batch.lab.observer import Watch

from belljar.lease import Cause, Instance, InstanceState, Lease, LeaseState, Slot, Wanted
from belljar.lease.decisions.case import Case
from belljar.lease.store import Store, open_store
from belljar.records import replace

ID, ONE = "r-1", "i-1"
Change = Callable[[Store], None]


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watch:
    """One lease with a machine that ran, and has ended; nothing lives."""
    made = Watch(tmp_path, 1, grace=0)
    monkeypatch.setattr(made, "jobs", dict)
    monkeypatch.setattr(made, "guests", lambda: iter(()))
    monkeypatch.setattr(made, "pilots", lambda: iter(()))
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store("", tmp_path / "state")
    case = None
    for lease, machine in (
        (LeaseState.REQUESTED, InstanceState.QUEUED), (LeaseState.CLAIMING, InstanceState.CLAIMED),
        (LeaseState.ACTIVE, InstanceState.RUNNING), (LeaseState.DRAINING, InstanceState.TERMINATED),
        (LeaseState.RELEASED, InstanceState.TERMINATED),
    ):  # fmt: skip
        over = machine is InstanceState.TERMINATED
        one = Instance(
            ONE, ID, 0, "ada", state=machine, slot=f"{ID}.1.0", seconds=60, launched=5.0 * (lease is not LeaseState.REQUESTED),
            host_keys=("ssh-ed25519 A",), cause=Cause.USER if over else None, ran_from=5.0, ran_until=9.0 * over,
        )  # fmt: skip
        after = Case(Lease(ID, "ada", Wanted("alma"), lease, cause=Cause.USER if over else None), (one,))
        store.write(lambda book, case=case, after=after: book.save(case, after, 1.0))  # type: ignore[misc]
        case = after
    return store


def put(store: Store, **facts: object) -> None:
    """The machine, otherwise, by nobody's leave: no event tells of it."""
    one = store.read(lambda book: book.get(Instance, ONE))
    assert one is not None
    store.write(lambda book: book.put(replace(one, **facts)))


def journal(watch: Watch, *said: dict[str, object]) -> None:
    folder = watch._folder / "logs/pilots/one"
    folder.mkdir(parents=True)
    lines = [{"event": "said", "report": {"instance": ONE, **one}} for one in said]
    (folder / "journal.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))


def found(watch: Watch, capsys: pytest.CaptureFixture[str]) -> str:
    watch.look()
    watch.end()
    return capsys.readouterr().out


def test_what_is_right_is_not_found_wrong(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    journal(watch, {"seq": 1, "state": "running", "mono": 5.2}, {"seq": 2, "state": "terminated", "mono": 9.0})
    watch.look()
    assert found(watch, capsys) == ""


def test_i1_and_i6(
    watch: Watch, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.batch.lab.observer.SLOW", -1.0)
    monkeypatch.setattr(watch, "guests", lambda: iter(((71, ONE), (72, ONE), (73, "i-9"))))
    monkeypatch.setattr(watch, "jobs", lambda: {"4": "belljar-r-1-1", "5": "belljar-r-9-1"})
    monkeypatch.setattr(watch, "pilots", lambda: iter(((81, ID),)))
    (watch._folder / "jobs").mkdir()
    (watch._folder / "jobs/belljar-r-1-1").touch()
    said = found(watch, capsys)
    for what in (
        "QEMU 71 lives, and i-1 has ended", "i-1 lives 2 times", "QEMU 73 is of i-9, which nobody", "job 4 is there, and r-1 has ended",
        "job 5 is of r-9, which nobody", "pilot 81 lives", "which has a key, is left", "QEMU 71 of i-1 is left",
    ):  # fmt: skip
        assert what in said


@pytest.mark.parametrize("between", [{}, None], ids=["it was gone", "the batch system did not answer"])
def test_a_job_that_came_back_is_new_and_one_that_stayed_is_not(
    between: dict[str, str] | None, watch: Watch, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """A slurmctld that was killed has jobs again that were cancelled."""
    monkeypatch.setattr("tests.batch.lab.observer.SLOW", 60.0)
    for now, jobs in ((0.0, {"4": "belljar-r-1-1"}), (50.0, between), (100.0, {"4": "belljar-r-1-1"})):
        monkeypatch.setattr("tests.batch.lab.observer.time.monotonic", lambda now=now: now)
        monkeypatch.setattr(watch, "jobs", lambda jobs=jobs: jobs)
        watch.look()
    said = capsys.readouterr().out
    assert ("job 4 is there" in said) == (between is None)


def test_i2(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, cause=None)
    assert "I2: i-1 is terminated, for None" in found(watch, capsys)


def test_i3(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    def lie(book: object) -> None:
        execute = book._execute  # type: ignore[attr-defined]
        text = execute("SELECT value FROM events WHERE value LIKE '%i-1%' ORDER BY position DESC LIMIT 1", ())[0][0]
        backwards = json.loads(text) | {"before": "terminated", "after": "running"}
        for event in (backwards, backwards):
            execute("INSERT INTO events (lease, value) VALUES (?, ?)", (ID, json.dumps(event)))

    store.write(lie)
    journal(watch, {"seq": 1, "state": "running", "mono": 5.0}, {"seq": 3, "state": "terminated", "mono": 9.0})
    said = found(watch, capsys)
    assert "I3: i-1: running after terminated" in said and "I3: i-1 moved from terminated, and was 'running'" in said
    assert "numbered what it said [1, 3]" in said


def test_i4(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    journal(watch, {"seq": 1, "state": "running", "mono": 5.0}, {"seq": 2, "state": "terminated", "mono": 7.0})
    assert "I4: i-1 is charged 4 s, and ran 2.0 s" in found(watch, capsys)


@pytest.mark.parametrize(("applied", "at", "is_wrong"), [(1, 25.0, False), (2, 25.0, True), (1, 7.0, True)])
def test_i4_of_a_pilot_that_was_killed_before_it_could_tell_the_end(
    watch: Watch, store: Store, capsys: pytest.CaptureFixture[str], applied: int, at: float, is_wrong: bool
) -> None:
    """Then less is charged than ran, and never more."""
    store.write(lambda book: book.put(Slot(ID, 1, 0, "pilot", seq=applied)))
    journal(watch, {"seq": 1, "state": "running", "mono": 5.0}, {"seq": 2, "state": "terminated", "mono": at})
    assert ("I4: " in found(watch, capsys)) == is_wrong


def test_i5(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "guests", lambda: iter(((71, ONE),)))
    watch._ran[ONE] = -1e6
    assert "I5: i-1 runs though its time is over" in found(watch, capsys)


def test_i7_and_i8(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    watch.look()
    put(store, state=InstanceState.RUNNING, host_keys=("ssh-ed25519 B",))
    watch.look()
    put(store, state=InstanceState.TERMINATED, ran_until=77.0)
    said = found(watch, capsys)
    assert "I7: i-1 went from terminated to running" in said and "I8: the host keys of i-1 are others" in said
    assert "I8: i-1 has ended, and changed" in said


def test_i9(watch: Watch, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, state=InstanceState.RUNNING)
    one = store.read(lambda book: book.get(Instance, ONE))
    assert one is not None
    store.write(lambda book: book.put(replace(one, id="i-2")))
    assert "I9: ada has 2 machines of 1" in found(watch, capsys)
