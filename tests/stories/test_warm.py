"""Warm images: a recipe is carried out once on each host, in the template's guest, and machines start where it ended."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.guest import Script
from tests.fakes.hypervisor import FakeDomain
from tests.fakes.image import FakeStore, fake_image
from tests.stories.conftest import BOOT_TIMEOUT, Runtime

from belljar.errors import PlugRefused, PrepareFailed
from belljar.guest import Streams
from belljar.host.guard.traffic import Call, Refusal
from belljar.hypervisor import EventKind, Nic
from belljar.hypervisor.libvirt.driver import LibvirtHypervisor
from belljar.image import Recipe
from belljar.model import GIB, MIB, Account, Cause, NetworkMode, OwnWork, Payload, Start, dumps, to_json
from belljar.network import EgressMode, Networks, Settings, mac_address

RECIPE = Recipe(
    "d" * 64, "debian12", Payload((b"load",), Account("root", 0, 0, "root"), prepares=True), 1, 256 * MIB, 600.0, "root"
)  # fmt: skip
ENOUGH = {"image": "warm", "memory": 256 * MIB}


@pytest.fixture
def warm(runtime: Runtime) -> Runtime:
    return prepared_by(RECIPE, runtime)


def prepared_by(recipe: Recipe, runtime: Runtime) -> Runtime:
    image = fake_image("warm")
    runtime.images = FakeStore({"warm": replace(image, facts={**image.facts, "warm": dumps(to_json(recipe)).decode()})})
    return runtime


def test_a_recipe_is_carried_out_once_for_machines_of_every_size(warm: Runtime) -> None:
    for number, size in enumerate(((1, 256 * MIB), (1, 256 * MIB), (2, GIB))):
        wanted = {"image": "warm", "cpus": size[0], "memory": size[1]}
        assert warm.run(warm.request(id=f"{number:012x}", machine=wanted)).start == "clone"
    template, *clones = warm.guests
    assert [payload.argv for payload in template.payloads] == [(b"load",)]
    assert template.done.index("identify") < template.done.index("start") < template.done.index("settle")
    assert [[payload.argv for payload in clone.payloads] for clone in clones] == [[(b"true",)]] * 3
    assert len(warm.hypervisor.templates()) == 1


def test_a_machine_smaller_than_the_preparation_is_refused_with_what_it_needs(warm: Runtime) -> None:
    outcome = warm.run(warm.request(machine={"image": "warm", "memory": 128 * MIB}))
    assert (outcome.cause, outcome.error) == (Cause.REFUSED, "OverLimit")
    assert "the image warm needs at least 1 cpus and 256 MiB" in outcome.reason and "--memory 256M" in outcome.hint
    assert warm.guests == []


def test_a_cold_start_of_a_warm_image_is_refused(warm: Runtime) -> None:
    outcome = warm.run(warm.request(machine={**ENOUGH, "start": Start.COLD}))
    assert outcome.error == "BadOption" and "debian12" in outcome.hint and warm.guests == []


def test_it_is_refused_where_machines_are_always_booted_cold(warm: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(warm.hypervisor), "cloning", LibvirtHypervisor.cloning)
    outcome = warm.run(warm.request(machine=ENOUGH))
    assert outcome.error == "TemplateError" and warm.hypervisor.domains == []
    assert "machines by libvirt are always booted cold" in outcome.reason and "no other start" in outcome.hint


def test_a_preparation_that_fails_is_told_with_its_code_and_not_tried_again_for_a_while(warm: Runtime) -> None:
    warm.plan(Script(exit_code=3, stderr=b"first\nno such library\n"))
    outcome = warm.run(warm.request(machine=ENOUGH))
    assert (outcome.error, outcome.cause) == ("PrepareFailed", Cause.IMAGE_FAULT)
    assert outcome.reason == "image warm: the command that prepares it ended with exit code 3: no such library"
    again = warm.run(warm.request(id="1" * 12, machine=ENOUGH))
    assert "exit code 3" in again.reason and again.start == "" and len(warm.guests) == 1
    assert warm.hypervisor.templates() == [] and not list(warm.hypervisor.folder.glob("*.draft"))


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (Script(signal=11), "was ended by signal 11"),
        (Script(exit_code=127, error="not-found"), "could not be started: not-found"),
        (Script(runs_for=None), "waited 600 s for it to end"),
    ],
)
def test_every_other_bad_end_of_a_preparation_is_told_too(warm: Runtime, script: Script, says: str) -> None:
    warm.plan(script)
    outcome = warm.run(warm.request(machine=ENOUGH))
    assert outcome.error == "PrepareFailed" and says in outcome.reason
    assert warm.hypervisor.templates() == []


def test_a_preparation_may_take_longer_than_a_boot(warm: Runtime) -> None:
    warm.plan(Script(runs_for=2 * BOOT_TIMEOUT), Script())
    assert warm.run(warm.request(machine=ENOUGH)).start == "clone"


def test_a_preparation_that_powers_the_guest_off_is_told(warm: Runtime) -> None:
    script = Script(runs_for=None)
    warm.plan(script)
    started = warm.hypervisor._run_guest

    def power_off(domain: object) -> None:
        import asyncio

        asyncio.get_running_loop().call_later(60, lambda: (domain.happen(EventKind.SHUTDOWN), domain.end()))  # type: ignore[attr-defined]

    assert started is None
    warm.hypervisor._run_guest = power_off
    outcome = warm.run(warm.request(machine=ENOUGH))
    assert outcome.error == "PrepareFailed" and "powered the guest off" in outcome.reason


def test_a_clone_that_does_not_come_up_is_not_booted_cold(warm: Runtime) -> None:
    warm.run(warm.request(machine=ENOUGH))
    warm.hypervisor.faults.connect.append(PlugRefused("device_add: no slot is free"))
    outcome = warm.run(warm.request(id="1" * 12, machine={**ENOUGH, "memory": GIB}))
    assert (outcome.error, outcome.start) == ("PlugRefused", "clone") and len(warm.hypervisor.templates()) == 1


def test_a_template_that_lies_is_made_anew_for_the_next_machine(warm: Runtime) -> None:
    warm.plan(Script(), Script(proof={"hostname": "twin"}), Script())
    assert warm.run(warm.request(machine=ENOUGH)).error == "IdentityRefused"
    assert warm.run(warm.request(id="1" * 12, machine=ENOUGH)).exit_code == 0
    assert [bool(guest.payloads and guest.payloads[0].prepares) for guest in warm.guests] == [True, False, True, False]


def test_where_clones_cannot_grow_a_warm_image_says_so(warm: Runtime) -> None:
    warm.plan(Script(grows=frozenset()), Script())
    assert warm.run(warm.request(machine=ENOUGH)).exit_code == 0
    outcome = warm.run(warm.request(id="1" * 12, machine={**ENOUGH, "memory": GIB}))
    assert outcome.error == "TemplateError" and "another size" in outcome.reason
    warm.hypervisor.can_grow = False
    assert "another size" in warm.run(warm.request(id="2" * 12, machine=ENOUGH)).reason


def test_a_guest_with_its_own_work_and_no_agent_has_no_use_for_a_warm_image(warm: Runtime) -> None:
    outcome = warm.run(replace(warm.request(machine=ENOUGH), work=OwnWork()))
    assert outcome.error == "TemplateError" and warm.hypervisor.domains == []


def test_the_sites_memory_serves_its_users_without_a_preparation(warm: Runtime, tmp_path: Path) -> None:
    site = Runtime(tmp_path / "site")
    site.images = warm.images
    site.run(site.request(machine=ENOUGH))
    warm.hypervisor.site = site.hypervisor
    assert warm.run(warm.request(machine=ENOUGH)).start == "clone"
    assert [payload.argv for guest in warm.guests for payload in guest.payloads] == [(b"true",)]


def test_who_makes_the_memory_sees_what_the_preparation_says(warm: Runtime) -> None:
    class Kept:
        data = b""

        async def write(self, data: bytes) -> None:
            self.data += data

        async def close(self) -> None: ...

    kept = Kept()
    warm.plan(Script(stdout=b"loading\n", exit_code=4))
    request = warm.request(machine=ENOUGH)
    with pytest.raises(PrepareFailed, match=r"exit code 4$"):
        warm.leap(warm.supervisor().make_template(request, streams=Streams(None, kept, kept)))
    assert kept.data == b"loading\n"


# -- prepared with a network -------------------------------------------------------------------------------------------


@pytest.fixture
def networked(runtime: Runtime) -> Runtime:
    recipe = replace(RECIPE, network=NetworkMode.USER, allow=("203.0.113.9", "a.org"))
    runtime.networks = Networks(Settings(allow=("203.0.113.0/24:80", "b.org")), runtime.folders.run)
    return prepared_by(recipe, runtime)


def test_a_preparation_has_the_recipes_network_by_the_rules_of_this_host(networked: Runtime) -> None:
    assert networked.run(networked.request(machine=ENOUGH)).start == "clone"
    template, clone = networked.hypervisor.domains
    nic = template.spec.of_template.nic
    assert nic is not None and nic.mode is NetworkMode.USER and nic.egress is not None
    site, own = nic.egress.only
    assert [name.host for name in (*site.names, *own.names)] == ["b.org", "a.org"]
    assert clone.spec.nic == Nic(NetworkMode.NONE, mac_address(clone.spec.id), has_line=True)
    (proof,) = [event for event in networked.journal() if event["event"] == "identity"]
    assert proof["mac"] == clone.spec.nic.mac


def test_machines_with_and_without_a_network_have_one_memory(networked: Runtime) -> None:
    for number, mode in enumerate((NetworkMode.NONE, NetworkMode.USER, NetworkMode.ISOLATED)):
        machine = {**ENOUGH, "network": mode, "network_name": "group" if mode is NetworkMode.ISOLATED else ""}
        assert networked.run(networked.request(id=f"{number:012x}", machine=machine)).exit_code == 0
    assert len(networked.hypervisor.templates()) == 1 and len(networked.guests) == 4
    _, *clones = networked.hypervisor.domains
    assert [clone.spec.nic.mode.value for clone in clones if clone.spec.nic] == ["none", "user", "isolated"]


def test_a_preparation_reaches_hosts_by_their_names_and_where_it_was_kept_from_going_is_in_the_journal(
    networked: Runtime,
) -> None:
    ours, guests = socket.socketpair()
    guests.send(b"GET / HTTP/1.1\r\nHost: www.example.net\r\n\r\n")

    def call(domain: FakeDomain) -> None:
        networked.hypervisor._run_guest = None
        domain.tell(Refusal("10.0.0.1", 22, "tcp", "private", 1))
        domain.tell(Call("203.0.113.9", 80, ours))

    networked.hypervisor._run_guest = call
    networked.plan(Script(runs_for=5.0), Script())
    assert networked.run(networked.request(machine=ENOUGH)).exit_code == 0
    with guests:
        assert guests.recv(1000).endswith(b"belljar: www.example.net:80: not allowed\n")
    refused = [event["address"] for event in networked.journal() if event["event"] == "network-refused"]
    assert refused == ["10.0.0.1", "www.example.net"]


def test_rules_that_cannot_be_read_are_no_reason_to_prepare_without_any(networked: Runtime) -> None:
    networked.networks = Networks(Settings(deny=("10.0.0.0/33",)), networked.folders.run)
    outcome = networked.run(networked.request(machine=ENOUGH))
    assert "network.deny" in outcome.reason and networked.hypervisor.domains == []
    assert not list(networked.hypervisor.folder.glob("*.draft"))


def test_where_jobs_are_not_guarded_a_preparation_is_not_either(networked: Runtime) -> None:
    networked.networks = Networks(Settings(egress=EgressMode.OPEN), networked.folders.run)
    prepared_by(replace(RECIPE, network=NetworkMode.USER), networked)
    assert networked.run(networked.request(machine=ENOUGH)).exit_code == 0
    nic = networked.hypervisor.domains[0].spec.of_template.nic
    assert nic is not None and (nic.mode, nic.egress) == (NetworkMode.USER, None)


def test_a_preparation_without_a_network_is_given_none(warm: Runtime) -> None:
    warm.networks = Networks(Settings(), warm.folders.run)
    assert warm.run(warm.request(machine={**ENOUGH, "network": NetworkMode.USER})).start == "clone"
    template, clone = warm.hypervisor.domains
    assert template.spec.of_template.nic is None and clone.spec.nic is not None and clone.spec.nic.egress is not None
