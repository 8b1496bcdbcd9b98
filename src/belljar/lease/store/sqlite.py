"""Leases in a file of SQLite: one writer at a time, readers beside it. What was committed survives a power cut."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from belljar.errors import NoSpace, RecordsLost
from belljar.host.files import private_folder
from belljar.lease.store.book import Book

T = TypeVar("T")
PATIENCE = 10.0  # seconds for another writer to end
FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}


class Connection:
    """Of one kind of transaction, which one thread at a time makes: nobody closes it under another."""

    def __init__(self, path: Path, begin: str) -> None:
        self._path, self._begin, self._guard = path, begin, threading.Lock()
        self._file = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute("PRAGMA synchronous = FULL")

    def within(self, act: Callable[[Book], T]) -> T:
        try:
            with self._guard, self._file:  # committed, or rolled back where something was raised
                self._file.execute(self._begin)
                return act(Book(lambda sql, values: self._file.execute(sql, values).fetchall(), locks=False))
        except sqlite3.Error as exc:
            is_full = getattr(exc, "sqlite_errorcode", 0) in FULL
            raise (NoSpace if is_full else RecordsLost)(f"{self._path}: {exc}") from exc

    def close(self) -> None:
        with self._guard:
            self._file.close()


class Sqlite:
    def __init__(self, path: Path) -> None:
        private_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        try:
            self._writer, self._reader = Connection(path, "BEGIN IMMEDIATE"), Connection(path, "BEGIN")
        except sqlite3.Error as exc:
            raise RecordsLost(f"{path}: {exc}") from exc
        self.write, self.read = self._writer.within, self._reader.within
        try:
            self.write(lambda book: book.prepare(str(path), number="INTEGER PRIMARY KEY AUTOINCREMENT"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
