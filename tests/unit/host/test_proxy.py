"""The proxy of a user network, with a guest's end of a connection in our hands and servers on loopback, which the rules here allow."""

import asyncio
import base64
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.unit.host.test_names import hello, made, named

from belljar.host.guard.egress import Egress, Only, rule
from belljar.host.guard.names import Name
from belljar.host.guard.proxy import UNKNOWN_NAME, Proxy
from belljar.host.guard.traffic import Call, Refusal
from belljar.host.guard.vault import Vault
from belljar.host.threads import in_thread
from belljar.model import Secret

HOST, OTHER = "api.example.org", "other.example.org"
TOKEN = Secret("TOKEN", "env:TOKEN", (f"{HOST}:8443",))


class Site:
    """Servers on loopback that say what they were sent, a name server of ours, and a proxy."""

    def __init__(self) -> None:
        self.refused: list[Refusal] = []
        self.addresses = {HOST: ["127.0.0.1"], OTHER: ["127.0.0.1"], "inside.example.org": ["10.0.0.1"], "mixed.example.org": ["169.254.169.254", "127.0.0.1"]}  # fmt: skip
        self.heard: list[bytes] = []

    def proxy(
        self, *names: str, port: int, vault: Vault | None = None, allow: tuple[str, ...] = ("127.0.0.1",)
    ) -> Proxy:
        only = Only(names=tuple(Name(host, port) for host in names))
        secret = Only(names=(Name(HOST, port),)) if vault else Only()
        egress = Egress(allow=tuple(map(rule, allow)), only=(only,), secret=secret)
        return Proxy(egress, self.refused.append, vault, self.addresses.__getitem__)

    @asynccontextmanager
    async def server(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.heard.append(await reader.read(1 << 16))
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        async with server:
            yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def guest(proxy: Proxy, port: int = 80) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A guest's connection to some address at this port."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        answering = asyncio.ensure_future(proxy.answer(Call("203.0.113.9", port, ours)))
        reader, writer = await asyncio.open_connection(sock=theirs)
        yield reader, writer
        writer.close()
        with suppress(OSError):  # of a guest that hung up
            await answering


async def said(proxy: Proxy, data: bytes, port: int = 80) -> bytes:
    async with guest(proxy, port) as (reader, writer):
        writer.write(data)
        return await reader.read(-1)


def get(host: str, *headers: str, target: str = "/") -> bytes:
    return "\r\n".join((f"GET {target} HTTP/1.1", f"Host: {host}", *headers, "", "")).encode()


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (get(OTHER + ":{port}"), "not allowed"), (get("127.0.0.1:{port}"), "'127.0.0.1:"), (get("[::1]:{port}"), "'[::1]:"),
        (get(HOST), "not allowed"), (get(HOST + ":{port}", target=f"http://{OTHER}/"), "two hosts"),
        (get("user@" + HOST + ":{port}"), "'user@"), (get("*.example.org:{port}"), "'*.example"), (b"GET / HTTP/1.0\r\n\r\n", "names no host"),
        (b"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: a\r\n\r\n", "'127.0.0.1:"), (b"SSH-2.0-OpenSSH\r\n\r\n", "not HTTP"),
        (b"CONNECT " + OTHER.encode() + b":{port} HTTP/1.1\r\nHost: a\r\n\r\n", "not allowed"),
        (get(HOST + ":{port}", target="https://" + HOST + "/"), "names no host"), (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "not HTTP"),
    ],
)  # fmt: skip
async def test_a_request_for_another_host_is_refused_and_told(site: Site, sent: bytes, why: str) -> None:
    async with site.server() as port:
        answer = await said(site.proxy(HOST, port=port), sent.replace(b"{port}", b"%d" % port))
    assert answer.startswith(b"HTTP/1.1 403 ") and why.encode() in answer
    assert site.heard == [] and why in site.refused[0].reason and len(site.refused) == 1


@pytest.mark.parametrize("sent", [hello(OTHER), hello(None), hello("127.0.0.1"), made(b""), b"\x16\2\0\0\5hello"])
async def test_tls_for_another_host_is_refused_with_an_alert(site: Site, sent: bytes) -> None:
    async with site.server() as port:
        assert await said(site.proxy(HOST, port=port), sent, port) == UNKNOWN_NAME
        encrypted = made(b"\xfe\x0d\0\1\0" + named(OTHER.encode()))
        assert await said(site.proxy(HOST, port=port), encrypted, port) == UNKNOWN_NAME
    assert site.heard == [] and len(site.refused) == 2


