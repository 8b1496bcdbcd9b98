"""What a clone gets that its template did not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belljar.errors import PlugRefused
from belljar.hypervisor import Accelerator, Boot, DomainSpec, Frame, Nic
from belljar.hypervisor.qemu.abilities import DEVICES, FEATURES, PLUGGED_CPUS, Abilities
from belljar.hypervisor.qemu.cmdline import SLOTS, command_line, hardware, pieces
from belljar.hypervisor.qemu.process.launch import Launch
from belljar.hypervisor.qemu.template.plugging import EMULATED, WORDS, commands, frame_of, processors
from belljar.model import GIB, MIB, NetworkMode, Share

QEMU = Abilities("/usr/bin/qemu", "x", "QEMU 7.2", frozenset(DEVICES), frozenset(FEATURES))
FRAME = Frame(1, 512 * MIB, 8 * GIB, 16, 64 * GIB, words=WORDS)
SPEC = DomainSpec(
    id="0123456789ab", cpus=1, memory=512 * MIB, image_digest="d", boot=Boot(Path("/k"), Path("/i"), "quiet"),
    disk=Path("/d"), disk_size=8 * GIB, accelerator=Accelerator.TCG, folder=Path("/f"), frame=FRAME,
)  # fmt: skip
CARD = Nic(NetworkMode.USER, "52:54:00:00:00:01")
FOLDER = Share("/data", "/in", True, "virtiofs")


def slot(number: int, *, taken: bool = False) -> dict[str, Any]:
    said = {"type": "max-x86_64-cpu", "vcpus-count": 1, "props": {"core-id": number, "thread-id": 0, "socket-id": 0}}
    return said | ({"qom-path": "/machine/unattached/device[0]"} if taken else {})


SLOTS_OF_CPUS = [slot(3), slot(2), slot(1), slot(0, taken=True)]  # QEMU tells the last one first


def test_a_machine_of_the_templates_size_is_plugged_nothing() -> None:
    assert SPEC.growth == frozenset()
    assert commands(SPEC, None) == []


@pytest.mark.parametrize(
    ("changes", "growth"),
    [
        ({"cpus": 2}, {"cpus"}),
        ({"memory": GIB}, {"memory"}),
        ({"memory": 700 * MIB}, {"memory", "less-memory"}),
        ({"memory": 200 * MIB}, {"less-memory"}),
        ({"disk_size": 9 * GIB}, {"disk"}),
        ({"nic": CARD}, {"card"}),
    ],
)
def test_each_difference_from_the_template_has_its_name(changes: dict[str, Any], growth: set[str]) -> None:
    assert replace(SPEC, **changes).growth == growth


def test_machines_of_all_sizes_have_one_template() -> None:
    others = [replace(SPEC, **{name: value}) for name, value in (("cpus", 3), ("memory", GIB), ("nic", CARD))]
    assert {one.of_template for one in others} == {SPEC.of_template}
    assert SPEC.of_template.of_template == SPEC.of_template
    seen = hardware(SPEC.of_template, QEMU, "max")
    assert "cpus=1,maxcpus=16,sockets=1,cores=16,threads=1" in seen and f"512M,slots={SLOTS},maxmem=65536M" in seen


def test_memory_comes_in_whole_blocks_and_the_rest_is_known() -> None:
    odd = replace(SPEC, memory=700 * MIB)
    assert (odd.plugged, odd.surplus) == (256 * MIB, 68 * MIB)
    less = replace(SPEC, memory=200 * MIB)
    assert (less.plugged, less.surplus) == (0, 312 * MIB)


def test_no_piece_of_memory_is_more_than_what_is_there_can_keep_books_of() -> None:
    found = pieces(200 * GIB, 512 * MIB, 128 * MIB)
    assert sum(found) == 200 * GIB and len(found) <= SLOTS
    there = 512 * MIB
    for size in found:
        assert size % (128 * MIB) == 0 and size / 64 < there / 4
        there += size
    assert pieces(0, 512 * MIB, 128 * MIB) == pieces(-MIB, 512 * MIB, 128 * MIB) == []


def test_what_is_plugged_is_what_is_missing() -> None:
    wanted = commands(replace(SPEC, cpus=3, memory=GIB, disk_size=9 * GIB), SLOTS_OF_CPUS)
    assert wanted == [
        ("object-add", {"qom-type": "memory-backend-ram", "id": "more0", "size": 512 * MIB}),
        ("device_add", {"driver": "pc-dimm", "id": "dimm0", "memdev": "more0"}),
        ("device_add", {"driver": "max-x86_64-cpu", "id": "cpu1", "core-id": 1, "thread-id": 0, "socket-id": 0}),
        ("device_add", {"driver": "max-x86_64-cpu", "id": "cpu2", "core-id": 2, "thread-id": 0, "socket-id": 0}),
        ("block_resize", {"node-name": "disk0", "size": 9 * GIB}),
    ]


def test_memory_that_others_map_too_is_shared_with_them() -> None:
    backend = commands(replace(SPEC, memory=GIB, shares=(FOLDER,)), None)[0][1]
    assert (backend["qom-type"], backend["share"]) == ("memory-backend-memfd", True)


@pytest.mark.parametrize("slots", [None, [], [{}], "no list", [slot(0, taken=True), slot(1)], 7])
def test_processors_that_cannot_be_had_are_refused(slots: Any) -> None:
    with pytest.raises(PlugRefused):
        processors(2, slots)


def test_a_frame_is_offered_where_qemu_can_plug_and_the_machine_fits() -> None:
    host = {"memory": 500 * MIB, "disk": 8 * GIB, "cpus": 16, "total": 23 * GIB}
    frame = frame_of(SPEC, QEMU, **host)
    assert frame == Frame(1, 512 * MIB, 8 * GIB, 16, 32 * GIB, words=f"{EMULATED} {WORDS}")
    native = frame_of(replace(SPEC, accelerator=Accelerator.KVM), QEMU, **host)
    assert native is not None and native.words == WORDS
    assert frame_of(replace(SPEC, cpus=17), QEMU, **host) is None
    assert frame_of(replace(SPEC, memory=33 * GIB), QEMU, **host) is None
    assert frame_of(replace(SPEC, disk_size=GIB), QEMU, **host) is None
    assert frame_of(SPEC, replace(QEMU, devices=QEMU.devices - {"pc-dimm"}), **host) is None
    assert frame_of(SPEC, replace(QEMU, features=QEMU.features - {PLUGGED_CPUS}), **host) is None


# -- how it is emulated ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpus", "is_single"), [(1, True), (2, False)])
def test_a_machine_of_one_processor_is_emulated_by_one_thread(cpus: int, is_single: bool) -> None:
    words = command_line(Launch(replace(SPEC, cpus=cpus), layers=(13,), kernel="/k", initrd="/i"), QEMU, "max")
    assert words[words.index("-accel") + 1].endswith(",thread=single") == is_single
