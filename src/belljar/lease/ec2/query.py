"""A request as it came by HTTP, and its parameters. All of it is untrusted; what is not clearly meant is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

from belljar.lease.ec2.refusals import Refused
from belljar.records import dataclass

LARGEST_BODY = 128 << 10  # user data of 16 KiB, in base64, percent-encoded, and much else
MOST_FIELDS = 2000  # 1000 ids and what belongs to them
LONGEST_NAME, DEEPEST = 256, 8
# What XML 1.0 cannot say cannot be answered either.
UNSPEAKABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
PLACE = re.compile(r"/(?:[A-Za-z0-9_~-][A-Za-z0-9._~-]*/?)*")
FORM = "application/x-www-form-urlencoded"


@dataclass(frozen=True)
class Sent:
    """A request, as it was received."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]  # names in small letters
    body: bytes = b""

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    def header(self, name: str) -> str | None:
        """As it is signed: those of the same name joined, blanks at its ends taken off and inner ones collapsed."""
        found = [" ".join(value.split()) for key, value in self.headers if key == name]
        return ",".join(found) if found else None


def pairs(text: str) -> list[tuple[str, str]]:
    """The names and values of a query, in their order, decoded once. Raises Refused."""
    parts = [part for part in text.split("&") if part]
    if len(parts) > MOST_FIELDS:
        raise Refused("MalformedQueryString", f"more than {MOST_FIELDS} parameters")
    found = [(_decoded(name), _decoded(value)) for name, _, value in (part.partition("=") for part in parts)]
    if len({name for name, _ in found}) < len(found):
        raise Refused("MalformedQueryString", "a parameter is given twice")
    return found


def _decoded(text: str) -> str:
    try:
        value = unquote_to_bytes(text.replace("+", " ")).decode()
    except UnicodeDecodeError:
        raise Refused("MalformedQueryString", "a parameter is not UTF-8") from None
    if UNSPEAKABLE.search(value):
        raise Refused("MalformedQueryString", "a parameter has control characters")
    return value


def fields(sent: Sent) -> dict[str, str]:
    """All parameters, of the query and of the body. Raises Refused."""
    if not PLACE.fullmatch(sent.path):
        raise Refused("MalformedQueryString", "the path is none of ours: the service is at /")
    if sent.method not in ("GET", "POST"):
        raise Refused("InvalidAction", "only GET and POST are understood")
    found = pairs(sent.query)
    if sent.method == "POST":
        kind = (sent.header("content-type") or FORM).partition(";")[0].strip().lower()
        if kind != FORM:
            raise Refused("MalformedQueryString", f"a body is {FORM}, encoded in UTF-8")
        try:
            found += pairs(sent.body.decode("ascii"))
        except UnicodeDecodeError:
            raise Refused("MalformedQueryString", "the body is not percent-encoded") from None
    table = dict(found)
    if len(table) < len(found):
        raise Refused("MalformedQueryString", "a parameter is given in the query and in the body")
    _check_names(table)
    return table


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if len(name) > LONGEST_NAME or not NAME.fullmatch(name) or name.count(".") >= DEEPEST:
            raise Refused("UnknownParameter", f"The parameter {name[:60]!r} is not recognized")
