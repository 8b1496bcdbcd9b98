"""What leases are written down in: the same promises by a file of SQLite and by a real server of PostgreSQL."""

import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from belljar.errors import BadSetting, NoSpace, RecordsLost
from belljar.lease import (
    Cause,
    Instance,
    InstanceState,
    Lease,
    LeaseState,
    Report,
    Size,
    Tag,
    Tell,
    Wanted,
)
from belljar.lease.decisions.case import Case
from belljar.lease.decisions.policy import Sums
from belljar.lease.store import Book, Store, open_store
from belljar.records import replace


def new(lease: str = "r-1", owner: str = "ada", count: int = 1) -> Case:
    machines = (Instance(f"{lease}-i{one}", lease, one, owner, size=Size(cpus=2), seconds=100) for one in range(count))
    return Case(Lease(lease, owner, Wanted("alma", count=count, user_data=b"\x00\xff")), tuple(machines))


def test_what_was_written_is_read_again_by_the_next_that_opens_it(opened: Callable[[], Store]) -> None:
    case = new(count=2)
    opened().write(lambda book: book.save(None, case, 5.0))
    assert opened().read(lambda book: book.case("r-1")) == case
    assert opened().read(lambda book: book.case("r-2")) is None


def test_threads_that_ended_leave_no_connection(store: Store) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        thread = threading.Thread(target=lambda: store.read(lambda book: book.find(Lease)))
        thread.start()
        thread.join(10)
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_all_of_a_transaction_or_nothing(store: Store) -> None:
    def fails(book: Book) -> None:
        book.save(None, new(), 5.0)
        raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        store.write(fails)
    assert store.read(lambda book: (book.find(Lease), book.find(Instance), book.events())) == ([], [], [])


@pytest.mark.parametrize("id", ["a\0b", "\ud800"], ids=ascii)
def test_a_text_that_cannot_be_kept_is_who_sent_its_mistake_and_not_the_records(store: Store, id: str) -> None:
    """Else one pilot that says such a thing keeps those from being written down that spoke at the same time."""
    with suppress(ValueError):
        assert store.read(lambda book: book.get(Lease, id)) is None
    with suppress(ValueError):
        store.write(lambda book: book.put(Tag("r-1", id, "", "ada")))


def test_every_move_is_an_event_and_no_other_move_is_written(store: Store) -> None:
    case = new()
    store.write(lambda book: book.save(None, case, 5.0))
    queued = replace(case, lease=replace(case.lease, state=LeaseState.QUEUED, why="Priority"))
    store.write(lambda book: book.save(case, queued, 6.0))
    ended = replace(queued, lease=replace(queued.lease, state=LeaseState.RELEASED))
    with pytest.raises(ValueError, match="r-1: released cannot follow queued"):
        store.write(lambda book: book.save(queued, ended, 7.0))
    events = store.read(lambda book: book.events(lease="r-1"))
    assert [(one.of, one.before, one.after, one.wall, one.why) for _, one in events] == [
        ("r-1", "", "requested", 5.0, ""), ("r-1-i0", "", "queued", 5.0, ""), ("r-1", "requested", "queued", 6.0, "Priority"),
    ]  # fmt: skip
    position = events[1][0]
    assert [one.after for _, one in store.read(lambda book: book.events(position))] == ["queued"]


def test_an_event_tells_which_report_it_came_from(store: Store) -> None:
    case = new()
    store.write(lambda book: book.save(None, case, 5.0))
    machine = replace(case.instances[0], state=InstanceState.CLAIMED, slot="r-1.1.0")
    store.write(
        lambda book: book.save(
            case, replace(case, instances=(machine,)), 6.0, Report(Tell.INSTANCE, "r-1", 1, 0, "p", 7, mono=3.5)
        )
    )
    last = store.read(lambda book: book.events())[-1][1]
    assert (last.slot, last.seq, last.mono) == ("r-1.1.0", 7, 3.5)


def test_sums_of_an_owner(store: Store) -> None:
    def some(book: Book) -> None:
        book.save(None, new(count=3), 0.0)
        book.save(None, new("r-2", "bob"), 0.0)
        gone = replace(
            new("r-3").instances[0],
            state=InstanceState.TERMINATED, launched=10.0, ran_from=1.0, ran_until=60.2, ended=70.0,
        )  # fmt: skip
        book.put(gone)

    store.write(some)
    assert store.read(lambda book: book.sums("ada")) == Sums(machines=3, reserved=600, used=120)
    assert store.read(lambda book: book.sums("ada", since=71.0)).used == 0
    assert store.read(lambda book: book.sums("eve")) == Sums()
    assert [one.id for one in store.read(lambda book: book.machines("ada", 0.0))] == [
        "r-1-i0", "r-1-i1", "r-1-i2", "r-3-i0",
    ]  # fmt: skip
    assert len(store.read(lambda book: book.machines("ada", 71.0))) == 3


def test_a_value_is_dropped_and_found_by_its_columns(store: Store) -> None:
    tags = [Tag("i-1", "a b", "1", "ada"), Tag("i-1", "b", "%s ?", "ada"), Tag("i-2", "a", "3", "bob")]
    store.write(lambda book: book.put(*tags))
    assert store.read(lambda book: book.find(Tag, resource="i-1")) == tags[:2]
    store.write(lambda book: book.drop(Tag, tags[0].id))
    assert store.read(lambda book: book.find(Tag, owner="ada")) == tags[1:2]


