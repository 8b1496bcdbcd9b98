"""Names in what a guest sends: hostile bytes first."""

import asyncio
import ssl
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from belljar.host.guard.names import OPT, Name, name, query
from belljar.host.guard.proxy import RECORD, hello_of


def hello(host: str | None = "data.example.org") -> bytes:
    """What a real client begins with."""
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=host).do_handshake()
    return sent.read()


def made(extensions: bytes, *, kind: int = 1, cut: int = 0) -> bytes:
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + struct.pack(">H", len(extensions)) + extensions
    message = bytes([kind]) + len(body).to_bytes(3, "big") + body
    parts = [message[:cut], message[cut:]] if cut else [message]
    return b"".join(b"\x16\3\1" + struct.pack(">H", len(part)) + part for part in parts)


def named(*hosts: bytes, kind: int = 0) -> bytes:
    entries = b"".join(bytes([kind]) + struct.pack(">H", len(host)) + host for host in hosts)
    return struct.pack(">HHH", 0, len(entries) + 2, len(entries)) + entries


def server_name(data: bytes) -> str | None:
    """The host that a connection's beginning names; None: it ends too soon for that."""

    async def read() -> str:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        sent, host = await hello_of(reader, await reader.readexactly(RECORD))
        assert data.startswith(sent) and data[len(sent) :] == await reader.read()
        return host

    with suppress(EOFError):
        return asyncio.run(read())
    return None


def test_the_beginning_of_a_hello_wants_more_at_every_byte() -> None:
    whole = hello()
    assert [server_name(whole[:end]) for end in range(len(whole))] == [None] * len(whole)
    assert server_name(whole) == server_name(whole + b"\x17\3\3") == "data.example.org"


@pytest.mark.parametrize(
    "data",
    [
        hello(None), hello("192.0.2.1"), b"GET / HTTP/1.1\r\n", b"\x16\2\0\0\5", b"\x16\3\1\0\0",
        made(b""), made(named()), made(named(b"")), made(named(b"a.example", b"b.example")), made(named(b"a.example") * 2),
        made(named(b"192.0.2.1")), made(named(b"a.example:443")), made(named(b"*.example")), made(named(b"a.example\0")),
        made(named(b"\xff.example")), made(named(b"a.example", kind=1)), made(named(b"a.example")[:-1]),
        made(named(b"a" * 64 + b".example")), made(named(b"a.example"), kind=2), made(named(b"a.example") + b"\0"),
    ],
)  # fmt: skip
def test_what_names_no_host_in_the_clear_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        server_name(data)


def test_a_hello_may_come_in_several_records_and_hide_another_one() -> None:
    assert server_name(made(named(b"Data.Example.org"), cut=50)) == "data.example.org"
    encrypted = struct.pack(">HH", 0xFE0D, 4) + b"\0\1\2\3"
    assert server_name(made(encrypted + named(b"outer.example"))) == "outer.example"
    with pytest.raises(ValueError):
        server_name(made(encrypted))


@given(st.binary(max_size=600), st.integers(0, 400), st.integers(0, 255))
def test_no_bytes_break_the_parsers(data: bytes, place: int, value: int) -> None:
    changed = bytearray(hello())
    changed[place % len(changed)] = value
    for parse, text in (
        (server_name, data),
        (server_name, bytes(changed)),
        (query, data),
        (server_name, b"\x16\3\1" + data),
    ):
        with suppress(ValueError):
            parse(text)


# -- DNS -----------------------------------------------------------------------------------------------------------------


def asked(
    host: str,
    kind: int = 1,
    *,
    flags: int = 0x0120,
    counts: tuple[int, ...] = (1, 0, 0, 0),
    tail: bytes = b"",
    of: int = 1,
) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in host.split(".")) + b"\0"
    return struct.pack(">6H", 7, flags, *counts) + labels + struct.pack(">HH", kind, of) + tail


@pytest.mark.parametrize("kind", [1, 28])
def test_a_question_for_an_address_is_asked_and_nothing_beside_it(kind: int) -> None:
    found = query(asked("Data.Example.ORG", kind, tail=b"what a guest hides"))
    assert found.host == "data.example.org"
    assert found.wire == asked("Data.Example.ORG", kind, flags=0x0100)
    option = b"\0\0\x29\x10\0\0\0\x80\0\0\4hide"
    with_option = query(asked("data.example.org", kind, counts=(1, 0, 0, 1), tail=option))
    assert b"hide" not in with_option.wire and len(with_option.wire) == len(found.wire) + 11


@pytest.mark.parametrize(
    "data",
    [
        b"", bytes(11), bytes(12), asked("a.example", flags=0x8000), asked("a.example", flags=0x2800), asked("a.example", flags=0x0200),
        asked("a.example", counts=(2, 0, 0, 0)), asked("a.example", counts=(1, 1, 0, 0)), asked("a.example", counts=(1, 0, 0, 2)),
        asked("192.0.2.1"), asked("a b.example"), asked("*.example"), asked(".".join(["a" * 60] * 5)), asked("a" * 63 + "." + "b.c" * 70),
        asked("a.example")[:-1], struct.pack(">6H", 7, 0, 1, 0, 0, 0) + b"\xc0\x0c\0\1\0\1", struct.pack(">6H", 7, 0, 1, 0, 0, 0) + b"\0\0\1\0\1",
        asked("a/b.example"),
    ],
)  # fmt: skip
def test_what_is_no_plain_query_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        query(data)


@pytest.mark.parametrize(("kind", "of"), [(16, 1), (65, 1), (255, 1), (1, 3)])
def test_a_query_of_another_type_is_answered_with_nothing(kind: int, of: int) -> None:
    found = query(asked("a.example", kind, of=of, tail=b"hidden"))
    assert not found.is_for_address
    assert found.answer(3) == asked("a.example", kind, of=of, flags=0x8183)
    with_option = query(asked("a.example", kind, of=of, counts=(1, 0, 0, 1), tail=b"option"))
    assert with_option.answer(3) == asked("a.example", kind, of=of, flags=0x8183, counts=(1, 0, 0, 1), tail=OPT)


# -- rules ---------------------------------------------------------------------------------------------------------------


def test_a_name_is_itself_and_a_wildcard_is_what_is_below() -> None:
    assert name("Data.Example.org") == Name("data.example.org") and name("data.example.org:8443") == Name(
        "data.example.org", 8443
    )
    exact, below = Name("example.org"), Name("*.example.org", 8443)
    assert exact.fits("example.org", 443) and exact.fits("example.org", 80) and not exact.fits("example.org", 22)
    assert not exact.fits("a.example.org", 443) and not exact.fits("example.org.evil.net", 443)
    assert below.fits("a.b.example.org", 8443) and below.fits("a.example.org") and not below.fits("a.example.org", 443)
    assert not below.fits("example.org", 8443) and not below.fits("badexample.org", 8443)


@pytest.mark.parametrize(
    "text", ["192.0.2.1", "10.0.0.0/8", "10.0.0.1:80/tcp", "fe80::1", "[::1]", "a..b", "a.*.org", "*", "*.", "-a.org", "a.org/8", "a.org.1", "é.org", "a\n.org", "a" * 254, ""]
)  # fmt: skip
def test_what_is_not_a_name(text: str) -> None:
    assert name(text) is None


@pytest.mark.parametrize("port", ["0", "65536", "99999"])
def test_a_port_that_cannot_be_makes_it_none(port: str) -> None:
    assert name(f"a.example:{port}") is None
