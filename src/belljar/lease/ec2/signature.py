"""Who signed this request: Signature Version 4, in a header or in the query (presigned), and Version 2 of older tools. Pure.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. Version 2 signs neither body nor
headers; it is taken because the service speaks TLS, or plain HTTP on loopback alone. Region and service are the client's to
name: some tools take them from the host's name.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from urllib.parse import quote

from belljar.lease.ec2.query import Sent, pairs
from belljar.lease.ec2.refusals import Refused
from belljar.records import dataclass

SKEW = 900.0  # seconds that clocks may differ, and that a request may travel
LONGEST_VALID = 7 * 86400  # seconds, of a presigned request
ALGORITHM = "AWS4-HMAC-SHA256"
PARTS = re.compile(r"(\w+)=([^,\s]+)")
KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
DIGESTS = {"HmacSHA256": "sha256", "HmacSHA1": "sha1"}


@dataclass(frozen=True)
class _Claim:
    """Version 4: who is said to have signed what, when, and how."""

    key: str
    scope: str
    moment: str
    headers: str
    signature: str
    valid: int | None = None  # seconds; of a presigned request


def signer(sent: Sent, fields: dict[str, str], secret_of: Callable[[str], str | None], now: float) -> str:
    """The id of the access key that signed it. Raises Refused for anything but a good and fresh signature."""
    words = sent.header("authorization")
    if words is not None:
        return _check_4(sent, _claim_of_header(sent, words), secret_of, now)
    if "X-Amz-Algorithm" in fields or "X-Amz-Signature" in fields:
        return _check_4(sent, _claim_of_query(fields), secret_of, now)
    if "Signature" in fields and fields.get("SignatureVersion") == "2":
        return _check_2(sent, fields, secret_of, now)
    if "Signature" in fields:
        raise Refused("IncompleteSignature", "SignatureVersion 4 and 2 are understood, no other")
    raise Refused("MissingAuthenticationToken", "Request is missing Authentication Token")


# -- version 4 ---------------------------------------------------------------------------------------------------------


def _claim_of_header(sent: Sent, words: str) -> _Claim:
    algorithm, _, rest = words.partition(" ")
    parts = dict(PARTS.findall(rest))
    if algorithm != ALGORITHM or parts.keys() != {"Credential", "SignedHeaders", "Signature"}:
        raise Refused(
            "IncompleteSignature", f"Authorization: not {ALGORITHM} with Credential, SignedHeaders, Signature"
        )
    key, _, scope = parts["Credential"].partition("/")
    return _Claim(key, scope, sent.header("x-amz-date") or "", parts["SignedHeaders"], parts["Signature"])


def _claim_of_query(fields: dict[str, str]) -> _Claim:
    names = ("X-Amz-Credential", "X-Amz-Date", "X-Amz-SignedHeaders", "X-Amz-Signature", "X-Amz-Expires")
    if fields.get("X-Amz-Algorithm") != ALGORITHM or any(name not in fields for name in names):
        raise Refused("IncompleteSignature", f"a presigned request has X-Amz-Algorithm={ALGORITHM}, {', '.join(names)}")
    credential, moment, headers, signature, valid = (fields[name] for name in names)
    if not re.fullmatch(r"[0-9]{1,6}", valid) or not 1 <= int(valid) <= LONGEST_VALID:
        raise Refused("IncompleteSignature", f"X-Amz-Expires is 1 to {LONGEST_VALID}")
    key, _, scope = credential.partition("/")
    return _Claim(key, scope, moment, headers, signature, int(valid))


def _check_4(sent: Sent, claim: _Claim, secret_of: Callable[[str], str | None], now: float) -> str:
    scope = claim.scope.split("/")
    if len(scope) != 4 or scope[3] != "aws4_request" or scope[0] != claim.moment[:8]:
        raise Refused(
            "IncompleteSignature", "Credential is KEY/DATE/REGION/SERVICE/aws4_request, of the date of X-Amz-Date"
        )
    begins = _moment(claim.moment, "%Y%m%dT%H%M%SZ", "X-Amz-Date")
    _check_fresh(begins, begins + (SKEW if claim.valid is None else claim.valid), now)
    secret = _secret(claim.key, secret_of)
    stated = sent.header("x-amz-content-sha256")
    actual = hashlib.sha256(sent.body).hexdigest()
    if stated not in (None, actual):
        raise Refused("SignatureDoesNotMatch", "x-amz-content-sha256 is not that of the body")
    request = _canonical(sent, claim.headers, actual, "X-Amz-Signature")
    text = "\n".join((ALGORITHM, claim.moment, claim.scope, hashlib.sha256(request.encode()).hexdigest()))
    key = b"AWS4" + secret.encode()
    for word in scope:
        key = hmac.digest(key, word.encode(), "sha256")
    _compare(hmac.digest(key, text.encode(), "sha256").hex(), claim.signature)
    return claim.key


def _canonical(sent: Sent, signed: str, payload: str, left_out: str) -> str:
    names = signed.split(";")
    if "host" not in names or names != sorted(set(names)):
        raise Refused("IncompleteSignature", "SignedHeaders: sorted, each once, host among them")
    lines = []
    for name in names:
        value = sent.header(name)
        if value is None:
            raise Refused("SignatureDoesNotMatch", f"the signed header {name[:60]!r} is not there")
        lines.append(f"{name}:{value}\n")
    query = _encoded(pairs(sent.query), left_out)
    return "\n".join((sent.method, sent.path or "/", query, "".join(lines), signed, payload))


# -- version 2 ---------------------------------------------------------------------------------------------------------


def _check_2(sent: Sent, fields: dict[str, str], secret_of: Callable[[str], str | None], now: float) -> str:
    method = DIGESTS.get(fields.get("SignatureMethod", ""))
    if method is None:
        raise Refused("IncompleteSignature", f"SignatureMethod is {' or '.join(DIGESTS)}")
    if ("Timestamp" in fields) == ("Expires" in fields):
        raise Refused("IncompleteSignature", "exactly one of Timestamp and Expires is given")
    which = "Timestamp" if "Timestamp" in fields else "Expires"
    moment = _moment(re.sub(r"(\.[0-9]{1,9})?Z?$", "", fields[which]), "%Y-%m-%dT%H:%M:%S", which)
    if which == "Timestamp":
        _check_fresh(moment, moment + SKEW, now)
    else:
        _check_fresh(min(now, moment), moment, now)
    secret = _secret(fields.get("AWSAccessKeyId", ""), secret_of)
    host = (sent.header("host") or "").lower()
    text = "\n".join((sent.method, host, sent.path or "/", _encoded(fields.items(), "Signature")))
    made = base64.b64encode(hmac.digest(secret.encode(), text.encode(), method)).decode()
    _compare(made, fields["Signature"])
    return fields["AWSAccessKeyId"]


# -- both --------------------------------------------------------------------------------------------------------------


def _encoded(found: Iterable[tuple[str, str]], left_out: str) -> str:
    coded = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in found if name != left_out)
    return "&".join(f"{name}={value}" for name, value in coded)


def _moment(text: str, form: str, name: str) -> float:
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        raise Refused("IncompleteSignature", f"{name} is no moment") from None


def _check_fresh(begins: float, ends: float, now: float) -> None:
    if not begins - SKEW <= now <= ends:
        raise Refused("RequestExpired", "Request has expired, or the clocks of client and service differ too much")


def _secret(key: str, secret_of: Callable[[str], str | None]) -> str:
    secret = secret_of(key) if KEY_ID.fullmatch(key) else None
    if secret is None:
        raise Refused("AuthFailure", "AWS was not able to validate the provided access credentials")
    return secret


def _compare(made: str, given: str) -> None:
    if not hmac.compare_digest(made.encode(), given.encode()):
        raise Refused(
            "SignatureDoesNotMatch", "The request signature we calculated does not match the signature you provided."
        )
