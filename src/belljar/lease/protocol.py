"""The pilots' channel, without a socket: bytes in, messages out. Pure.

    frame      u32 length (big-endian), HMAC-SHA256, JSON object
    opening    the first frame of each side, under the lease's key: who it is, a nonce, the last message it has seen
    after it   under a key of this connection, this direction and this frame's number

A frame that was changed, left out, moved, or sent before ends the connection; what it carried comes again by the next one. Messages
are numbered from 1 in each direction and kept until the other side has seen them, so each arrives once and in order, whatever
happens to connections. A message without a number tells of a moment, and nobody misses it afterwards."""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from belljar.model import to_json
from belljar.reading import from_json
from belljar.records import dataclass, field

VERSION = 1
LARGEST = 4 << 20  # bytes of a frame
LARGEST_OPENING = 4096
HEAD, MAC = 4, 32
LONGEST = 128  # characters of one value of an opening
LEAST = {"slot": 0, "attempt": 0, "seen": 0}
PILOT, SERVICE = "pilot", "service"
NONCE = re.compile(r"[0-9a-f]{32}")
Message = dict[str, Any]


class Broken(ValueError):
    """What came is not what the other side sends. The connection is of no more use."""


def lease_key(site_key: bytes, lease: str) -> bytes:
    """The key of one lease. Nothing is stored: who knows the site's key knows them all."""
    return _mac(site_key, b"belljar lease", lease.encode())


@dataclass(frozen=True)
class Opening:
    """What a side says first. `instance` is drawn by a pilot when it starts; `stream` names what this connection carries instead of
    messages."""

    lease: str
    slot: int
    attempt: int = 1
    instance: str = ""
    nonce: str = ""
    seen: int = 0  # number of the last message of the other side that it has
    stream: str = ""

    @classmethod
    def read(cls, value: Message) -> Opening:
        """Raises Broken."""
        if value.pop("v", None) != VERSION:
            raise Broken(f"another version of the channel than {VERSION}, which is spoken here")
        try:
            found: Opening = from_json(cls, value, least=LEAST)
        except ValueError as exc:
            raise Broken(f"an opening: {exc}") from exc
        if not NONCE.fullmatch(found.nonce) or max(len(str(one)) for one in value.values()) > LONGEST:
            raise Broken("an opening without a nonce, or with a text that is too long")
        return found


def nonce() -> str:
    return os.urandom(16).hex()


class Connection:
    """One side of one connection. *key_of* gives the lease's key for what the other side says first; None refuses it."""

    def __init__(self, role: str, key_of: Callable[[Opening], bytes | None]) -> None:
        self._role, self._other = role, SERVICE if role == PILOT else PILOT
        self._key_of = key_of
        self._buffer = bytearray()
        self._keys, self._counts = dict[str, bytes](), {PILOT: 0, SERVICE: 0}  # of messages, by who sends them
        self._first = b""  # the pilot's opening
        self._own: Opening | None = None
        self.peer: Opening | None = None
        self.is_raw = False  # the other side has said that bytes follow, not frames

    @property
    def is_proved(self) -> bool:
        """The other side has shown that it speaks now: its opening alone may be an old one."""
        return self._counts[self._other] > 0

    def open(self, own: Opening) -> bytes:
        """This side's opening. The service's comes after the pilot's."""
        key = self._key_of(self.peer or own)
        if key is None or self._own is not None:
            raise Broken("no such lease")
        self._own, body = own, _dump({"v": VERSION, **to_json(own)})
        frame = _frame(self._proof(key, self._role, body), body)
        self._agree(key)
        return frame

    def send(self, message: Message) -> bytes:
        if not self._keys:
            raise Broken("nothing can be said before the openings")
        body = _dump(message)
        if len(body) > LARGEST - MAC:
            raise Broken(f"a message of {len(body)} bytes")
        frame = _frame(self._mac_of(self._role, body), body)
        self._counts[self._role] += 1
        return frame

    def receive(self, data: bytes) -> list[Message]:
        """The messages that are whole with this. The first one of all is the other side's opening: see `peer`. Raises Broken, and
        then at each call."""
        self._buffer += data
        found = list[Message]()
        try:
            while not self.is_raw and (frame := self._next()) is not None:
                found += self._read(frame[:MAC], frame[MAC:])
        except Broken:
            self._buffer[:] = b"\xff" * HEAD
            raise
        return found

    def rest(self) -> bytes:
        """What has come behind the last frame that was read, for a connection that is raw from now on."""
        data, self._buffer = bytes(self._buffer), bytearray()
        return data

    # -- inside --------------------------------------------------------------------------------------------------------

    def _next(self) -> bytes | None:
        """A frame, once it is whole."""
        if len(self._buffer) < HEAD:
            return None
        length = int.from_bytes(self._buffer[:HEAD], "big")
        if not MAC < length <= (LARGEST if self.peer is not None else LARGEST_OPENING):
            raise Broken(f"a frame of {length} bytes")
        if len(self._buffer) < HEAD + length:
            return None
        frame = bytes(self._buffer[HEAD : HEAD + length])
        del self._buffer[: HEAD + length]
        return frame

    def _read(self, mac: bytes, body: bytes) -> list[Message]:
        if self.peer is None:
            opening = Opening.read(_load(body))
            key = self._key_of(opening)
            if key is None or not hmac.compare_digest(self._proof(key, self._other, body), mac):
                raise Broken("an opening under another key")
            self.peer = opening
            self._agree(key)
            return []
        if not self._keys:
            raise Broken("a message before this side's opening")
        if not hmac.compare_digest(self._mac_of(self._other, body), mac):
            raise Broken("a frame that the other side did not send now")
        self._counts[self._other] += 1
        message = _load(body)
        self.is_raw = "stream" in message
        return [message]

    def _proof(self, key: bytes, who: str, body: bytes) -> bytes:
        """For an opening. The service's is an answer to the pilot's."""
        before, self._first = (b"", body) if who == PILOT else (self._first, self._first)
        return _mac(key, who.encode(), before, body)

    def _agree(self, key: bytes) -> None:
        """On the keys of both directions, once both nonces are known."""
        if self._own is not None and self.peer is not None:
            said = {self._role: self._own, self._other: self.peer}
            both = bytes.fromhex(said[PILOT].nonce + said[SERVICE].nonce)
            self._keys = {who: _mac(key, b"sends " + who.encode(), both) for who in said}

    def _mac_of(self, who: str, body: bytes) -> bytes:
        """For their next frame."""
        return _mac(self._keys[who], (self._counts[who] + 1).to_bytes(8, "big"), body)


