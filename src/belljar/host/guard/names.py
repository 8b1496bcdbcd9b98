"""Names of hosts in what a guest sends: in its DNS queries, and in the first message of TLS. Bytes in, values out.

All of it comes from the guest: what is not exactly as it should be raises ValueError, and goes nowhere.
RFC 1035 (4.1), RFC 6066 (3), RFC 8446 (4.1.2, 5.1).
"""

from __future__ import annotations

import re
import struct

from belljar.records import dataclass

HOST = r"(?=.{1,253}(?::|$))(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?"
PLAIN, RULE = re.compile(HOST), re.compile(rf"((?:\*\.)?{HOST})(?::(\d{{1,5}}))?", re.ASCII)
WEB = (80, 443)
KINDS = (b"\0\1\0\1", b"\0\x1c\0\1")  # A and AAAA, of the Internet
CLIENT_HELLO, SERVER_NAME, HOST_NAME = b"\1", b"\0\0", 0
STANDARD_QUERY, RECURSION, RESPONSE = 0x0000, 0x0100, 0x8180
NO_DATA, NO_SUCH_NAME = 0, 3
MATTERS = 0xFA00  # of the flags: response, opcode, truncated
OPT = struct.pack(">BHHIH", 0, 41, 1232, 0, 0)  # larger answers are welcome; nothing of the guest's own options


@dataclass(frozen=True)
class Name:
    """A host, or with `*.` before it all hosts below it; and one port, or those of the web."""

    host: str
    port: int | None = None

    @property
    def ports(self) -> tuple[int, ...]:
        return WEB if self.port is None else (self.port,)

    def fits(self, host: str, port: int | None = None) -> bool:
        """*port* None: is the host reached at all?"""
        is_host = host.endswith(self.host[1:]) if self.host.startswith("*") else host == self.host
        return is_host and (port is None or port in self.ports)


def name(text: str) -> Name | None:
    """NAME[:PORT] or *.NAME[:PORT]; None for what is neither."""
    match = RULE.fullmatch(text.strip().lower())
    if match is None or not 1 <= int(match[2] or 1) <= 65535:
        return None
    return Name(match[1], int(match[2]) if match[2] else None)


@dataclass(frozen=True)
class Query:
    """A question about a host."""

    host: str
    is_for_address: bool  # A or AAAA
    wire: bytes  # the datagram that asks this and nothing else

    def answer(self, code: int) -> bytes:
        """The datagram that answers it with nothing."""
        return self.wire[:2] + struct.pack(">H", RESPONSE | code) + self.wire[4:]


def query(data: bytes) -> Query:
    """Read a datagram to a name server. Raises ValueError for all but one plain question."""
    if len(data) < 12:
        raise ValueError("too short")
    _, flags, questions, answers, authorities, additional = struct.unpack_from(">6H", data)
    if flags & MATTERS != STANDARD_QUERY or (questions, answers, authorities) != (1, 0, 0) or additional > 1:
        raise ValueError("not a plain query")
    labels, rest = [], data[12:]
    while rest[:1] != b"\0":
        label, rest = _cut(rest, 1)
        labels.append(label.decode("ascii").lower())
    if PLAIN.fullmatch(host := ".".join(labels)) is None or max(map(len, labels)) > 63:
        raise ValueError("not the name of a host")
    if len(rest) < 5:
        raise ValueError("it ends too soon")
    question = data[12 : len(data) - len(rest) + 5]
    wire = data[:2] + struct.pack(">5H", RECURSION, 1, 0, 0, additional) + question + OPT * additional
    return Query(host, question[-4:] in KINDS, wire)


def server_name(message: bytes) -> str:
    """The host that a TLS client wants, as its first message says in the clear (of an encrypted hello: the outer one). Raises
    ValueError where it is another message, or names no host."""
    if message[:1] != CLIENT_HELLO:
        raise ValueError("not the beginning of TLS")
    hello, _ = _cut(message[1:], 3)
    rest, bodies = hello[2 + 32 :], []  # without version and random
    for size in (1, 2, 1):  # session, ciphers, compression
        _, rest = _cut(rest, size)
    extensions, _ = _cut(rest, 2)
    while extensions:
        kind, (body, extensions) = extensions[:2], _cut(extensions[2:], 2)
        if kind == SERVER_NAME:
            bodies.append(body)
    host = b"".join(bodies)[5:]
    text = host.decode("ascii").lower()
    if bodies != [struct.pack(">HBH", 3 + len(host), HOST_NAME, len(host)) + host] or PLAIN.fullmatch(text) is None:
        raise ValueError("it names no host")
    return text


def _cut(data: bytes, size: int) -> tuple[bytes, bytes]:
    """What follows a length of so many bytes, and the rest."""
    end = size + int.from_bytes(data[:size], "big")
    if len(data) < end:
        raise ValueError("it ends too soon")
    return data[size:end], data[end:]
