"""What is written down of leases: one database, changed in transactions alone.

A value is kept whole, as JSON; columns beside it are only to find it by. Events are added, never changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from belljar.lease.store.book import Book

__all__ = ["Book", "Store", "open_store"]

T = TypeVar("T")


class Store(Protocol):
    """May be used by any thread. A call may be slow, as disks are: not for an event loop's own thread."""

    def write(self, change: Callable[[Book], T]) -> T:
        """All of it or nothing; on disk when it returns. *change* may be called again where another transaction was in the way, so
        it does nothing else. Raises RecordsLost, NoSpace."""

    def read(self, look: Callable[[Book], T]) -> T:
        """One moment's view. Raises RecordsLost."""

    def close(self) -> None: ...


def open_store(database: str, folder: Path) -> Store:
    """A server's database by its address (postgresql://...), else `leases.sqlite` in *folder*. Makes what is missing."""
    if database:
        from belljar.lease.store.postgres import Postgres

        return Postgres(database)
    from belljar.lease.store.sqlite import Sqlite

    return Sqlite(folder / "leases.sqlite")
