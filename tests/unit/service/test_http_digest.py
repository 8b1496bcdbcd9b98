"""The digest of old clients, as urllib makes it."""

from __future__ import annotations

import re
import urllib.request

import pytest

from belljar.service.http.digest import MOST_NONCES, NONCE_TIME, Digest

PATH = "/notice/"


def said(digest: Digest, *, now: float = 100.0, secret: str = "s3cret", account: str = "old", path: str = PATH) -> str:
    """What a client answers to a challenge."""
    passwords = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    passwords.add_password(None, "http://h/", account, secret)
    handler = urllib.request.HTTPDigestAuthHandler(passwords)
    challenge = urllib.request.parse_keqv_list(urllib.request.parse_http_list(digest.challenge(now)[len("Digest ") :]))
    found = handler.get_authorization(urllib.request.Request(f"http://h{path}", b"body", method="POST"), challenge)
    return f"Digest {found}"


@pytest.fixture
def digest() -> Digest:
    return Digest("old", "realm", "s3cret", PATH)


def test_a_digest_that_is_another_is_refused(digest: Digest) -> None:
    assert not digest.is_good("", 100.0) and not digest.is_good("Basic YTpi", 100.0)
    assert not digest.is_good(said(digest, secret="another"), 100.0)
    assert not digest.is_good(said(digest, account="another"), 100.0)
    assert not digest.is_good(said(digest, path="/else/"), 100.0)
    assert not digest.is_good(re.sub(r'response="\w+"', 'response="é"', said(digest)), 100.0)
    assert not digest.is_good(re.sub(r'response="\w+"', "", said(digest)), 100.0)
    assert not digest.is_good(said(Digest("old", "realm", "s3cret", PATH)), 100.0)  # of another service's nonce


def test_a_nonce_is_good_once_and_not_for_long(digest: Digest) -> None:
    one, late = said(digest), said(digest)
    assert digest.is_good(one, 100.0 + NONCE_TIME - 1)
    assert not digest.is_good(one, 100.0 + NONCE_TIME - 1)
    assert not digest.is_good(late, 100.0 + NONCE_TIME)


def test_who_asks_for_many_nonces_makes_the_oldest_worthless_and_no_more(digest: Digest) -> None:
    first, *_ = [said(digest) for _ in range(2)]
    for _ in range(MOST_NONCES):
        digest.challenge(100.0)
    assert not digest.is_good(first, 100.0)
    assert digest.is_good(said(digest), 100.0)
