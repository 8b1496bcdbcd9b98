"""Networks in the life of a machine: joined before it starts, listened to while it lives, gone with it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.guest import Script
from tests.stories.conftest import Runtime

from belljar.errors import GuestRefused
from belljar.guest import Streams
from belljar.host.guard.traffic import Call, Refusal
from belljar.machine.extras import Equipment, Extra, network
from belljar.machine.extras.secrets import Secrets
from belljar.machine.life.claim import claim
from belljar.machine.life.life import Lifecycle
from belljar.machine.orders import Orders
from belljar.model import Cause, NetworkMode, Outcome, OutcomeClass, Secret, Start
from belljar.network import Networks, Settings

METADATA = ("169.254.169.254", 80)


@pytest.fixture
def networked(runtime: Runtime) -> Runtime:
    runtime.networks = Networks(Settings(), runtime.folders.run)
    return runtime


def machine(network: NetworkMode = NetworkMode.USER, name: str = "", **more: Any) -> dict[str, Any]:
    return {"start": Start.COLD, "network": network, "network_name": name, **more}


def test_where_a_guest_was_kept_from_going_is_in_the_journal(networked: Runtime) -> None:
    runtime = networked
    runtime.at["payload-sent"] = lambda: runtime.domain().tell(Refusal("10.0.0.1", 22, "tcp", "private", 1))
    runtime.plan(Script(runs_for=5.0))
    assert runtime.run(runtime.request(machine=machine())).cause is Cause.FINISHED
    (event,) = [event for event in runtime.journal() if event["event"] == "network-refused"]
    assert (event["address"], event["port"], event["reason"], event["count"]) == ("10.0.0.1", 22, "private", 1)


def test_a_call_is_answered_and_closed(networked: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = networked
    ours, guests = socket.socketpair()

    async def answer(call: Call) -> None:
        assert (call.address, call.port) == METADATA
        call.connection.send(b"hello")

    class Answering(Extra):
        async def prepare(self, life: Lifecycle, there: Equipment) -> Equipment:
            return replace(there, answers=(METADATA,), answer=answer)

    monkeypatch.setattr(network, "has_metadata", lambda *_: True)
    monkeypatch.setattr(network, "MetadataService", lambda rules: Answering())
    runtime.at["payload-sent"] = lambda: runtime.domain().tell(Call(*METADATA, ours))
    runtime.plan(Script(runs_for=5.0))
    assert runtime.run(runtime.request(machine=machine())).cause is Cause.FINISHED
    egress = runtime.domain().spec.nic.egress  # type: ignore[union-attr]
    assert egress is not None and egress.answers == (METADATA,)
    with guests:
        assert guests.recv(100) == b"hello" and guests.recv(100) == b""


def test_a_guest_that_names_a_host_that_is_not_allowed_is_refused_and_it_is_in_the_journal(networked: Runtime) -> None:
    runtime = networked
    ours, guests = socket.socketpair()
    guests.send(b"GET / HTTP/1.1\r\nHost: www.example.net\r\n\r\n")
    runtime.at["payload-sent"] = lambda: runtime.domain().tell(Call("203.0.113.9", 80, ours))
    runtime.plan(Script(runs_for=5.0))
    assert runtime.run(runtime.request(machine=machine(allow=("*.example.org",)))).cause is Cause.FINISHED
    with guests:
        assert guests.recv(1000).endswith(b"belljar: www.example.net:80: not allowed\n")
    (event,) = [event for event in runtime.journal() if event["event"] == "network-refused"]
    assert (event["address"], event["port"], event["reason"]) == ("www.example.net", 80, "not allowed")


def test_what_a_machine_may_reach_has_to_be_readable(networked: Runtime) -> None:
    outcome = networked.run(networked.request(machine=machine(allow=("fe80::1",))))
    assert (outcome.cause, outcome.klass, outcome.error) == (Cause.REFUSED, OutcomeClass.USER, "BadOption")
    assert "--allow: 'fe80::1'" in outcome.reason and networked.hypervisor.domains == []


def test_of_a_secret_nothing_but_its_name_is_on_disk(networked: Runtime, tmp_path: Path) -> None:
    runtime, secret = networked, Secret("TOKEN", "env:TOKEN", ("api.example.org",))
    request = runtime.request(machine=machine(secrets=(secret,)))

    async def keep() -> Outcome:
        extras = [Secrets([(secret, b"hunter2")])]
        return await runtime.supervisor().keep(request, Streams(None, None, None), Orders(), extras)

    assert runtime.leap(keep()).cause is Cause.FINISHED
    assert "place" in runtime.guests[0].done  # the certificates it is to trust
    egress = runtime.domain().spec.nic.egress  # type: ignore[union-attr]
    assert egress is not None and egress.ports == {80, 443}
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"TOKEN" in data for data in files) and not any(b"hunter2" in data for data in files)


def test_a_call_that_nobody_answers_is_closed(networked: Runtime) -> None:
    runtime = networked
    ours, guests = socket.socketpair()
    runtime.at["payload-sent"] = lambda: runtime.domain().tell(Call(*METADATA, ours))
    runtime.plan(Script(runs_for=5.0))
    runtime.run(runtime.request(machine=machine()))
    with guests:
        assert guests.recv(100) == b""


def test_a_machine_of_a_group_has_its_number_and_gives_it_back(networked: Runtime) -> None:
    runtime, seen = networked, []
    runtime.at["after-network"] = lambda: seen.extend(sorted((runtime.folders.run / "networks/1000-blue").iterdir()))
    outcome = runtime.run(runtime.request(machine=machine(NetworkMode.ISOLATED, "blue")))
    assert outcome.cause is Cause.FINISHED, outcome.reason
    assert [path.name for path in seen] == ["1", "lock"]
    assert list((runtime.folders.run / "networks").iterdir()) == []
    (made,) = [event for event in runtime.journal() if event["event"] == "make" and event["what"] == "port"]
    assert made["path"].endswith("networks/1000-blue/1")


def test_a_network_that_cannot_be_joined_starts_nothing(networked: Runtime) -> None:
    outcome = networked.run(networked.request(machine=machine(NetworkMode.BRIDGE)))
    assert (outcome.cause, outcome.klass, outcome.error) == (Cause.REFUSED, OutcomeClass.USER, "BadOption")
    assert networked.hypervisor.domains == []


def test_what_a_dead_machine_had_of_a_group_is_swept(networked: Runtime) -> None:
    runtime = networked
    life = claim(runtime.request(), runtime.folders, lambda point: None)
    folder = runtime.folders.run / "networks/1000-blue"
    folder.mkdir(parents=True, mode=0o700)
    life.record.intend("port", folder / "1")
    life.record.intend("nft-table", folder)  # whatever a journal says, only a table of its own machine is looked for
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as dead:
        dead.bind(str(folder / "1"))
    life.release()
    undone = [one.what for one in runtime.reaper.quick()]
    assert "port" in undone and "nft-table" in undone
    assert not folder.exists()


@pytest.mark.parametrize(
    ("network", "start", "renews"),
    [
        (NetworkMode.ISOLATED, Start.AUTO, True),
        (NetworkMode.ISOLATED, Start.COLD, False),  # it boots itself, and so makes keys itself
        (NetworkMode.USER, Start.AUTO, False),  # nobody reaches in
        (NetworkMode.NONE, Start.AUTO, False),
    ],
)
def test_a_clone_that_others_reach_has_ssh_host_keys_of_its_own(
    networked: Runtime, network: NetworkMode, start: Start, renews: bool
) -> None:
    runtime = networked
    words = machine(network, "blue" if network is NetworkMode.ISOLATED else "", start=start)
    outcome = runtime.run(runtime.request(machine=words))
    assert (outcome.exit_code, outcome.start) == (0, "cold" if start is Start.COLD else "clone"), outcome.reason
    assert ("renew_keys" in runtime.guests[-1].done) is renews
    assert not renews or runtime.guests[-1].done.index("identify") < runtime.guests[-1].done.index("renew_keys")


def test_a_clone_that_gets_no_keys_of_its_own_runs_no_payload(networked: Runtime) -> None:
    runtime = networked
    runtime.plan(Script(), Script(refuses={"renew_keys": GuestRefused("no keys")}))
    outcome = runtime.run(runtime.request(machine=machine(NetworkMode.ISOLATED, "blue", start=Start.CLONE)))
    assert (outcome.cause, outcome.error) == (Cause.BOOT_FAILED, "PlugRefused"), outcome.reason
    assert "start" not in runtime.guests[-1].done and runtime.leftovers() == []