async def test_where_a_name_leads_is_judged_for_every_connection(site: Site) -> None:
    async with site.server() as port:
        proxy = site.proxy("inside.example.org", HOST, "mixed.example.org", port=port)
        inside = await said(proxy, get(f"inside.example.org:{port}"))
        assert b"403" in inside and b"10.0.0.1: private" in inside
        assert (await said(proxy, get(f"{HOST}:{port}"))).endswith(b"hello")
        for address in ("169.254.169.254", "0.0.0.0", "192.168.1.1", "100.64.0.1"):
            site.addresses[HOST] = [address]  # rebound
            assert b"403" in await said(proxy, get(f"{HOST}:{port}"))
        assert (await said(proxy, get(f"mixed.example.org:{port}"))).endswith(b"hello")  # by the address that may be
        own = site.proxy(HOST, port=port, allow=())
        site.addresses[HOST] = ["127.0.0.1"]
        assert b"127.0.0.1: this host" in await said(own, get(f"{HOST}:{port}"))
    assert len(site.heard) == 2


async def test_a_request_is_one_and_goes_on_as_it_came(site: Site) -> None:
    async with site.server() as port:
        proxy = site.proxy(HOST, port=port)
        second = get("hidden.example.org")
        sent = get(
            f"{HOST}:{port}",
            "X-Own: 1",
            "Connection: keep-alive",
            "Proxy-Authorization: x",
            target=f"http://{HOST}:{port}/a?b",
        )
        assert (await said(proxy, sent + second)).endswith(b"hello")
    assert site.heard == [get(f"{HOST}:{port}", "X-Own: 1", "Connection: close", target="/a?b") + second]


async def test_a_connection_that_becomes_another_protocols_is_not_closed(site: Site) -> None:
    async with site.server() as port:
        proxy, place = site.proxy(HOST, port=port), f"{HOST}:{port}"
        await said(proxy, get(place, "Connection: keep-alive, Upgrade", "Upgrade: websocket", "Keep-Alive: timeout=5"))
    assert site.heard == [get(place, "Upgrade: websocket", "Connection: upgrade")]


