"""Digest authentication as old clients have it: MD5 with qop `auth`, one account, each nonce good once (RFC 2617). It signs no body."""

from __future__ import annotations

import hmac
import os
import re
from hashlib import md5

NONCE_TIME, MOST_NONCES = 60.0, 4096
WORDS = re.compile(r'(\w+)="?([^",]*)"?')


class Digest:
    """For POST to one path. *now*, everywhere: of a clock that never goes back."""

    def __init__(self, account: str, realm: str, secret: str, path: str) -> None:
        self._realm, self._path = realm, path
        self._key, self._act = _md5(f"{account}:{realm}:{secret}"), _md5(f"POST:{path}")
        self._nonces: dict[str, float] = {}  # each is good until then

    def challenge(self, now: float) -> str:
        """For WWW-Authenticate. When too many were given out, the oldest is good no more."""
        made = os.urandom(16).hex()
        fresh = [nonce for nonce in self._nonces.items() if nonce[1] > now][1 - MOST_NONCES :]
        self._nonces = {**dict(fresh), made: now + NONCE_TIME}
        return f'Digest realm="{self._realm}", qop="auth", nonce="{made}"'

    def is_good(self, header: str, now: float) -> bool:
        """*header*: Authorization. Its nonce is used up, whatever the answer is."""
        answer = dict(WORDS.findall(header))
        if answer.get("uri") != self._path or self._nonces.pop(answer.get("nonce", ""), 0.0) <= now:
            return False
        words = (self._key, answer["nonce"], answer.get("nc", ""), answer.get("cnonce", ""), "auth", self._act)
        return hmac.compare_digest(_md5(":".join(words)).encode(), answer.get("response", "").encode())


def _md5(text: str) -> str:
    return md5(text.encode(), usedforsecurity=False).hexdigest()
