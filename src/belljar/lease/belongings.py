"""What owners have beside machines: key pairs, tags, access keys; and what is kept of each machine: its console, its user data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from belljar.errors import BadRequest, KeyPairExists, NoSuchLease
from belljar.lease import LARGEST_CONSOLE, AccessKey, Console, Instance, KeyPair, Lease, Tag
from belljar.lease.store import Book, Store
from belljar.records import replace

MOST_TAGS = 50  # of one thing, as EC2 has it
LONGEST_KEY, LONGEST_VALUE = 127, 255


class Belongings:
    """Each request is one transaction. Whatever is another owner's is not there."""

    def __init__(self, store: Store) -> None:
        self._store = store

    # -- key pairs -----------------------------------------------------------------------------------------------------

    def key_pairs(self, owner: str) -> list[KeyPair]:
        """By name."""
        return sorted(self._store.read(lambda book: book.find(KeyPair, owner=owner)), key=lambda one: one.name)

    def add_key_pair(self, pair: KeyPair) -> None:
        """Raises KeyPairExists."""

        def change(book: Book) -> None:
            book.lock(f"owner {pair.owner}")
            if book.find(KeyPair, owner=pair.owner, name=pair.name):
                raise KeyPairExists(f"{pair.owner} has a key pair {pair.name!r}")
            book.put(pair)

        self._store.write(change)

    def remove_key_pair(self, owner: str, name: str) -> None:
        """One that is not there is removed, too. Machines that have its key keep it."""

        def change(book: Book) -> None:
            for one in book.find(KeyPair, owner=owner, name=name):
                book.drop(KeyPair, one.id)

        self._store.write(change)

    # -- tags ----------------------------------------------------------------------------------------------------------

    def tags(self, owner: str) -> list[Tag]:
        return self._store.read(lambda book: book.find(Tag, owner=owner))

    def tag(self, owner: str, ids: Iterable[str], tags: Mapping[str, str]) -> None:
        """All of these things, or none. Raises NoSuchLease, BadRequest."""
        for key, value in tags.items():
            if not 1 <= len(key) <= LONGEST_KEY or len(value) > LONGEST_VALUE or "\0" in key + value:
                raise BadRequest(
                    f"{key[:40]!r}: a tag's key has 1 to {LONGEST_KEY} characters, its value {LONGEST_VALUE}"
                )

        def change(book: Book) -> None:
            book.lock(f"owner {owner}")
            for id in _owned(book, owner, ids):
                had = {one.key for one in book.find(Tag, resource=id)}
                if len(had | set(tags)) > MOST_TAGS:
                    raise BadRequest(f"{id} would have {len(had | set(tags))} tags; {MOST_TAGS} are the most")
                book.put(*(Tag(id, key, value, owner) for key, value in tags.items()))

        self._store.write(change)

    def untag(self, owner: str, ids: Iterable[str], tags: Mapping[str, str | None]) -> None:
        """Take off these keys; with a value, only where it is that. Raises NoSuchLease."""

        def change(book: Book) -> None:
            for id in _owned(book, owner, ids):
                for one in book.find(Tag, resource=id):
                    if one.key in tags and tags[one.key] in (None, one.value):
                        book.drop(Tag, one.id)

        self._store.write(change)

    # -- of machines ---------------------------------------------------------------------------------------------------

    def keep_console(self, id: str, text: bytes, now: float) -> None:
        """The last of it, in place of what was kept."""
        self._store.write(lambda book: book.put(Console(id, text[-LARGEST_CONSOLE:], now)))

    def console(self, owner: str, id: str) -> Console:
        """Empty where nothing was written yet. Raises NoSuchLease."""

        def look(book: Book) -> Console:
            _owned(book, owner, [id])
            return book.get(Console, id) or Console(id, b"", 0.0)

        return self._store.read(look)

    # -- access keys ---------------------------------------------------------------------------------------------------

    def access_keys(self, owner: str = "") -> list[AccessKey]:
        """Of one owner, or all."""
        return self._store.read(lambda book: book.find(AccessKey, **({"owner": owner} if owner else {})))

    def access_key(self, id: str) -> AccessKey | None:
        """None where there is none of this id, or it was revoked."""
        found = self._store.read(lambda book: book.get(AccessKey, id))
        return found if found is not None and found.enabled else None

    def add_access_key(self, key: AccessKey) -> None:
        self._store.write(lambda book: book.put(key))

    def revoke(self, id: str) -> bool:
        """At once, for good. False: there is none of this id."""

        def change(book: Book) -> bool:
            found = book.get(AccessKey, id)
            if found is not None:
                book.put(replace(found, enabled=False))
            return found is not None

        return self._store.write(change)


def _owned(book: Book, owner: str, ids: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(ids))
    for id in found:
        one: Instance | Lease | KeyPair | None = book.get(Instance, id) or book.get(Lease, id) or book.get(KeyPair, id)
        if one is None or one.owner != owner:
            raise NoSuchLease(f"{owner} has no {id[:40]!r}")
    return found
