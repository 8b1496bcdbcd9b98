"""Before a guest is frozen it leaves its network: programs are told that their connections have ended."""

from __future__ import annotations

import os
import socket

import pytest

from belljar.agent.guest.network import end_connections

GONE, STAYS = "127.9.8.7", "127.9.8.6"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may end connections of others")
@pytest.mark.parametrize("has_ipv6", [False, True])
def test_the_connections_of_one_address_end_and_others_stay(has_ipv6: bool) -> None:
    here, family = ("::", socket.AF_INET6) if has_ipv6 else ("", socket.AF_INET)
    with socket.create_server((here, 0), family=family, dualstack_ipv6=has_ipv6) as server:
        port = server.getsockname()[1]
        with socket.create_connection((GONE, port), timeout=5), socket.create_connection((STAYS, port)) as client:
            (gone, _), (stays, _) = server.accept(), server.accept()
            with gone, stays:
                end_connections(socket.inet_aton(GONE))
                with pytest.raises(ConnectionAbortedError):
                    gone.recv(1)
                client.send(b"x")
                assert stays.recv(1) == b"x"
