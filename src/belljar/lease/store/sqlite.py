"""Leases in a file of SQLite: one writer at a time, readers beside it. What was committed survives a power cut."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from belljar.errors import NoSpace, RecordsLost
from belljar.host.files import private_folder
from belljar.lease.store.book import Book
from belljar.lease.store.tables import VERSION, schema

T = TypeVar("T")
PATIENCE = 10.0  # seconds for another writer to end
FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}


class Sqlite:
    """A connection for each thread that asks."""

    def __init__(self, path: Path) -> None:
        self._path, self._local = path, threading.local()
        self._connections = list[tuple[threading.Thread, sqlite3.Connection, threading.Lock]]()
        self._guard = threading.Lock()
        private_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            self.write(self._prepare)
        except BaseException:
            self.close()
            raise

    def _prepare(self, book: Book) -> None:
        for statement in schema("INTEGER PRIMARY KEY AUTOINCREMENT"):
            book.run(statement)
        book.check_version(VERSION, str(self._path))

    def write(self, change: Callable[[Book], T]) -> T:
        return self._within("BEGIN IMMEDIATE", change)

    def read(self, look: Callable[[Book], T]) -> T:
        return self._within("BEGIN", look)

    def _within(self, begin: str, act: Callable[[Book], T]) -> T:
        # Nobody closes a connection that is in use: SQLite would read what is freed.
        with self._told(), self._connection() as connection:
            connection.execute(begin)
            try:
                done = act(Book(lambda sql, values: connection.execute(sql, values).fetchall(), locks=False))
                connection.execute("COMMIT")
                return done
            except BaseException:
                with suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """This thread's own."""
        if not hasattr(self._local, "connection"):
            found = sqlite3.connect(self._path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
            found.execute("PRAGMA journal_mode = WAL")
            found.execute("PRAGMA synchronous = FULL")
            self._local.connection, self._local.used = found, threading.Lock()
            with self._guard:
                self._leave(lambda thread: not thread.is_alive())  # which nobody asks by any more
                self._connections.append((threading.current_thread(), found, self._local.used))
        with self._local.used:
            yield self._local.connection

    @contextmanager
    def _told(self) -> Iterator[Any]:
        try:
            yield
        except sqlite3.Error as exc:
            if getattr(exc, "sqlite_errorcode", 0) in FULL:
                raise NoSpace(f"{self._path}: {exc}") from exc
            raise RecordsLost(f"{self._path}: {exc}") from exc

    def close(self) -> None:
        with self._guard:
            self._leave(lambda thread: True)

    def _leave(self, is_over: Callable[[threading.Thread], bool]) -> None:
        """Close the connections of those threads."""
        over = [one for one in self._connections if is_over(one[0])]
        self._connections = [one for one in self._connections if one not in over]
        for _, connection, used in over:
            with used:
                connection.close()