@dataclass
class Outbox:
    """What this side has said, until the other side has seen it. `keep_all`: afterwards too, for another side that forgets."""

    messages: list[Message] = field(default_factory=list)
    last: int = 0
    seen: int = 0  # the other side has all up to this one
    keep_all: bool = False

    def put(self, message: Message) -> None:
        """With the next number."""
        self.last += 1
        self.messages.append({**message, "seq": self.last})

    def acknowledged(self, number: int) -> None:
        """Raises Broken for what was never said."""
        if number > self.last:
            raise Broken(f"message {number} is acknowledged, and {self.last} was the last")
        self.seen = max(self.seen, number)
        if not self.keep_all:
            self.messages = [one for one in self.messages if one["seq"] > self.seen]

    def after(self, number: int) -> list[Message]:
        """What the other side has not seen, when it says that this was the last. Raises Broken where that is gone."""
        found = [one for one in self.messages if one["seq"] > number]
        if number > self.last or len(found) != self.last - number:
            raise Broken(f"message {number} was seen: {self.last} was the last, and {len(found)} are kept")
        return found


@dataclass
class Inbox:
    """What this side has seen."""

    last: int = 0

    def is_new(self, message: Message) -> bool:
        """One that was seen before is not; one without a number always is. Raises Broken where one is missing before it."""
        number = number_of(message, "seq")
        if number > self.last + 1:
            raise Broken(f"message {number} came after message {self.last}")
        return number == 0 or number > self.last

    def take(self, message: Message) -> bool:
        """Is it new? It is seen from now on. Raises Broken."""
        is_new = self.is_new(message)
        self.last = max(self.last, number_of(message, "seq"))
        return is_new


def number_of(message: Message, name: str) -> int:
    """A count in a message; 0 where there is none. Raises Broken."""
    found = message.get(name, 0)
    if type(found) is not int or not 0 <= found < 1 << 53:
        raise Broken(f"a message's {name} is {str(found)[:40]!r}")
    return found


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Each part has its length before it: no two lists of parts are the same bytes."""
    return hmac.new(key, b"".join(len(one).to_bytes(4, "big") + one for one in parts), sha256).digest()


def _frame(mac: bytes, body: bytes) -> bytes:
    return (MAC + len(body)).to_bytes(HEAD, "big") + mac + body


def _dump(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode()


def _load(body: bytes) -> Message:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise Broken("a frame that is no JSON") from exc
    if not isinstance(value, dict):
        raise Broken("a frame that is not an object")
    return value
