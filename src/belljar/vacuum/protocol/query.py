"""VacQuery, the words that factories send each other: one JSON object a datagram. Values in, values out; no clock, no socket.

Written is VacQuery 01.03 with all field names that a peer may look for. Read are the names of 0.1 to 01.03, of the draft of 2.0, and
of Vcycle; what is missing or null has its default. Documents: HSF-TN-2016-04 (Vacuum Platform), and what Vac 03.00 sends."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from belljar import __version__
from belljar.reading import strict_json
from belljar.records import dataclass
from belljar.vacuum import FactoryStatus, MachineStatus, TypeStatus
from belljar.vacuum.protocol.fields import Refused, Status, Why, name, number, parts_of

VERSION: Final = "VacQuery 01.03"
LONGEST_QUERY: Final = 1024  # bytes; all that the original reads of one
LONGEST_DATAGRAM: Final = 65535  # what is read of a peer's: a machine of its own may have left a long message
STALE: Final = 300.0  # a signed query is of no use later than this
UNSOLICITED: Final = "0"  # the cookie of what nobody asked for

Message = dict[str, Any]


class Kind(Enum):
    """What is asked for: words of queries and replies, `message_type` and, before 0.3, `method`; and what is told."""

    MACHINES = ("machines_query", "machines", "machine_status", "machine", MachineStatus)
    MACHINETYPES = ("machinetypes_query", "machinetypes", "machinetype_status", "machinetype", TypeStatus)
    FACTORIES = ("factory_query", "factories", "factory_status", "factory", FactoryStatus)

    def __init__(self, question: str, verb: str, answer: str, method: str, status: type[Any]) -> None:
        self.question, self.verb, self.answer, self.method, self.status = question, verb, answer, method, status
        self.parts = parts_of(status)


QUERIES: Final = {word: kind for kind in Kind for word in (kind.question, kind.verb)}
REPLIES: Final = {word: kind for kind in Kind for word in (kind.answer, kind.method)}


class Query(NamedTuple):
    """What somebody wants to know. The cookie is any JSON value; answers carry it back."""

    kind: Kind
    cookie: Any


@dataclass(frozen=True)
class Snapshot:
    """What a factory tells of itself, as it stood a moment ago."""

    space: str
    factory: str
    site: str = ""
    machines: tuple[MachineStatus, ...] = ()  # one for each slot, empty ones too
    types: tuple[TypeStatus, ...] = ()
    own: FactoryStatus | None = None


def read_query(data: bytes, space: str, now: float, key: bytes = b"", *, signed_only: bool = False) -> Query:
    """What a datagram asks of this space. Raises Refused."""
    if len(data) > LONGEST_QUERY:
        raise Refused(Why.TOO_LONG)
    message = _object(data)
    is_signed = _check(message, space, key, signed_only)
    kind = _kind(message, QUERIES)
    if is_signed and abs(now - number(message.get("time_sent"))) > STALE:
        raise Refused(Why.STALE)
    return Query(kind, message["cookie"])


def read_reply(
    data: bytes, kind: Kind, space: str, now: float, key: bytes = b"", *, signed_only: bool = False
) -> tuple[Any, Status]:
    """The cookie of an answer and what it tells. Nothing in it ended later than *now*. Raises Refused."""
    message = _object(data)
    _check(message, space, key, signed_only)
    if _kind(message, REPLIES) is not kind:
        raise Refused(Why.UNKNOWN)
    values: Message = {"factory": name(message.get("factory"))}
    for part in kind.parts:
        value = next((message[word] for word in (*part.names, *part.older) if message.get(word) is not None), None)
        if value is not None:
            values[part.attribute] = part.read(value)
        elif part.is_needed:
            raise Refused(Why.BAD_FIELD)
    return message["cookie"], kind.status(**_completed(kind, values, now))


def _completed(kind: Kind, values: Message, now: float) -> Message:
    """With what goes without saying, and without moments that are yet to come: as long as they lie ahead, their type would be
    backing off."""
    if kind is Kind.MACHINES:
        values.setdefault("processors", 1 if values.get("machinetype") else 0)  # not told before 01.00
        values.setdefault("hs06", float(values["processors"]))  # unmeasured
    elif kind is Kind.MACHINETYPES:
        if "running_processors" not in values and "running_hs06" not in values:
            raise Refused(Why.BAD_FIELD)
        values.setdefault("running_hs06", float(values.get("running_processors", 0.0)))
    ahead = {key: int(now) for key in ("message_time", "last_abort") if values.get(key, 0) > now}
    return values | ahead


def _object(data: bytes) -> Message:
    try:
        message = strict_json(data)
    except ValueError:
        raise Refused(Why.NOT_JSON) from None
    if not isinstance(message, dict):
        raise Refused(Why.NOT_JSON)
    return message


def _kind(message: Message, words: Mapping[str, Kind]) -> Kind:
    word = message.get("message_type") or message.get("method")
    if not isinstance(word, str) or word not in words:
        raise Refused(Why.UNKNOWN)
    return words[word]


def _check(message: Message, space: str, key: bytes, signed_only: bool) -> bool:
    """Is it signed? Raises Refused where it must not be taken: not of this space, without a cookie, or not signed as it must be."""
    if message.get("space") != space:
        raise Refused(Why.OTHER_SPACE)
    if "cookie" not in message:
        raise Refused(Why.NO_COOKIE)
    given = message.get("hmac") if key else None
    if given is None:
        if signed_only:
            raise Refused(Why.UNSIGNED)
        return False
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(errors="replace"), signature(message, key)):
        raise Refused(Why.FORGED)
    return True


def cookie(salt: str, factory: str) -> str:
    """What one factory is asked with. Only a factory that has seen the question can send it back."""
    return hashlib.sha256((salt + factory).encode()).hexdigest()


def query(kind: Kind, space: str, cookie: str, now: float, *, client: str, key: bytes = b"") -> bytes:
    """A datagram that asks. *client*: who does, as in `factory` or `command`."""
    message = {
        "message_type": kind.question, "method": kind.verb, "vacquery_version": VERSION,
        "vac_version": f"belljar {__version__} {client}", "space": space, "cookie": cookie, "time_sent": int(now),
    }  # fmt: skip
    return _datagram(message, key)


def reply(
    status: Status, snapshot: Snapshot, cookie: Any, now: float, key: bytes = b"", *, daemon: str = "responder"
) -> bytes:
    """One datagram that tells a status. *daemon*: who sends it."""
    return answer(body(status, snapshot, now, daemon), cookie, now, key)


def answer(body: Message, cookie: Any, now: float, key: bytes = b"") -> bytes:
    """One datagram of a body that may be sent to many."""
    return _datagram({**body, "cookie": cookie, "time_sent": int(now)}, key)


def bodies(kind: Kind, snapshot: Snapshot, now: float) -> list[Message]:
    """What answers a query, but for the cookie and the moment."""
    every: list[Status] = [*snapshot.machines, *snapshot.types, *([snapshot.own] if snapshot.own else [])]
    return [body(status, snapshot, now) for status in every if isinstance(status, kind.status)]


def body(status: Status, snapshot: Snapshot, now: float, daemon: str = "responder") -> Message:
    kind = next(kind for kind in Kind if isinstance(status, kind.status))
    version = f"belljar {__version__} {daemon}"
    message: Message = {
        "message_type": kind.answer, "daemon_version": version, "vac_version": version, "vacquery_version": VERSION,
        "space": snapshot.space, "site": snapshot.site or site_of(snapshot.space), "factory": snapshot.factory,
    }  # fmt: skip
    for part in kind.parts:
        value = part.write(getattr(status, part.attribute))
        if value is not None or not part.if_known:
            message |= dict.fromkeys(part.names, value)
    if kind is Kind.MACHINES:
        message["num_machines"] = len(snapshot.machines)
        if message["state"] in ("Starting", "Running"):  # the original counts from these moments
            message["created_time"] = message["created_time"] or int(now)
        if message["state"] == "Running":
            message["started_time"] = message["started_time"] or message["created_time"]
    elif kind is Kind.MACHINETYPES:
        message["num_machinetypes"] = len(snapshot.types)
    return message


def site_of(space: str) -> str:
    """What a site is called that has no name: as the space, without its first label."""
    return space.partition(".")[2] or space


def signature(message: Message, key: bytes) -> bytes:
    """HMAC-SHA256, hexadecimal, over the message's other fields as JSON: ASCII, keys sorted, no white space."""
    rest = {key: value for key, value in message.items() if key != "hmac"}
    return hmac.new(key, _json(rest, sort_keys=True), hashlib.sha256).hexdigest().encode()


def _datagram(message: Message, key: bytes) -> bytes:
    return _json({**message, "hmac": signature(message, key).decode()} if key else message)


def _json(message: Message, *, sort_keys: bool = False) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=sort_keys).encode("ascii")
