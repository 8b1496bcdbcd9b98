"""Where a guest finds a file server, and what is said of one that does not answer."""

from __future__ import annotations

import asyncio
import socket

import pytest

from belljar.errors import ServerSilent, ShareMissing
from belljar.model import FileServer, NetworkMode
from belljar.network import find_server, nfs, plan, seen_by_guest

USER = plan(NetworkMode.USER, "0123456789ab")


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("127.0.0.1", "10.0.2.2"),
        ("0.0.0.0", "10.0.2.2"),
        ("127.0.0.2", ""),
        ("::1", ""),
        ("fd00::1", ""),
        ("192.168.7.8", "192.168.7.8"),
        ("10.0.2.77", ""),
        ("169.254.169.254", ""),  # a cloud's metadata service, which would otherwise be opened as a share
        ("10.0.3.77", "10.0.3.77"),
    ],
)
def test_what_the_host_calls_so_the_guest_of_a_user_network_finds_there(address: str, seen: str) -> None:
    assert seen_by_guest(USER, address) == seen


@pytest.mark.parametrize("mode", [NetworkMode.NONE, NetworkMode.ISOLATED])
def test_without_a_way_out_nothing_is_seen(mode: NetworkMode) -> None:
    assert seen_by_guest(plan(mode, "0123456789ab"), "192.168.7.8") == ""


def test_on_a_bridge_the_host_itself_is_elsewhere() -> None:
    link = plan(NetworkMode.BRIDGE, "0123456789ab")
    seen = [seen_by_guest(link, one) for one in ("127.0.0.1", "::1", "192.168.7.8", "fd00::1")]
    assert seen == ["", "", "192.168.7.8", "fd00::1"]


async def test_a_server_that_answers_is_found_where_the_guest_sees_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            assert await find_server(f"nfs://{host}:{port}/data", USER) == FileServer("10.0.2.2", port, "/data")


async def test_a_server_that_refuses_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ServerSilent) as caught:
        await find_server(f"nfs://127.0.0.1:{port}/data", USER)
    assert f"127.0.0.1:{port}" in caught.value.message and "refused" in caught.value.message


async def test_a_name_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nfs, "PATIENCE", 0.05)

    async def for_ever(export: nfs.Export, link: object) -> FileServer:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(nfs, "_connected", for_ever)
    with pytest.raises(ServerSilent, match=r"nas:2049.*no answer within"):
        await find_server("nfs://nas:2049/data", USER)


async def test_a_name_that_is_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*words: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerSilent, match="cannot be resolved"):
        await find_server("nfs://nas:2049/data", USER)


async def test_an_address_no_guest_can_reach_is_refused_at_once() -> None:
    for source in ("nfs://[::1]:2049/data", "nfs://10.0.2.9:2049/data"):
        with pytest.raises(ShareMissing, match="cannot reach"):
            await asyncio.wait_for(find_server(source, USER), 5)
