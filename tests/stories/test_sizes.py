"""One template per image: machines of other sizes are clones of it, and their payloads start with all of it or not at all."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.guest import Script
from tests.fakes.image import FakeStore, fake_image
from tests.stories.conftest import Runtime

from belljar.errors import GuestRefused, PlugRefused
from belljar.image import BootFiles, Image
from belljar.machine.planning.template import BASE_MEMORY, CAREFUL_MEMORY
from belljar.model import GIB, MIB, Context, NetworkMode


def test_machines_of_every_size_are_clones_of_one_template(runtime: Runtime) -> None:
    sizes = [(1, BASE_MEMORY), (2, BASE_MEMORY), (1, GIB), (2, 700 * MIB), (1, 64 * MIB)]
    for number, (cpus, memory) in enumerate(sizes):
        outcome = runtime.run(runtime.request(id=f"{number:012x}", machine={"cpus": cpus, "memory": memory}))
        assert (outcome.exit_code, outcome.start) == (0, "clone")
    assert len(runtime.hypervisor.templates()) == 1
    assert [guest.grown for guest in runtime.guests] == [
        [], [], [(2, 0, 0, 0)], [(1, 512 * MIB, 0, 0)], [(2, 256 * MIB, 68 * MIB, 0)], [(1, 0, 448 * MIB, 0)],
    ]  # fmt: skip


class WithSystem(FakeStore):
    """Its image is started by its own init."""

    def __init__(self) -> None:
        facts = {"agent_in_initrd": True, "init": "/sbin/init", "init_system": "systemd"}
        super().__init__({"debian12": replace(fake_image("debian12"), facts=facts)})

    def boot_files(self, image: Image, context: Context = Context.AUTO) -> BootFiles:
        return replace(super().boot_files(image, context), init="/sbin/init")


def test_a_system_of_its_own_is_booted_with_more_than_most_of_its_clones_have(runtime: Runtime) -> None:
    runtime.images = WithSystem()
    sizes = (BASE_MEMORY, BASE_MEMORY, CAREFUL_MEMORY, 2 * GIB, 64 * MIB)
    for number, memory in enumerate(sizes):
        wanted = {"memory": memory, "context": Context.INJECT}
        assert runtime.run(runtime.request(id=f"{number:012x}", machine=wanted)).start == "clone"
    template, *clones = [guest.grown for guest in runtime.guests]
    assert template == [(1, 0, CAREFUL_MEMORY - BASE_MEMORY, 0)]
    assert clones == [[], [], [(1, 0, 0, 0)], [(1, GIB, 0, 0)], [(1, 0, CAREFUL_MEMORY - 64 * MIB, 0)]]


def test_a_guest_that_can_hold_no_memory_back_has_no_smaller_clones(runtime: Runtime) -> None:
    runtime.images = WithSystem()
    runtime.plan(Script(refuses={"grow": GuestRefused("no large pages")}), Script())
    for number, memory in enumerate((2 * GIB, BASE_MEMORY)):
        wanted = {"memory": memory, "context": Context.INJECT}
        assert runtime.run(runtime.request(id=f"{number:012x}", machine=wanted)).start == "clone"
    assert [domain.spec.frame is None for domain in runtime.hypervisor.domains] == [False, False, True, True]


def test_a_payload_starts_when_its_guest_has_all_and_not_before(runtime: Runtime) -> None:
    runtime.run(runtime.request(machine={"cpus": 2, "memory": GIB}))
    done = runtime.guests[-1].done
    assert done.index("identify") < done.index("grow") < done.index("start")


def test_a_clone_that_does_not_get_its_size_is_booted_cold_and_its_template_stays(runtime: Runtime) -> None:
    runtime.plan(Script(), Script(seen=(1, GIB)), Script())
    outcome = runtime.run(runtime.request(machine={"cpus": 2, "memory": GIB}))
    assert (outcome.exit_code, outcome.start) == (0, "cold")
    assert "1 processors" in outcome.start_reason and "should have 2" in outcome.start_reason
    assert "start" not in runtime.guests[1].done
    assert runtime.domain().spec.frame is None and len(runtime.hypervisor.templates()) == 1


def test_what_qemu_refuses_to_plug_does_not_cost_the_template(runtime: Runtime) -> None:
    runtime.run()
    runtime.hypervisor.faults.connect.append(PlugRefused("device_add: no slot is free"))
    outcome = runtime.run(runtime.request(id="1" * 12, machine={"cpus": 2}))
    assert (outcome.exit_code, outcome.start) == (0, "cold") and "no slot is free" in outcome.start_reason
    assert len(runtime.hypervisor.templates()) == 1


def test_an_image_whose_kernel_takes_no_memory_gets_a_template_for_each_size(runtime: Runtime) -> None:
    runtime.plan(Script(grows=frozenset(("cpus",))))
    for number, memory in enumerate((GIB, GIB, 2 * GIB)):
        outcome = runtime.run(runtime.request(id=f"{number:012x}", machine={"memory": memory}))
        assert (outcome.exit_code, outcome.start) == (0, "clone")
    assert len(runtime.hypervisor.templates()) == 3  # the base, and two of their own
    assert not any(guest.grown for guest in runtime.guests)


def test_where_clones_cannot_grow_all_is_as_it_was(runtime: Runtime) -> None:
    runtime.hypervisor.can_grow = False
    assert runtime.run(runtime.request(machine={"cpus": 2})).start == "clone"
    assert [domain.spec.frame for domain in runtime.hypervisor.domains] == [None, None]


def test_a_card_is_none_of_the_templates_affair(runtime: Runtime) -> None:
    for number, network in enumerate((NetworkMode.NONE, NetworkMode.USER)):
        runtime.run(runtime.request(id=f"{number:012x}", machine={"network": network, "memory": BASE_MEMORY}))
    assert len(runtime.hypervisor.templates()) == 1
    assert [domain.spec.nic is None for domain in runtime.hypervisor.domains] == [True, True, False]
    assert not any(guest.grown for guest in runtime.guests)  # who the clone is shows that it has the card


def test_an_image_that_boots_with_more_memory_alone_gets_the_template_of_its_size(runtime: Runtime) -> None:
    runtime.plan(Script(boots_in=None), Script())
    outcome = runtime.run(runtime.request(machine={"memory": 4 * GIB}))
    assert (outcome.exit_code, outcome.start) == (0, "clone")
    assert runtime.domain().spec.memory == 4 * GIB and runtime.domain().spec.frame is None


def test_a_template_of_the_site_saves_a_user_the_boot(runtime: Runtime, tmp_path: Path) -> None:
    site = Runtime(tmp_path / "site")
    site.run()
    runtime.hypervisor.site = site.hypervisor
    outcome = runtime.run(runtime.request(machine={"cpus": 2, "memory": GIB}))
    assert (outcome.exit_code, outcome.start) == (0, "clone")
    assert len(runtime.hypervisor.domains) == 1  # nothing was booted
    for domain in site.hypervisor.domains:
        for end in (domain.channel, domain.guest, domain.console, domain.serial):
            end.close()


def test_a_base_template_that_did_not_boot_is_not_tried_by_the_next_job(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime.plan(Script(boots_in=None), Script())
    for number, memory in enumerate((4 * GIB, 3 * GIB)):
        outcome = runtime.run(runtime.request(id=f"{number:012x}", machine={"memory": memory}))
        assert (outcome.exit_code, outcome.start) == (0, "clone")
    base, *rest = [domain.spec.of_template.memory for domain in runtime.hypervisor.domains]
    assert base == BASE_MEMORY and rest == [4 * GIB, 4 * GIB, 3 * GIB, 3 * GIB]
    later = time.time() + 3700
    monkeypatch.setattr(time, "time", lambda: later)
    runtime.run(runtime.request(id="2" * 12, machine={"memory": 2 * GIB}))
    assert runtime.domain().spec.frame is not None  # an hour later it is, and this time it boots


def test_a_guest_that_refused_to_be_a_template_is_booted_cold_at_once_by_the_next_job(runtime: Runtime) -> None:
    runtime.plan(Script(refuses={"settle": GuestRefused("it refuses to settle")}))
    outcomes = [runtime.run(runtime.request(id=f"{number:012x}")) for number in range(2)]
    assert [one.start for one in outcomes] == ["cold", "cold"]
    assert "refuses to settle" in outcomes[1].start_reason
    assert len(runtime.hypervisor.domains) == 3  # one of them was to become a template


def test_a_template_that_is_ordered_serves_all_sizes_or_one(runtime: Runtime) -> None:
    supervisor, request = runtime.supervisor(), runtime.request(machine={"cpus": 2, "memory": GIB})
    base, exact = (
        runtime.leap(supervisor.make_template(replace(request, id=id), exact=id == "2" * 12))
        for id in ("1" * 12, "2" * 12)
    )
    assert base.key != exact.key
    assert [one.spec.of_template.memory for one in runtime.hypervisor.domains] == [BASE_MEMORY, GIB]
    assert runtime.run(runtime.request(machine={"memory": 2 * GIB})).start == "clone"
    assert len(runtime.hypervisor.templates()) == 2
