"""Access keys: their ids are written down, their secrets are not. A secret comes from the site's key and the id."""

from __future__ import annotations

import base64
import grp
import hmac
import os
import pwd
import secrets
import time
from collections.abc import Mapping
from typing import Any

from belljar.errors import BadRequest, NotPermitted
from belljar.lease import AccessKey
from belljar.lease.belongings import Belongings
from belljar.lease.desk import Owner

PREFIX, LETTERS = "BJ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
MOST = 10  # of one owner that open anything


def new_id() -> str:
    """As long as Amazon's, in the same letters."""
    return PREFIX + "".join(secrets.choice(LETTERS) for _ in range(18))


def secret_of(site_key: bytes, id: str) -> str:
    """40 characters, as Amazon's."""
    return base64.b64encode(hmac.digest(site_key, b"belljar access key\n" + id.encode(), "sha256")[:30]).decode()


def pages_key(site_key: bytes) -> bytes:
    """What tokens of pages are sealed with."""
    return hmac.digest(site_key, b"belljar ec2 pages", "sha256")


class Keyring:
    """What owners ask of their access keys. root, and the account of the service, may ask for others' too."""

    def __init__(self, belongings: Belongings, site_key: bytes) -> None:
        self._belongings, self._site_key = belongings, site_key

    def answer(self, asker: Owner, asked: Mapping[str, Any]) -> dict[str, Any]:
        """*asked*: act (new, list, revoke), and owner or id. Raises BadRequest, NotPermitted."""
        act, name, id = (str(asked.get(one) or "") for one in ("act", "owner", "id"))
        rules = asker.name in ("root", pwd.getpwuid(os.geteuid()).pw_name)
        if name not in ("", asker.name) and not rules:
            raise NotPermitted(f"access keys of {name[:40]}: {asker.name} may ask for their own")
        if act == "new":
            return self._new(asker if name in ("", asker.name) else _account(name))
        if act == "list":
            return {"keys": self._belongings.access_keys("" if rules and not name else name or asker.name)}
        if act == "revoke":
            return self._revoke(id, None if rules else asker.name)
        raise BadRequest(f"{act[:40]!r}: new, list or revoke")

    def _new(self, owner: Owner) -> dict[str, Any]:
        """The secret is told now; it is kept nowhere."""
        if sum(one.enabled for one in self._belongings.access_keys(owner.name)) >= MOST:
            raise BadRequest(f"{owner.name} has {MOST} access keys", hint="Revoke one: `belljar lease key revoke ID`.")
        made = AccessKey(new_id(), owner.name, owner.group, time.time())
        self._belongings.add_access_key(made)
        return {"id": made.id, "secret": secret_of(self._site_key, made.id), "owner": owner.name}

    def _revoke(self, id: str, owner: str | None) -> dict[str, Any]:
        found = [one for one in self._belongings.access_keys(owner or "") if one.id == id]
        if not found or not self._belongings.revoke(id):
            raise BadRequest(f"{id[:40]!r}: no such access key", hint="See `belljar lease key list`.")
        return {"id": id}


def _account(name: str) -> Owner:
    """Raises BadRequest."""
    try:
        account = pwd.getpwnam(name)
        return Owner(name, grp.getgrgid(account.pw_gid).gr_name)
    except KeyError:
        raise BadRequest(f"{name[:40]}: no such user, or none with a group, on this host") from None
