"""The pilots' channel, without a socket: bytes in, messages out. Pure.

    frame      u32 length (big-endian), HMAC-SHA256, JSON object
    opening    the first frame of each side, under the lease's key: who it is, a nonce, the last message it has seen
    after it   under a key of this connection, this direction and this frame's number

A frame that was changed, left out, moved, or sent before ends the connection; what it carried comes again by the next one. Messages
are numbered from 1 in each direction and kept until the other side has seen them, so each arrives once and in order, whatever
happens to connections. A message without a number tells of a moment, and nobody misses it afterwards.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from belljar.records import dataclass, field

VERSION = 1
LARGEST = 4 << 20  # bytes of a frame
LARGEST_OPENING = 4096
HEAD, MAC = 4, 32
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
        if value.get("v") != VERSION:
            raise Broken(f"version {value.get('v')!r} of the channel, and {VERSION} is spoken here")
        found: Any = {name: text_of(value, name, 128) for name in ("lease", "instance", "nonce", "stream")}
        found |= {name: number_of(value, name) for name in ("slot", "attempt", "seen")}
        if not NONCE.fullmatch(found["nonce"]):
            raise Broken("the opening's nonce is none")
        return cls(**found)

    def dump(self) -> bytes:
        return _dump({"v": VERSION, **{name: getattr(self, name) for name in self.__dataclass_fields__}})


def nonce() -> str:
    return os.urandom(16).hex()


class Connection:
    """One side of one connection. *key_of* gives the lease's key for what the other side says first; None refuses it."""

    def __init__(self, role: str, key_of: Callable[[Opening], bytes | None]) -> None:
        self._role, self._other = role, SERVICE if role == PILOT else PILOT
        self._key_of = key_of
        self._buffer = bytearray()
        self._sent = self._received = 0
        self._sending = self._receiving = b""
        self._own: Opening | None = None
        self._own_bytes = self._peer_bytes = b""
        self.peer: Opening | None = None
        self.is_raw = False  # the other side has said that bytes follow, not frames

    @property
    def is_open(self) -> bool:
        return bool(self._sending)

    @property
    def is_proved(self) -> bool:
        """The other side has shown that it speaks now: its opening alone may be an old one."""
        return self._received > 0

    def open(self, own: Opening) -> bytes:
        """This side's opening. The service's comes after the pilot's."""
        key = self._key_of(self.peer or own)
        if key is None or self._own is not None:
            raise Broken("no such lease")
        self._own, self._own_bytes = own, own.dump()
        before = b"" if self._role == PILOT else self._peer_bytes
        frame = _frame(_mac(key, self._role.encode(), before, self._own_bytes), self._own_bytes)
        self._agree(key)
        return frame

    def send(self, message: Message) -> bytes:
        if not self.is_open:
            raise Broken("nothing can be said before the openings")
        body = _dump(message)
        if len(body) > LARGEST - MAC:
            raise Broken(f"a message of {len(body)} bytes")
        self._sent += 1
        return _frame(_mac(self._sending, self._sent.to_bytes(8, "big"), body), body)

    def receive(self, data: bytes) -> list[Message]:
        """The messages that are whole with this. The first one of all is the other side's opening: see `peer`. Raises Broken, and
        then at each call."""
        self._buffer += data
        found = list[Message]()
        try:
            while not self.is_raw and (parts := self._next()) is not None:
                if (message := self._read(*parts)) is not None:
                    found.append(message)
        except Broken:
            self._buffer[:] = b"\xff" * HEAD
            raise
        return found

    def rest(self) -> bytes:
        """What has come behind the last frame that was read, for a connection that is raw from now on."""
        data = bytes(self._buffer)
        self._buffer.clear()
        return data

    # -- inside --------------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[bytes, bytes] | None:
        if len(self._buffer) < HEAD:
            return None
        length = int.from_bytes(self._buffer[:HEAD], "big")
        if not MAC < length <= (LARGEST if self.peer is not None else LARGEST_OPENING):
            raise Broken(f"a frame of {length} bytes")
        if len(self._buffer) < HEAD + length:
            return None
        frame = bytes(self._buffer[HEAD : HEAD + length])
        del self._buffer[: HEAD + length]
        return frame[:MAC], frame[MAC:]

    def _read(self, mac: bytes, body: bytes) -> Message | None:
        if self.peer is None:
            self._read_opening(mac, body)
            return None
        if not self.is_open:
            raise Broken("a message before this side's opening")
        expected = _mac(self._receiving, (self._received + 1).to_bytes(8, "big"), body)
        if not hmac.compare_digest(expected, mac):
            raise Broken("a frame that the other side did not send now")
        self._received += 1
        message = _load(body)
        self.is_raw = "stream" in message
        return message

    def _read_opening(self, mac: bytes, body: bytes) -> None:
        opening = Opening.read(_load(body))
        key = self._key_of(opening)
        before = b"" if self._role == SERVICE else self._own_bytes
        if key is None or not hmac.compare_digest(_mac(key, self._other.encode(), before, body), mac):
            raise Broken("an opening under another key")
        self.peer, self._peer_bytes = opening, body
        self._agree(key)

    def _agree(self, key: bytes) -> None:
        """On the keys of both directions, once both nonces are known."""
        if self._own is None or self.peer is None:
            return
        pilot, service = (self._own, self.peer) if self._role == PILOT else (self.peer, self._own)
        both = bytes.fromhex(pilot.nonce) + bytes.fromhex(service.nonce)
        self._sending = _mac(key, b"sends " + self._role.encode(), both)
        self._receiving = _mac(key, b"sends " + self._other.encode(), both)


@dataclass
class Outbox:
    """What this side has said, until the other side has seen it. `keep_all`: afterwards too, for another side that forgets."""

    messages: list[Message] = field(default_factory=list)
    last: int = 0
    seen: int = 0  # the other side has all up to this one
    keep_all: bool = False

    def put(self, message: Message) -> Message:
        """The message with its number."""
        self.last += 1
        numbered = {**message, "seq": self.last}
        self.messages.append(numbered)
        return numbered

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
            raise Broken(
                f"the other side has seen message {number}: {self.last} was the last, and {len(found)} are kept"
            )
        return found


@dataclass
class Inbox:
    """What this side has seen."""

    last: int = 0

    def take(self, message: Message) -> bool:
        """Is it new? One that was seen before is not; one without a number always is. Raises Broken where one is missing before it."""
        number = number_of(message, "seq")
        if number == 0:
            return True
        if number > self.last + 1:
            raise Broken(f"message {number} came after message {self.last}")
        is_new = number > self.last
        self.last = max(self.last, number)
        return is_new


def number_of(message: Message, name: str) -> int:
    """A count in a message; 0 where there is none. Raises Broken."""
    found = message.get(name, 0)
    if type(found) is not int or not 0 <= found < 1 << 53:
        raise Broken(f"a message's {name} is {str(found)[:40]!r}")
    return found


def text_of(message: Message, name: str, longest: int = 4096) -> str:
    """A text in a message; "" where there is none. Raises Broken."""
    found = message.get(name, "")
    if not isinstance(found, str) or len(found) > longest:
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
        raise Broken("a frame that is no object")
    return value
