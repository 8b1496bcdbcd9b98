"""A request: its parameters, and who signed it. All of it is untrusted; what is not clearly meant is refused. Pure.

It is signed by Signature Version 4, in a header or in the query (presigned), or by Version 2 of older tools.
https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html. Version 2 signs neither body nor
headers; it is taken because the service speaks TLS, or plain HTTP on loopback alone. Region and service are the client's to
name: some tools take them from the host's name."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import quote, unquote_to_bytes

from belljar.lease.ec2.refusals import UNSPEAKABLE, Refused
from belljar.service.http.server import Sent

LARGEST_BODY = 128 << 10  # user data of 16 KiB, in base64, percent-encoded, and much else
MOST_FIELDS = 2000  # 1000 ids and what belongs to them
LONGEST_NAME, DEEPEST = 256, 8
NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
PLACE = re.compile(r"/(?:[A-Za-z0-9_~-][A-Za-z0-9._~-]*+/?)*")  # `*+`: each part is read in one way alone
FORM = "application/x-www-form-urlencoded"
SKEW = 900  # seconds that clocks may differ, and that a request may travel
LONGEST_VALID = 7 * 86400  # seconds, of a presigned request
ALGORITHM = "AWS4-HMAC-SHA256"
NAMES = [f"X-Amz-{name}" for name in ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")]
# What names the action or signs the request, and is no parameter of the action.
ENVELOPE = frozenset({
    "Action", "Version", "AWSAccessKeyId", "Signature", "SignatureVersion", "SignatureMethod", "Timestamp", "Expires", "SecurityToken",
    *NAMES, "X-Amz-Security-Token",
})  # fmt: skip
PARTS = re.compile(r"(\w+)=([^,\s]+)")
KEY_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
DIGESTS = {"HmacSHA256": "sha256", "HmacSHA1": "sha1"}


def pairs(text: str) -> list[tuple[str, str]]:
    """The names and values of a query, in their order, decoded once. Raises Refused."""
    parts = [part for part in text.split("&") if part]
    if len(parts) > MOST_FIELDS:
        raise Refused("MalformedQueryString", f"more than {MOST_FIELDS} parameters")
    fields = [(_decoded(name), _decoded(value)) for name, _, value in (part.partition("=") for part in parts)]
    if len({name for name, _ in fields}) < len(fields):
        raise Refused("MalformedQueryString", "a parameter is given twice")
    return fields


def _decoded(text: str) -> str:
    try:
        value = unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise Refused("MalformedQueryString", "a parameter is not UTF-8") from None
    if UNSPEAKABLE.search(value):
        raise Refused("MalformedQueryString", "a parameter has control characters")
    return value


def fields_of(sent: Sent) -> dict[str, str]:
    """All parameters, of the query and of the body. Raises Refused."""
    if not PLACE.fullmatch(sent.path):
        raise Refused("MalformedQueryString", "the path is none of ours: the service is at /")
    if sent.method not in ("GET", "POST"):
        raise Refused("InvalidAction", "only GET and POST are understood")
    texts = [sent.query]
    if sent.method == "POST":
        kind = (sent.header("content-type") or FORM).partition(";")[0].strip().lower()
        if kind != FORM or not sent.body.isascii():
            raise Refused("MalformedQueryString", f"a body is {FORM}, encoded in UTF-8")
        texts.append(sent.body.decode("ascii"))
    fields = dict(pairs("&".join(texts)))
    for name in fields:
        if len(name) > LONGEST_NAME or not NAME.fullmatch(name) or name.count(".") >= DEEPEST:
            raise Refused("UnknownParameter", f"The parameter {name[:60]!r} is not recognized")
    return fields


# -- who signed it -----------------------------------------------------------------------------------------------------


def key_of(sent: Sent, fields: dict[str, str]) -> str:
    """The id of the access key that the request names; "" where it names none."""
    words = sent.header("authorization")
    parts = fields if words is None else _said_in_header(sent, words)
    key = parts.get("X-Amz-Credential", fields.get("AWSAccessKeyId", "")).partition("/")[0]
    return key if KEY_ID.fullmatch(key) else ""


def check_signature(sent: Sent, fields: dict[str, str], secret: str | None, now: float) -> None:
    """*secret*: of the access key that the request names; None: it has none. Raises Refused for anything but a good and fresh signature."""
    words = sent.header("authorization")
    if words is not None:
        return _check_4(sent, _said_in_header(sent, words), secret, now)
    if "X-Amz-Algorithm" in fields or "X-Amz-Signature" in fields:
        return _check_4(sent, fields, secret, now)
    if "Signature" in fields and fields.get("SignatureVersion") == "2":
        return _check_2(sent, fields, secret, now)
    if "Signature" in fields:
        raise Refused("IncompleteSignature", "SignatureVersion 4 and 2 are understood, no other")
    raise Refused("MissingAuthenticationToken", "Request is missing Authentication Token")


# -- version 4 ---------------------------------------------------------------------------------------------------------


def _said_in_header(sent: Sent, words: str) -> dict[str, str]:
    """As a presigned request has it in its query."""
    algorithm, _, rest = words.partition(" ")
    parts = dict(PARTS.findall(rest))
    if parts.keys() != {"Credential", "SignedHeaders", "Signature"}:
        return {}
    more = {"X-Amz-Algorithm": algorithm, "X-Amz-Date": sent.header("x-amz-date") or "", "X-Amz-Expires": str(SKEW)}
    return {f"X-Amz-{name}": value for name, value in parts.items()} | more


def _check_4(sent: Sent, parts: dict[str, str], secret: str | None, now: float) -> None:
    algorithm, credential, moment, valid, headers, signature = (parts.get(name, "") for name in NAMES)
    scope = credential.split("/")[1:]
    if algorithm != ALGORITHM or not headers or not signature or not re.fullmatch(r"[0-9]{1,6}", valid):
        needed = "Credential, Date, SignedHeaders, Signature, Expires in a query"
        raise Refused("IncompleteSignature", f"{ALGORITHM} with {needed}")
    if len(scope) != 4 or scope[3] != "aws4_request" or scope[0] != moment[:8]:
        raise Refused("IncompleteSignature", "Credential: KEY/DATE/REGION/SERVICE/aws4_request, DATE as in X-Amz-Date")
    if not 1 <= int(valid) <= LONGEST_VALID:
        raise Refused("IncompleteSignature", f"X-Amz-Expires is 1 to {LONGEST_VALID}")
    begins = _moment(moment, "%Y%m%dT%H%M%SZ", "X-Amz-Date")
    _check_fresh(begins, begins + int(valid), now)
    known = _known(secret)
    stated = sent.header("x-amz-content-sha256")
    actual = hashlib.sha256(sent.body).hexdigest()
    if stated not in (None, actual):
        raise Refused("SignatureDoesNotMatch", "x-amz-content-sha256 is not that of the body")
    request = _canonical(sent, headers, actual)
    text = "\n".join((ALGORITHM, moment, "/".join(scope), hashlib.sha256(request.encode()).hexdigest()))
    key = b"AWS4" + known.encode()
    for word in scope:
        key = hmac.digest(key, word.encode(), "sha256")
    _compare(hmac.digest(key, text.encode(), "sha256").hex(), signature)


def _canonical(sent: Sent, signed: str, payload: str) -> str:
    names = signed.split(";")
    if "host" not in names or names != sorted(set(names)):
        raise Refused("IncompleteSignature", "SignedHeaders: sorted, each once, host among them")
    lines = []
    for name in names:
        value = sent.header(name)
        if value is None:
            raise Refused("SignatureDoesNotMatch", f"the signed header {name[:60]!r} is not there")
        lines.append(f"{name}:{value}\n")
    query = _encoded(pairs(sent.query), "X-Amz-Signature")
    return "\n".join((sent.method, sent.path or "/", query, "".join(lines), signed, payload))


# -- version 2 ---------------------------------------------------------------------------------------------------------


def _check_2(sent: Sent, fields: dict[str, str], secret: str | None, now: float) -> None:
    method = DIGESTS.get(fields.get("SignatureMethod", ""))
    if method is None:
        raise Refused("IncompleteSignature", f"SignatureMethod is {' or '.join(DIGESTS)}")
    if ("Timestamp" in fields) == ("Expires" in fields):
        raise Refused("IncompleteSignature", "exactly one of Timestamp and Expires is given")
    which = "Timestamp" if "Timestamp" in fields else "Expires"
    moment = _moment(re.sub(r"(\.[0-9]{1,9})?Z?$", "", fields[which]), "%Y-%m-%dT%H:%M:%S", which)
    _check_fresh(*((moment, moment + SKEW) if which == "Timestamp" else (moment - LONGEST_VALID, moment)), now)
    known = _known(secret)
    host = (sent.header("host") or "").lower()
    text = "\n".join((sent.method, host, sent.path or "/", _encoded(fields.items(), "Signature")))
    _compare(base64.b64encode(hmac.digest(known.encode(), text.encode(), method)).decode(), fields["Signature"])


# -- both --------------------------------------------------------------------------------------------------------------


def _encoded(fields: Iterable[tuple[str, str]], left_out: str) -> str:
    coded = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in fields if name != left_out)
    return "&".join(f"{name}={value}" for name, value in coded)


def _moment(text: str, form: str, name: str) -> float:
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        raise Refused("IncompleteSignature", f"{name} is not a moment") from None


def _check_fresh(begins: float, ends: float, now: float) -> None:
    if not begins - SKEW <= now <= ends:
        raise Refused("RequestExpired", "Request has expired, or the clocks of client and service differ too much")


def _known(secret: str | None) -> str:
    if secret is None:
        raise Refused("AuthFailure", "AWS was not able to validate the provided access credentials")
    return secret


def _compare(made: str, given: str) -> None:
    if not hmac.compare_digest(made.encode(), given.encode()):
        raise Refused("SignatureDoesNotMatch", "The request's signature is not that of this request and this secret.")
