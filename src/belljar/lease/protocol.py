"""What goes over a pilot's connection. Frames are u32 length (big-endian) and a JSON object.

TLS keeps them whole, secret and in order, and the pilot knows the certificate of the other side beforehand. The first frame of each
side is its opening: who it is, the last message it has seen, and a proof that it has the lease's key.

Messages are numbered from 1 in each direction and kept until the other side has seen them, so each arrives once and in order, whatever
happens to connections. A message without a number tells of a moment, and nobody misses it afterwards."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from belljar.model import dumps, to_json
from belljar.reading import from_json
from belljar.records import dataclass, field

VERSION = 2
LARGEST = 4 << 20  # bytes of a frame
LARGEST_OPENING = 4096
HEAD = 4
LEAST = {"slot": 0, "attempt": 0, "seen": 0}
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
    seen: int = 0  # number of the last message of the other side that it has
    stream: str = ""

    def frame(self, key: bytes) -> bytes:
        return frame({"v": VERSION, "proof": self._proof(key), **to_json(self)})

    @classmethod
    async def heard(cls, reader: asyncio.StreamReader, key_of: Callable[[Opening], bytes | None]) -> Opening:
        """The other side's. *key_of*: the lease's key for what it says; None refuses it. Raises EOFError, OSError, Broken."""
        fields = await receive(reader, LARGEST_OPENING)
        version, proof = fields.pop("v", None), str(fields.pop("proof", ""))
        if version != VERSION:
            raise Broken(f"another version of the channel than {VERSION}, which is spoken here")
        try:
            opening: Opening = from_json(cls, fields, least=LEAST)
        except ValueError as exc:
            raise Broken(f"an opening: {exc}") from exc
        key = key_of(opening)
        if key is None or not hmac.compare_digest(opening._proof(key).encode(), proof.encode("utf-8", "replace")):
            raise Broken("an opening under another key")
        return opening

    def _proof(self, key: bytes) -> str:
        return _mac(key, b"opening", dumps(self)).hex()


def frame(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LARGEST:
        raise Broken(f"a message of {len(body)} bytes")
    return len(body).to_bytes(HEAD, "big") + body


async def receive(reader: asyncio.StreamReader, largest: int = LARGEST) -> Message:
    """The next message. Raises EOFError, OSError, Broken."""
    try:
        if (length := int.from_bytes(await reader.readexactly(HEAD), "big")) > largest:
            raise Broken(f"a frame of {length} bytes")
        value = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError as exc:
        raise EOFError("the connection was closed") from exc
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise Broken("a frame that is no JSON") from exc
    if not isinstance(value, dict):
        raise Broken("a frame that is not an object")
    return value


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
            self.messages = [message for message in self.messages if message["seq"] > self.seen]

    def after(self, number: int) -> list[Message]:
        """What the other side has not seen, when it says that this was the last. Raises Broken where that is gone."""
        unseen = [message for message in self.messages if message["seq"] > number]
        if number > self.last or len(unseen) != self.last - number:
            raise Broken(f"message {number} was seen: {self.last} was the last, and {len(unseen)} are kept")
        return unseen


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
    number = message.get(name, 0)
    if type(number) is not int or not 0 <= number < 1 << 53:
        raise Broken(f"a message's {name} is {str(number)[:40]!r}")
    return number


def _mac(key: bytes, *parts: bytes) -> bytes:
    """Each part has its length before it: no two lists of parts are the same bytes."""
    return hmac.new(key, b"".join(len(part).to_bytes(4, "big") + part for part in parts), sha256).digest()
