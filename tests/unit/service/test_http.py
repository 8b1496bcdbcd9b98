"""The small HTTP server, and clients that do not speak as they should."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import BadSetting, HostError
from belljar.host.http import Answer, Limits
from belljar.records import replace
from belljar.service import streams
from belljar.service.credentials.certificates import own_certificate
from belljar.service.http.server import Sent, counted, place, serving, tls_by

LIMITS = Limits(head=1000, body=100, connections=3, requests=4, linger=0.05)


class House:
    """Tells back what it was sent."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    async def respond(self, sent: Sent) -> Answer:
        self.sent.append(sent)
        return Answer(203, sent.body or b"none", (("x-of", "house"),), "Told Back")

    @asynccontextmanager
    async def up(self, limits: Limits = LIMITS, **more: Any) -> AsyncIterator[int]:
        async with serving("127.0.0.1:0", self.respond, refuse, setting="a.b", limits=limits, **more) as (_, port):
            yield port


def refuse(status: int, why: str) -> Answer:
    return Answer(status, f"NO {why}".encode())


async def said(port: int, data: bytes, **more: Any) -> bytes:
    """All that is answered, until the server ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **more)
    found = b""
    with suppress(ConnectionResetError):
        writer.write(data)
        async with asyncio.timeout(20):
            while part := await reader.read(65536):
                found += part
    writer.transport.abort()
    return found


def post(body: bytes, *more: bytes) -> bytes:
    head = (b"POST /a?b=c HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *more)
    return b"\r\n".join((*head, b"", body))


LAST = b"Connection: close"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400), (b"GET / HTTP/1.1\r\n\r\n", 400), (b"GET /%s HTTP/1.1\r\nHost: h\r\n\r\n" % (b"a" * 100000), 431),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nHost: h\r\nA: %s" % (b"a" * 5000), 431),
        (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n", 400), (b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999\r\n\r\n", 413),
        (post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"), 400),
        (post(b"x" * 101), 413), (b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n41\r\n%s\r\n41\r\n%s" % (b"x" * 65, b"x" * 65), 413),
    ],
)  # fmt: skip
async def test_what_is_no_request_or_too_large_is_refused_and_never_looked_at(data: bytes, status: int) -> None:
    house = House()
    async with house.up() as port:
        head, _, body = (await said(port, data)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in head.lower()
    assert body.startswith(b"NO ") and house.sent == []


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n", post(b"x" * 100)[:-1]], ids=["nothing", "head", "body"])
async def test_who_is_silent_is_hung_up_on(data: bytes) -> None:
    house = House()
    async with house.up(replace(LIMITS, idle=0.02, request=0.02)) as port:
        assert await said(port, data) == b""
    assert house.sent == []


async def test_a_head_has_a_total_time_however_long_a_silent_connection_may_stay() -> None:
    house, end = House(), asyncio.get_running_loop().time() + 20
    async with house.up(replace(LIMITS, idle=60, request=0.1)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nA: ")
        answer = asyncio.ensure_future(reader.read())
        while not answer.done() and asyncio.get_running_loop().time() < end:
            with suppress(ConnectionError):
                writer.write(b"a")
            await asyncio.wait([answer], timeout=0.02)
        assert answer.done() and (answer.exception() or answer.result() == b"")
        writer.transport.abort()
    assert house.sent == []


async def test_who_does_not_read_is_hung_up_on() -> None:
    house = House()
    answers = iter([Answer(200, b"x" * (64 << 20))])

    async def much(sent: Sent) -> Answer:
        return next(answers, Answer(200))

    house.respond = much  # type: ignore[method-assign]
    async with house.up(replace(LIMITS, send=0.02, connections=1)) as port:
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.sendall(post(b""))
            async with asyncio.timeout(20):
                while not await said(port, post(b"", LAST)):  # there is room for one
                    pass


@pytest.mark.parametrize(
    ("limits", "other"), [(replace(LIMITS, of_one=9), b""), (replace(LIMITS, connections=9, of_one=3), b"x")]
)
async def test_a_connection_too_many_is_closed_and_nobody_alone_has_them_all(limits: Limits, other: bytes) -> None:
    async with House().up(limits) as port:
        others = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await said(port, post(b"x", LAST)) == b""
        assert (await said(port, post(b"x", LAST), local_addr=("127.0.0.2", 0)))[-1:] == other
        for _, writer in others:
            writer.close()
            await writer.wait_closed()


async def test_of_ipv6_a_whole_network_is_one_client() -> None:
    house = House()
    async with serving("[::1]:0", house.respond, refuse, setting="a.b", limits=LIMITS) as (address, port):
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(post(b"x", LAST))
        assert await reader.read()
        writer.close()
    assert house.sent[0].peer == "::/64" == counted("::7") != counted("0:0:0:1::7")
    assert counted("fe80::1:2%eth0") == "fe80::/64" and counted("192.0.2.1") == "192.0.2.1"


async def test_who_does_not_shake_hands_is_counted_too(tmp_path: Path) -> None:
    """TLS comes before the first request: descriptors are used up all the same."""
    own_certificate(tmp_path / "own.pem", ("127.0.0.1",))
    limits = replace(LIMITS, connections=9, of_one=3, request=0.2)
    async with House().up(limits, tls=tls_by(tmp_path / "own.pem", "a.b")) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert await said(port, b"") == b"" and not any(reader.at_eof() for reader, _ in silent)
        trusting = ssl.create_default_context(cafile=tmp_path / "own.pem")
        assert b"203" in await said(port, post(b"x", LAST), ssl=trusting, local_addr=("127.0.0.2", 0))
        async with asyncio.timeout(20):
            for reader, _ in silent:  # nor are they waited for
                assert await reader.read() == b""
        assert b"203" in await said(port, post(b"x", LAST), ssl=trusting)
        for _, writer in silent:
            writer.close()


async def test_a_host_without_descriptors_is_open_again_when_it_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FULL", 0.01)
    loop, fails = asyncio.get_running_loop(), [errno.EMFILE, errno.ECONNABORTED, errno.ENETDOWN]
    accept = loop.sock_accept

    async def full(end: socket.socket) -> Any:
        if fails:
            raise OSError(fails.pop(), "no")
        return await accept(end)

    monkeypatch.setattr(loop, "sock_accept", full)
    async with House().up() as port:
        assert (await said(port, post(b"x", LAST)))[-1:] == b"x" and not fails


async def test_a_socket_that_listens_no_more_is_told_of() -> None:
    with socket.socket() as end:
        end.setblocking(False)
        with pytest.raises(OSError, match="Invalid argument"):
            await asyncio.wait_for(anext(streams.accepted(end)), 20)


async def test_a_connection_has_so_many_requests() -> None:
    house = House()
    async with house.up() as port:
        assert (await said(port, post(b"x") * 9)).count(b"HTTP/1.1 203") == LIMITS.requests == len(house.sent)


async def test_a_request_arrives_as_it_was_sent_and_its_answer_too() -> None:
    house = House()
    async with house.up() as port:
        found = await said(port, post(b"one", b"X-Two:  a   b ", b"x-two: c") + post(b"", LAST))
    first, last = house.sent
    assert (first.method, first.path, first.query, first.body, first.peer) == ("POST", "/a", "b=c", b"one", "127.0.0.1")
    assert first.header("x-two") == "a b,c" and first.header("x-three") is None and last.body == b""
    assert found.startswith(b"HTTP/1.1 203 Told Back\r\n") and b"\r\nx-of: house\r\n" in found
    assert b"\r\n\r\noneHTTP/1.1 203" in found and found.endswith(b"\r\n\r\nnone")


async def test_chunks_are_a_body_head_has_none_and_who_waits_is_told_to_go_on() -> None:
    async with House().up() as port:
        chunks = b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n2\r\non\r\n1\r\ne\r\n0\r\n\r\n"
        assert (await said(port, chunks)).endswith(b"\r\n\r\none")
        head = await said(port, b"HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
        assert b"content-length: 4\r\n" in head.lower() and head.endswith(b"\r\n\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"", LAST, b"Expect: 100-continue").replace(b"Length: 0", b"Length: 3"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(b"one")
        assert (await reader.read()).endswith(b"one")
        writer.close()


async def test_by_tls(tmp_path: Path) -> None:
    own_certificate(pem := tmp_path / "own.pem", ("localhost",))
    there = ssl.create_default_context(cafile=pem)
    (tmp_path / "none.pem").write_text("no certificate")
    for wrong in ("none.pem", "missing.pem"):
        with pytest.raises(BadSetting, match=rf"a\.c: .*{wrong}"):
            tls_by(tmp_path / wrong, "a.c")
    async with House().up(tls=tls_by(pem, "a.c")) as port:
        assert (await said(port, post(b"x", LAST), ssl=there, server_hostname="localhost")).endswith(b"\r\n\r\nx")
        assert b"203" not in await said(port, post(b"x", LAST))


async def test_its_end_is_that_of_connections_and_of_the_port() -> None:
    async with House().up() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"x"))
        assert await reader.readexactly(8) == b"HTTP/1.1"
    assert (await reader.read()).endswith(b"x")
    writer.close()
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection("127.0.0.1", port)


async def test_an_address_that_is_none_or_taken() -> None:
    for where in ("8444", "localhost:8444", "127.0.0.1:", "[::1:8444x"):
        with pytest.raises(BadSetting, match=r"a\.b"):
            place(where, "a.b")
    assert place("[::1]:8444", "a.b") == ("::1", 8444)
    async with House().up() as port:
        with pytest.raises(HostError, match=rf"a\.b: 127\.0\.0\.1:{port}"):
            async with serving(f"127.0.0.1:{port}", House().respond, refuse, setting="a.b", limits=LIMITS):
                pass


@pytest.mark.parametrize("where", ["127.0.0.1:99999", "127.0.0.1:-1", "localhost:1", "127.0.0.1", ""])
def test_a_place_to_listen_at_is_an_address_with_a_port(where: str) -> None:
    assert place("[::1]:65535", "lease.ec2_listen") == ("::1", 65535)
    with pytest.raises(BadSetting, match=r"lease.ec2_listen: .* is no ADDRESS:PORT"):
        place(where, "lease.ec2_listen")
