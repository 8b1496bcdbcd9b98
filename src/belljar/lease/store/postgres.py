"""Leases in a database of PostgreSQL. The server serializes what is locked (book.lock); the rest goes on side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any, TypeVar

from belljar.errors import LibraryMissing, NoSpace, RecordsLost
from belljar.lease.store.book import Book

T = TypeVar("T")
TRIES = 10  # where other transactions were in the way
CONNECT = 10  # seconds
WHAT = "the database of leases"
ALONE = "SELECT pg_advisory_xact_lock(7245310)"  # two that make the same tables at once fail each other


class Postgres:
    """As many connections as there were transactions at a time."""

    def __init__(self, address: str) -> None:
        try:
            import psycopg
        except ImportError as exc:
            what = "lease.database names a server, and the library that speaks to it is not installed"
            raise LibraryMissing(what) from exc
        self._library: Any = psycopg
        self._address, self._free, self._closed = address, deque[Any](), Event()
        try:
            self.write(lambda book: book.prepare(WHAT, ALONE, number="BIGSERIAL PRIMARY KEY"))
        except BaseException:
            self.close()
            raise

    def write(self, change: Callable[[Book], T]) -> T:
        return self._within(change, writes=True)

    def read(self, look: Callable[[Book], T]) -> T:
        return self._within(look, writes=False)

    def _within(self, act: Callable[[Book], T], *, writes: bool) -> T:
        errors = self._library.errors
        for left in reversed(range(TRIES)):
            try:
                return self._once(act, writes)
            except (errors.DeadlockDetected, errors.SerializationFailure) as exc:
                if not left:
                    raise RecordsLost(f"{WHAT}: {exc}") from exc
            except (errors.DiskFull, errors.OutOfMemory) as exc:
                raise NoSpace(f"{WHAT}: {exc}") from exc
            except errors.DataError as exc:
                raise ValueError(f"{WHAT} cannot have this: {exc}") from exc
            except self._library.Error as exc:
                self._close_free()  # which are lost, too, where the server was started anew
                raise RecordsLost(f"{WHAT}: {exc}") from exc
        raise AssertionError("unreachable")

    def _once(self, act: Callable[[Book], T], writes: bool) -> T:
        with self._connection() as connection:

            def execute(sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
                cursor = connection.execute(sql.replace("?", "%s") if values else sql, values or None)
                return cursor.fetchall() if cursor.description else []

            with connection.transaction():
                if not writes:
                    connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                return act(Book(execute, locks=writes))

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """For one transaction."""
        if self._closed.is_set():
            raise RecordsLost(f"{WHAT} was closed")
        try:
            connection = self._free.pop()
        except IndexError:
            connection = self._library.connect(self._address, autocommit=True, connect_timeout=CONNECT)
        try:
            yield connection
        finally:
            if not connection.closed:
                self._free.append(connection)
            if self._closed.is_set():
                self._close_free()

    def _close_free(self) -> None:
        with suppress(IndexError):
            while True:
                self._free.pop().close()

    def close(self) -> None:
        self._closed.set()
        self._close_free()
