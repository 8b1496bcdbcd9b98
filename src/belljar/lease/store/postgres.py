"""Leases in a database of PostgreSQL. The server serializes what is locked (book.lock); the rest goes on side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from belljar.errors import BadSetting, NoSpace, RecordsLost
from belljar.lease.store.book import Book
from belljar.lease.store.tables import VERSION, schema

T = TypeVar("T")
TRIES = 10  # where other transactions were in the way
CONNECT = 10  # seconds


class Postgres:
    """A connection for each thread that asks; one that was lost is made anew by the next question."""

    def __init__(self, address: str) -> None:
        try:
            import psycopg
        except ImportError as exc:
            raise BadSetting(
                "lease.database names a server, and the library that speaks to it is not installed",
                hint="Install belljar with its extra: `pip install 'belljar[lease]'`.",
            ) from exc
        self._library: Any = psycopg
        self._address, self._local = address, threading.local()
        self._connections, self._guard = dict[Any, threading.Thread](), threading.Lock()
        try:
            self.write(self._prepare)
        except BaseException:
            self.close()
            raise

    def _prepare(self, book: Book) -> None:
        book.run("SELECT pg_advisory_xact_lock(7245310)")  # two that make the same tables at once fail each other
        for statement in schema("BIGSERIAL PRIMARY KEY"):
            book.run(statement)
        book.check_version(VERSION, "the database of leases")

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
                    raise RecordsLost(f"the database of leases: {exc}") from exc
            except (errors.DiskFull, errors.OutOfMemory) as exc:
                raise NoSpace(f"the database of leases: {exc}") from exc
            except self._library.Error as exc:
                self._drop()
                raise RecordsLost(f"the database of leases: {exc}") from exc
        raise AssertionError("unreachable")

    def _once(self, act: Callable[[Book], T], writes: bool) -> T:
        connection = self._connection()

        def execute(sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
            cursor = connection.execute(sql.replace("?", "%s") if values else sql, values or None)
            return cursor.fetchall() if cursor.description else []

        with connection.transaction():
            if not writes:
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return act(Book(execute, locks=writes))

    def _connection(self) -> Any:
        found = getattr(self._local, "connection", None)
        if found is None or found.closed:
            found = self._library.connect(self._address, autocommit=True, connect_timeout=CONNECT)
            self._local.connection = found
            with self._guard:
                for old in [one for one, thread in self._connections.items() if not thread.is_alive()]:
                    del self._connections[old]  # nobody asks by it any more
                    old.close()
                self._connections[found] = threading.current_thread()
        return found

    def _drop(self) -> None:
        found = getattr(self._local, "connection", None)
        if found is not None:
            self._local.connection = None
            with self._guard:
                self._connections.pop(found, None)
            with suppress(self._library.Error):
                found.close()

    def close(self) -> None:
        with self._guard:
            for one in self._connections:
                one.close()
            self._connections.clear()