async def test_bytes_of_tls_go_through_as_they_are_also_by_a_tunnel(site: Site) -> None:
    async with site.server() as port:
        proxy, begin = site.proxy(HOST, port=port), hello(HOST)
        assert (await said(proxy, begin, port)).endswith(b"hello")
        async with guest(proxy) as (reader, writer):
            writer.write(f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\n\r\n"
            writer.write(begin)
            assert (await reader.read(-1)).endswith(b"hello")
        other = f"CONNECT {HOST}:{port} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode() + hello(OTHER)
        assert (await said(proxy, other)).endswith(UNKNOWN_NAME)
    assert site.heard == [begin, begin]


async def test_a_host_that_does_not_answer_is_told_to_the_guest(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert b"502" in await said(site.proxy(HOST, port=port), get(f"{HOST}:{port}"))
    assert await said(site.proxy(HOST, port=port), hello(HOST), port) == b""
    assert site.refused == []


async def test_a_guest_that_hangs_up_ends_its_connection_alone(site: Site) -> None:
    async with site.server() as port:
        proxy = site.proxy(HOST, port=port)
        for sent in (b"", b"G", get(HOST)[:-2], hello(HOST)[:100]):
            async with guest(proxy, port) as (_, writer):
                writer.write(sent)
        assert (await said(proxy, get(f"{HOST}:{port}"))).endswith(b"hello")


# -- secrets -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def trusted(site: Site, host: str = HOST) -> AsyncIterator[tuple[int, Vault]]:
    """A server of HTTPS, and a vault that trusts it and has a secret for HOST at its port."""
    own = Vault([(Secret("X", "env:X", (host,)), b"x")])
    async with site.server(own.inward) as port:
        vault = Vault([(Secret("TOKEN", "env:TOKEN", (f"{HOST}:{port}",)), b"hunter2")])
        vault.outward.load_verify_locations(cadata="".join(own.bundle.decode().rpartition("-----BEGIN")[1:]))
        yield port, vault


async def asks(proxy: Proxy, vault: Vault, port: int, data: bytes, host: str = HOST) -> bytes:
    """By TLS, as a guest that trusts what it was told to."""
    trust = ssl.create_default_context(cadata=vault.bundle.decode())
    async with guest(proxy, port) as (reader, writer):
        await writer.start_tls(trust, server_hostname=host)
        writer.write(data)
        answer = await reader.read(-1)
        return answer


BASIC = "Authorization: Basic " + base64.b64encode(b"user:" + TOKEN.placeholder.encode()).decode()


async def test_a_placeholder_becomes_the_secret_on_its_way_to_its_host(site: Site) -> None:
    async with trusted(site) as (port, vault):
        proxy = site.proxy(HOST, port=port, vault=vault)
        place = f"{HOST}:{port}"
        answer = await asks(proxy, vault, port, get(place, f"Authorization: Bearer {TOKEN.placeholder}", "X: y"))
        assert answer.endswith(b"hello")
        await asks(proxy, vault, port, get(place, BASIC))
    basic = "Authorization: Basic " + base64.b64encode(b"user:hunter2").decode()
    assert site.heard == [
        get(place, "Authorization: Bearer hunter2", "X: y", "Connection: close"), get(place, basic, "Connection: close")
    ]  # fmt: skip
    assert site.refused == [] and "hunter2" not in repr(vault) and b"hunter2" not in vault.bundle


async def test_a_client_that_asks_again_on_the_same_connection_ends_that_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git does where it is asked for a password. The asyncio of our programs was imported without `ssl`."""
    for module in ("base_events", "selector_events"):
        monkeypatch.setattr(f"asyncio.{module}.ssl", None)
    async with trusted(site) as (port, vault):
        trust = ssl.create_default_context(cadata=vault.bundle.decode())
        ours, theirs = socket.socketpair()
        ours.setblocking(False)

        def ask_twice() -> None:
            with suppress(OSError), trust.wrap_socket(theirs, server_hostname=HOST) as line:
                line.sendall(get(f"{HOST}:{port}"))
                while line.recv(1000):
                    pass
                line.sendall(get(f"{HOST}:{port}"))

        with ours, suppress(OSError):
            answering = site.proxy(HOST, port=port, vault=vault).answer(Call("203.0.113.9", port, ours))
            await asyncio.gather(answering, in_thread(ask_twice))
    assert len(site.heard) == 1


async def test_a_guest_that_holds_its_end_open_is_let_go(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belljar.host.guard.proxy.PATIENCE", 0.2)
    monkeypatch.setattr("asyncio.constants.SSL_SHUTDOWN_TIMEOUT", 0.2)
    async with trusted(site) as (port, vault):
        trust = ssl.create_default_context(cadata=vault.bundle.decode())
        ours, theirs = socket.socketpair()
        ours.setblocking(False)

        def ask() -> int:
            line = trust.wrap_socket(theirs, server_hostname=HOST)
            line.sendall(get(f"{HOST}:{port}"))
            while line.recv(1000):
                pass
            return line.detach()  # open

        with ours:
            answering = site.proxy(HOST, port=port, vault=vault).answer(Call("203.0.113.9", port, ours))
            async with asyncio.timeout(20):
                _, end = await asyncio.gather(answering, in_thread(ask))
        socket.socket(fileno=end).close()
    assert len(site.heard) == 1


async def test_elsewhere_it_stays_a_placeholder_which_is_told_once(site: Site) -> None:
    async with trusted(site) as (port, vault), site.server() as plain:
        egress = Egress(allow=(rule("127.0.0.1"),), secret=Only(names=(Name(HOST, port),)))
        proxy = Proxy(egress, site.refused.append, vault, site.addresses.__getitem__)
        for _ in range(2):
            await said(proxy, get(f"{OTHER}:{plain}", f"X: {TOKEN.placeholder}"))
        await said(proxy, get(f"{HOST}:{port}", f"X: {TOKEN.placeholder}"))  # in the clear
        mixed = await asks(proxy, vault, port, get(OTHER, f"X: {TOKEN.placeholder}"))
        assert b"403" in mixed and b"another host" in mixed
    assert b"hunter2" not in b"".join(site.heard) and TOKEN.placeholder.encode() in site.heard[0]
    assert [refusal.reason for refusal in site.refused][:2] == ["TOKEN is sent as its placeholder"] * 2
    assert [refusal.address for refusal in site.refused][:2] == [OTHER, HOST]


async def test_a_server_that_cannot_prove_its_name_gets_nothing(site: Site) -> None:
    async with trusted(site, OTHER) as (port, vault):
        answer = await asks(
            site.proxy(HOST, port=port, vault=vault), vault, port, get(f"{HOST}:{port}", f"X: {TOKEN.placeholder}")
        )
    assert answer.startswith(b"HTTP/1.1 502 ") and b"CERTIFICATE_VERIFY_FAILED" in answer and site.heard == []


async def test_a_guest_that_trusts_other_certificates_alone_is_told_of_it(site: Site) -> None:
    async with trusted(site) as (port, vault):
        proxy = site.proxy(HOST, port=port, vault=vault)
        async with guest(proxy, port) as (_, writer):
            with pytest.raises(ssl.SSLCertVerificationError):
                await writer.start_tls(ssl.create_default_context(), server_hostname=HOST)
    assert "does not trust" in site.refused[0].reason
