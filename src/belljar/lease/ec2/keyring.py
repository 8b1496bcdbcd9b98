"""Access keys: their ids are written down, their secrets are not. A secret comes from the site's key and the id."""

from __future__ import annotations

import base64
import hmac
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from belljar.errors import BadRequest
from belljar.lease import AccessKey
from belljar.lease.clerk import permit
from belljar.lease.desk import Owner
from belljar.lease.store import Book, Store
from belljar.records import replace

PREFIX, LETTERS = "BJ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
MOST = 10  # of one owner that open anything


def new_id() -> str:
    """As long as Amazon's, in the same letters."""
    return PREFIX + "".join(secrets.choice(LETTERS) for _ in range(18))


def secret_of(site_key: bytes, id: str) -> str:
    """40 characters, as Amazon's."""
    return base64.b64encode(hmac.digest(site_key, b"belljar access key\n" + id.encode(), "sha256")[:30]).decode()


def owner_of(key: AccessKey | None) -> Owner | None:
    """Whose it is, and which group they are of now, which the host may have to ask far away; None where it was revoked."""
    if key is None or not key.enabled:
        return None
    with suppress(BadRequest):
        return Owner.of(key.owner)
    return Owner(key.owner, key.group)  # there is no such account any more


def answer(store: Store, site_key: bytes, asker: Owner, asked: Mapping[str, Any]) -> dict[str, Any]:
    """What owners ask of their access keys: act (new, list, revoke), and owner or id. root, and the account of the service, may ask
    for others' too. A new one's secret is told now; it is kept nowhere. Raises BadRequest, NotPermitted."""
    act, name, id = (str(asked.get(field) or "") for field in ("act", "owner", "id"))
    permit(name in ("", asker.name), asker, f"access keys of {name[:40]}")
    if act == "new":
        owner = asker if name in ("", asker.name) else Owner.of(name)
        made = AccessKey(new_id(), owner.name, owner.group, time.time())
        store.write(lambda book: _add(book, made))
        return {"id": made.id, "secret": secret_of(site_key, made.id), "owner": owner.name}
    if act == "list":
        of = {} if asker.rules and not name else {"owner": name or asker.name}
        return {"keys": store.read(lambda book: book.find(AccessKey, **of))}
    if act == "revoke":
        store.write(lambda book: _revoke(book, asker, id))
        return {"id": id}
    raise BadRequest(f"{act[:40]!r}: new, list or revoke")


def _add(book: Book, made: AccessKey) -> None:
    book.lock(f"owner {made.owner}")
    if sum(key.enabled for key in book.find(AccessKey, owner=made.owner)) >= MOST:
        raise BadRequest(f"{made.owner} has {MOST} access keys", hint="Revoke one: `belljar lease key revoke ID`.")
    book.put(made)


def _revoke(book: Book, asker: Owner, id: str) -> None:
    """At once, for good."""
    key = book.get(AccessKey, id)
    if key is None or not (asker.rules or key.owner == asker.name):
        raise BadRequest(f"{id[:40]!r}: no such access key", hint="See `belljar lease key list`.")
    book.put(replace(key, enabled=False))
