"""Access keys: their ids are written down, their secrets are not. A secret comes from the site's key and the id."""

from __future__ import annotations

import base64
import hmac
import secrets

PREFIX, LETTERS = "BJ", "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"


def new_id() -> str:
    """As long as Amazon's, in the same letters."""
    return PREFIX + "".join(secrets.choice(LETTERS) for _ in range(18))


def secret_of(site_key: bytes, id: str) -> str:
    """40 characters, as Amazon's."""
    return base64.b64encode(hmac.digest(site_key, b"belljar access key\n" + id.encode(), "sha256")[:30]).decode()


def pages_key(site_key: bytes) -> bytes:
    """What tokens of pages are sealed with."""
    return hmac.digest(site_key, b"belljar ec2 pages", "sha256")