def test_ten_that_ask_at_once_never_pass_a_limit(store: Store) -> None:
    """Read, decide and write in one transaction, behind the owner's lock."""
    limit, barrier = 4, threading.Barrier(10)

    def asks(number: int) -> bool:
        def change(book: Book) -> bool:
            book.lock("owner ada")
            if book.sums("ada").machines + 1 > limit:
                return False
            book.save(None, new(f"r-{number}"), 0.0)
            return True

        barrier.wait(30)
        return store.write(change)

    with ThreadPoolExecutor(10) as threads:
        granted = list(threads.map(asks, range(10)))
    assert sum(granted) == limit
    assert store.read(lambda book: book.sums("ada")).machines == limit


def test_steps_of_one_lease_wait_for_each_other(store: Store) -> None:
    """Each adds a word to what it read; none is lost."""
    store.write(lambda book: book.save(None, new(), 0.0))
    barrier = threading.Barrier(8)

    def adds(number: int) -> None:
        def change(book: Book) -> None:
            case = book.case("r-1")
            assert case is not None
            book.save(case, replace(case, lease=replace(case.lease, shunned=(*case.lease.shunned, str(number)))), 0.0)

        barrier.wait(30)
        store.write(change)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(adds, range(8)))
    found = store.read(lambda book: book.get(Lease, "r-1"))
    assert found is not None and sorted(found.shunned) == [str(one) for one in range(8)]


def test_two_that_lock_crosswise_both_come_through(store: Store) -> None:
    """A server may end one of them to let the other on: that one is done again."""
    barrier = threading.Barrier(2)

    def crosses(names: tuple[str, str]) -> None:
        met = []

        def change(book: Book) -> None:
            book.lock(names[0])
            if not met:
                met.append(True)
                with suppress(threading.BrokenBarrierError):  # of a file only one writes at a time
                    barrier.wait(0.5)
            book.lock(names[1])
            book.put(Tag(names[0], "k", "v", "ada"))

        store.write(change)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(crosses, [("a", "b"), ("b", "a")]))
    assert len(store.read(lambda book: book.find(Tag))) == 2


def test_records_of_another_version_are_refused(opened: Callable[[], Store]) -> None:
    opened().write(lambda book: book._execute("UPDATE facts SET value = '99'", ()))
    with pytest.raises(BadSetting, match=r"another version of belljar \(tables 99"):
        opened()


def test_a_locked_file_is_said_to_be_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.lease.store.sqlite.PATIENCE", 0.05)
    store = open_store("", tmp_path)
    store.write(lambda book: book.save(None, new(), 0.0))
    with sqlite3.connect(tmp_path / "leases.sqlite", isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RecordsLost, match="locked"):
            store.write(lambda book: book.drop(Lease, "r-1"))
        other.execute("ROLLBACK")
    other.close()
    assert store.read(lambda book: book.get(Lease, "r-1")) is not None
    assert (tmp_path / "leases.sqlite").stat().st_mode & 0o777 == 0o600
    store.close()


def test_a_full_disk_is_said_to_be_and_what_was_written_stays(tmp_path: Path) -> None:
    store = open_store("", tmp_path)
    store.write(lambda book: book.save(None, new(), 0.0))
    # SQLite's own word for a disk of so many pages.
    store.write(lambda book: book._execute("PRAGMA max_page_count = 60", ()))
    with pytest.raises(NoSpace, match="full"):
        store.write(lambda book: book.put(Tag("i-1", "k", "v" * 1_000_000, "ada")))
    assert store.read(lambda book: (book.get(Lease, "r-1") is not None, book.find(Tag))) == (True, [])
    store.write(lambda book: book.put(Tag("i-1", "k", "short", "ada")))
    store.close()


def test_a_connection_that_was_cut_is_made_anew(server: str, tmp_path: Path) -> None:
    import psycopg

    store = open_store(server, tmp_path)
    with psycopg.connect(server, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = 'postgres'"
        )
    with pytest.raises(RecordsLost):
        store.read(lambda book: book.find(Lease))
    assert store.read(lambda book: book.find(Lease)) == []
    store.close()


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RecordsLost, match="database of leases"):
        open_store("postgresql://belljar@/x?host=/nonexistent", Path("/nonexistent"))


def test_causes_are_kept(store: Store) -> None:
    machine = replace(new().instances[0], cause=Cause.NODE_LOST)
    store.write(lambda book: book.put(machine))
    assert store.read(lambda book: book.get(Instance, machine.id)) == machine


def test_records_that_are_closed_while_others_write_are_only_lost_to_them(store: Store) -> None:
    """A connection that is in use is not closed under it: that was a crash of the whole process."""
    started = threading.Barrier(5)

    def writes(number: int) -> int:
        started.wait(30)
        for count in range(100_000):
            try:
                store.write(lambda book: book.put(Tag(f"i-{number}", "k", "v" * 1000, "ada")))
            except RecordsLost:
                return count
        return -1

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(writes, number) for number in range(4)]
        started.wait(30)
        threading.Event().wait(0.2)
        store.close()
        assert all(one.result(30) >= 0 for one in running)
