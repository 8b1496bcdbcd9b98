"""OpenEnv's provider: the address of a server in a machine, and whose fault it is when none comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from tests.unit.adapters.conftest import FakeMachine, Machines, outcome

from belljar.adapters.openenv import BelljarProvider
from belljar.adapters.sandbox import InfrastructureFailure, TaskFailure
from belljar.errors import MachineBusy
from belljar.model import Cause, Port


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        """No line on stderr."""


@pytest.fixture
def server() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made.server_port
        made.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def forwarding(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = lambda machine, guest, host=0: Port(guest, host or 4711, "127.0.0.1")  # noqa: E731
    monkeypatch.setattr(FakeMachine, "forward", forward, raising=False)


async def test_a_server_in_a_machine_has_an_address_here(machines: Machines, server: int) -> None:
    """Also where an event loop is kept waiting, as OpenEnv's own client does it."""
    provider = BelljarProvider(network="user")
    address = provider.start_container("debian12", port=server, env_vars={"A": "1"}, memory="1G")
    assert address == f"http://127.0.0.1:{server}"
    provider.wait_for_ready(address, 20)
    asked = machines.made[0].options
    assert (asked["argv"], asked["env"], asked["memory"], asked["network"]) == ((), {"A": "1"}, "1G", "user")
    provider.stop_container()
    provider.stop_container()
    assert machines.made[0].is_left


@pytest.mark.parametrize(("cause", "kind"), [(Cause.NODE_FAULT, InfrastructureFailure), (Cause.FINISHED, TaskFailure)])
def test_a_machine_that_ends_before_its_server_answers(
    machines: Machines, cause: Cause, kind: type[RuntimeError]
) -> None:
    provider = BelljarProvider(command=["serve"], guest_port=80)
    address = provider.start_container("debian12", port=1)
    machines.made[0].end = outcome(cause)
    with pytest.raises(kind):
        provider.wait_for_ready(address, 20)


def test_a_server_that_does_not_come_up_in_time(machines: Machines) -> None:
    provider = BelljarProvider()
    with pytest.raises(TimeoutError, match=r"no answer within 0.02 s"):
        provider.wait_for_ready(provider.start_container("debian12", port=1), 0.02)


def test_a_port_that_is_taken_leaves_no_machine(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(machine: FakeMachine, guest: int, host: int = 0) -> Port:
        raise MachineBusy("port 1: taken")

    monkeypatch.setattr(FakeMachine, "forward", taken)
    with pytest.raises(RuntimeError, match="taken"):
        BelljarProvider().start_container("debian12", port=1)
    assert machines.made[0].is_left
