"""What owners have beside machines: key pairs and tags; and what is kept of each machine: its console. Each is a part of a transaction.
Whatever is another owner's is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from belljar.errors import KeyPairExists, LeaseDenied, NoSuchLease
from belljar.lease import Console, Instance, KeyPair, Lease, Tag
from belljar.lease.store import Book

MOST_TAGS, MOST_PAIRS = 50, 1000  # of one thing, as EC2 has it; of one owner
SERVICES = "lease:"  # tags that begin so are not the owner's


def add_key_pair(book: Book, pair: KeyPair, tags: Mapping[str, str]) -> None:
    """Raises KeyPairExists, LeaseDenied."""
    book.lock(f"owner {pair.owner}")
    if pair.name in (names := {other.name for other in book.find(KeyPair, owner=pair.owner)}):
        raise KeyPairExists(f"{pair.owner} has a key pair {pair.name!r}")
    if len(names) >= MOST_PAIRS:
        raise LeaseDenied(f"{pair.owner} has {len(names)} key pairs", code="ResourceLimitExceeded", hint="Delete some.")
    book.put(pair)
    tag(book, pair.owner, [pair.id], tags)


def remove_key_pairs(book: Book, owner: str, *names: str) -> None:
    """With their tags. One that is not there is removed, too. Machines that have its key keep it."""
    for pair in (pair for pair in book.find(KeyPair, owner=owner) if pair.name in names):
        book.drop(Tag, resource=pair.id)
        book.drop(KeyPair, pair.id)


def tag(book: Book, owner: str, ids: Iterable[str], tags: Mapping[str, str]) -> None:
    """All of these things, or none. Raises NoSuchLease, LeaseDenied."""
    book.lock(f"owner {owner}")
    for resource in owned(book, owner, ids):
        keys = {had.key for had in book.find(Tag, resource=resource.id)} | {*tags}
        if (count := sum(not key.startswith(SERVICES) for key in keys)) > MOST_TAGS:
            what = f"{resource.id} would have {count} tags; {MOST_TAGS} are the most"
            raise LeaseDenied(what, code="TagLimitExceeded", hint="Take others off first.")
        book.put(*(Tag(resource.id, key, value, owner) for key, value in tags.items()))


def untag(book: Book, owner: str, ids: Iterable[str], tags: Mapping[str, str | None]) -> None:
    """Take off these keys; with a value, only where it is that; all of the owner's where none is named. Raises NoSuchLease."""
    for resource in owned(book, owner, ids):
        for had in book.find(Tag, resource=resource.id):
            is_own = not had.key.startswith(SERVICES)
            if tags[had.key] in (None, had.value) if had.key in tags else is_own and not tags:
                book.drop(Tag, had.id)


def console(book: Book, owner: str, id: str) -> Console:
    """Empty where nothing was written yet. Raises NoSuchLease."""
    owned(book, owner, [id])
    return book.get(Console, id) or Console(id, b"", 0.0)


def owned(book: Book, owner: str, ids: Iterable[str], *kinds: type[Any]) -> list[Any]:
    """These things, each once. Raises NoSuchLease where one is not there, or is another's."""
    resources = []
    for id in dict.fromkeys(ids):
        resource = next(filter(None, (book.get(kind, id) for kind in kinds or (Instance, Lease, KeyPair))), None)
        if resource is None or resource.owner != owner:
            raise NoSuchLease(f"{owner} has no {id[:40]!r}")
        resources.append(resource)
    return resources
