"""QEMU's command line, written down whole: one golden file for each kind of domain. `BELLJAR_GOLDEN=write` renews them."""

import json
import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from belljar.hypervisor import (
    Accelerator,
    Boot,
    DomainSpec,
    ExtraDisk,
    Frame,
    Layout,
    Nic,
    Node,
    guest_uuid,
)
from belljar.hypervisor.devices.disk import place_at_the_end
from belljar.hypervisor.qemu.abilities import DEVICES, FEATURES, FILE_MIGRATION, READONLY_RAM, Abilities
from belljar.hypervisor.qemu.cmdline import command_line, hardware, state_address
from belljar.hypervisor.qemu.process.launch import Launch
from belljar.model import GIB, MIB, NetworkMode, Share

GOLDEN = Path(__file__).parent / "golden"
QEMU = Abilities("/usr/bin/qemu-system-x86_64", "file:1:2:3", "QEMU 7.2.22", frozenset(DEVICES), frozenset())
NEW_QEMU = replace(QEMU, features=frozenset({FILE_MIGRATION, READONLY_RAM}))
NEWEST_QEMU = replace(QEMU, features=frozenset(FEATURES))
BARE_QEMU = replace(QEMU, devices=frozenset(DEVICES[:3]))
COLD = DomainSpec(
    id="0123456789ab", cpus=2, memory=512 * MIB, image_digest="d" * 64,
    boot=Boot(Path("/images/kernel"), Path("/images/initrd"), "console=ttyS0 quiet", "b" * 64),
    disk=Path("/scratch/0123456789ab.qcow2"), disk_size=8 * GIB, accelerator=Accelerator.TCG, folder=Path("/run/m"),
)  # fmt: skip
LAUNCH = Launch(
    COLD, layers=(13, 14), monitor=10, channel=11, console=12, kernel="/proc/self/fd/15", initrd="/proc/self/fd/16"
)
SHARES = (
    Share("/data,with,commas", "/in", True),
    Share("/home/me", "/in", False),
)


DISKS = (
    ExtraDisk("scratch", Path("/scratch/id.scratch"), "raw", readonly=False),
    ExtraDisk("packed0", Path("/scratch/id.packed0"), "raw", readonly=True),
)

FOLDERS = (
    Share("/data", "/in", True, "virtiofs"),
    Share("/home/me", "/in", False),
    Share("/work", "/in", False, "virtiofs"),
)

CHAINED = ExtraDisk("foreign", Path("/scratch/id.foreign"), "qcow2", readonly=False, chained=True)

# A machine that was given memory and processors beyond its template's.
FRAME = Frame(1, 256 * MIB, 8 * GIB, 16, 64 * GIB)
GROWN = replace(COLD, cpus=3, memory=4 * GIB, disk_size=9 * GIB, frame=FRAME)
AS_IT_IS: dict[str, Any] = {"is_draft": True, "is_stream": True, "is_grown": True}

NODES = (Node(2, 384 * MIB, 0), Node(2, 128 * MIB, 1))

CASES = {
    "cold": (COLD, QEMU, LAUNCH),
    "firmware": (replace(COLD, boot=Boot()), QEMU, replace(LAUNCH, kernel="", initrd="")),
    "disc": (replace(COLD, boot=Boot(is_disc=True)), QEMU, replace(LAUNCH, kernel="", initrd="")),
    "numa": (replace(COLD, cpus=4, layout=Layout(2, 1, 2, NODES)), QEMU, LAUNCH),
    "large-pages": (replace(COLD, pages=2 * MIB, layout=Layout(1, 1, 2)), QEMU, LAUNCH),
    "kvm-siblings": (replace(COLD, accelerator=Accelerator.KVM, layout=Layout(1, 1, 2)), QEMU, LAUNCH),
    "numa-virtiofs": (
        replace(COLD, cpus=4, layout=Layout(2, 1, 2, NODES), shares=FOLDERS), QEMU, replace(LAUNCH, folders=(19, 20))
    ),
    "bare-qemu": (COLD, BARE_QEMU, LAUNCH),
    "kvm": (replace(COLD, accelerator=Accelerator.KVM), QEMU, LAUNCH),
    "network-and-shares": (
        replace(COLD, nic=Nic(NetworkMode.USER, "52:01:02:03:04:05"), shares=SHARES), QEMU,
        LAUNCH,
    ),
    "template": (COLD, QEMU, replace(LAUNCH, ram=17)),
    "clone": (COLD, QEMU, replace(LAUNCH, layers=(13, 14, 18), ram=17, incoming=23)),
    "clone-8.2": (COLD, NEW_QEMU, replace(LAUNCH, layers=(13, 14, 18), ram=17, incoming=23)),
    "clone-11.1": (COLD, NEWEST_QEMU, replace(LAUNCH, layers=(13, 14, 18), ram=17, incoming=23)),
    "grown-draft": (GROWN, QEMU, replace(LAUNCH, layers=(), ram=17, more=(18, 19), incoming=23, **AS_IT_IS)),
    "grown-clone": (
        GROWN, NEW_QEMU, replace(LAUNCH, layers=(13, 14), ram=17, more=(18, 19), incoming=23, is_grown=True)
    ),
    "grown-with-its-own-memory": (GROWN, NEW_QEMU, replace(LAUNCH, incoming=23, is_stream=True, is_grown=True)),
    "clone-with-disks": (
        replace(COLD, disks=DISKS), QEMU,
        replace(LAUNCH, layers=(13, 14, 18), ram=17, incoming=23, disks=((19,), (20,))),
    ),
    "virtiofs": (
        replace(COLD, shares=FOLDERS), QEMU,
        replace(LAUNCH, folders=(19, 20), ram=17),
    ),
    "virtiofs-template": (
        replace(COLD, shares=FOLDERS), QEMU, replace(LAUNCH, ram=17),
    ),
    "virtiofs-clone": (
        replace(COLD, shares=FOLDERS), QEMU,
        replace(
            LAUNCH, layers=(13, 14, 18), folders=(19, 20), ram=17, incoming=23
        ),
    ),
    "seed": (replace(COLD, seed=Path("/run/m/seed.iso")), QEMU, replace(LAUNCH, seed=19)),
    "clone-with-a-chained-disk": (
        replace(COLD, disks=(CHAINED,), seed=Path("/templates/key/seed.iso")), QEMU,
        replace(
            LAUNCH, layers=(13, 14, 18), ram=17, incoming=23, disks=((19, 20, 21),), seed=22
        ),
    ),
}  # fmt: skip


def words_of(spec: DomainSpec, qemu: Abilities, launch: Launch) -> list[str]:
    cpu = "host" if spec.accelerator is Accelerator.KVM else "max"
    return command_line(replace(launch, spec=spec), qemu, cpu)


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_is_the_one_written_down(name: str) -> None:
    text = "\n".join(words_of(*CASES[name])) + "\n"
    if os.environ.get("BELLJAR_GOLDEN") == "write":
        (GOLDEN / f"{name}.txt").write_text(text)
    assert text == (GOLDEN / f"{name}.txt").read_text()


def devices(words: list[str]) -> list[str]:
    return [word for before, word in pairwise(words) if before in ("-device", "-serial")]


def test_a_clone_has_the_devices_of_its_template_in_the_same_order() -> None:
    template, clone = (words_of(*CASES[name]) for name in ("template", "clone"))
    assert devices(template) == devices(clone)


def test_nothing_listens_and_nothing_has_a_name_on_disk() -> None:
    for name in ("cold", "clone", "template", "network-and-shares"):
        words = words_of(*CASES[name])
        assert not any(
            "server" in word or "path=/run" in word or "/scratch" in word or "/images" in word for word in words
        )


def test_a_path_with_commas_stays_one_path() -> None:
    words = words_of(*CASES["network-and-shares"])
    assert "local,id=share0,path=/data,,with,,commas,security_model=none,multidevs=remap,readonly=on" in words


def test_every_json_word_is_json() -> None:
    for name in CASES:
        for word in words_of(*CASES[name]):
            if word.startswith("{"):
                assert isinstance(json.loads(word), dict)


@pytest.mark.parametrize(
    "other",
    [
        replace(COLD, id="ffffffffffff"),
        replace(COLD, disk=Path("/elsewhere")),
        replace(COLD, folder=Path("/elsewhere")),
        replace(COLD, boot=replace(COLD.boot, kernel=Path("/other/place/same/bytes"))),
    ],
    ids=["id", "disk", "folder", "kernel path"],
)  # fmt: skip
def test_what_is_the_hosts_own_affair_does_not_change_the_hardware(other: DomainSpec) -> None:
    assert hardware(other, QEMU, "max") == hardware(COLD, QEMU, "max")


@pytest.mark.parametrize(
    "other",
    [
        replace(COLD, cpus=1),
        replace(COLD, memory=1 * GIB),
        replace(COLD, accelerator=Accelerator.KVM),
        replace(COLD, boot=Boot()),
        replace(COLD, boot=replace(COLD.boot, append="quiet")),
        replace(COLD, nic=Nic(NetworkMode.USER, "52:01:02:03:04:05")),
        replace(COLD, shares=SHARES[:1]),
        replace(COLD, shares=SHARES),
    ],
    ids=["cpus", "memory", "accelerator", "firmware", "append", "card", "one share", "two shares"],
)  # fmt: skip
def test_what_the_guest_sees_changes_the_hardware(other: DomainSpec) -> None:
    assert hardware(other, QEMU, "max") != hardware(COLD, QEMU, "max")


def test_another_processor_is_other_hardware() -> None:
    assert hardware(COLD, QEMU, "qemu64") != hardware(COLD, QEMU, "max")


def test_two_cards_differ_only_by_what_the_agent_sets() -> None:
    one, two = (replace(COLD, nic=Nic(NetworkMode.USER, f"52:01:02:03:04:0{n}")) for n in (1, 2))
    assert hardware(one, QEMU, "max") == hardware(two, QEMU, "max")


def test_a_share_may_be_another_folder_and_another_mode_in_each_clone() -> None:
    one = replace(COLD, shares=(Share("/a", "/in", True),))
    two = replace(COLD, shares=(Share("/b", "/in", False),))
    assert hardware(one, QEMU, "max") == hardware(two, QEMU, "max")


# -- folders by virtiofs -----------------------------------------------------------------------------------------------


def test_a_clone_with_folders_by_virtiofs_begins_with_the_hardware_of_its_template() -> None:
    template, clone = (words_of(*CASES[name]) for name in ("virtiofs-template", "virtiofs-clone"))
    assert devices(template) == devices(clone)
    assert not any("vhost-user" in word for word in clone)


def test_a_cold_start_has_the_folders_from_its_beginning() -> None:
    words = devices(words_of(*CASES["virtiofs"]))
    assert [word for word in words if word.startswith("vhost-user-fs-pci,")] == [
        "vhost-user-fs-pci,tag=share0,queue-size=1024,chardev=folder0,bus=port0",
        "vhost-user-fs-pci,tag=share2,queue-size=1024,chardev=folder1,bus=port1",
    ]


def test_how_many_folders_by_virtiofs_a_machine_has_is_part_of_its_hardware_and_what_they_are_is_not() -> None:
    none, two = hardware(COLD, QEMU, "max"), hardware(replace(COLD, shares=FOLDERS[::2]), QEMU, "max")
    one = hardware(replace(COLD, shares=FOLDERS[:1]), QEMU, "max")
    other = hardware(replace(COLD, shares=(replace(FOLDERS[0], source="/x", readonly=False),)), QEMU, "max")
    by_9p = hardware(replace(COLD, shares=(replace(FOLDERS[0], kind="9p"),)), QEMU, "max")
    assert one == other
    assert len({tuple(words) for words in (none, one, two, by_9p)}) == 4


def test_a_folder_without_its_line_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        words_of(replace(COLD, shares=FOLDERS[:1]), QEMU, replace(LAUNCH, folders=(19, 20)))


def test_each_machine_has_a_uuid_of_its_own() -> None:
    from uuid import UUID

    assert UUID(guest_uuid("0123456789ab")).version == 4
    assert guest_uuid("0123456789ab") != guest_uuid("0123456789ac")


# -- further disks -----------------------------------------------------------------------------------------------------


def test_further_disks_leave_every_other_device_in_its_place() -> None:
    template, clone = (words_of(*CASES[name]) for name in ("template", "clone-with-disks"))
    assert devices(clone)[: len(devices(template))] == devices(template)
    assert hardware(CASES["clone-with-disks"][0], QEMU, "max") == hardware(COLD, QEMU, "max")


def test_each_further_disk_has_a_place_of_its_own_at_the_end_of_the_bus() -> None:
    places = [place_at_the_end(number) for number in range(20)]
    addresses = [place.partition(",")[0] for place in places]
    assert addresses[0] == "addr=0x1e.0x0" and addresses[7] == "addr=0x1e.0x7" and addresses[8] == "addr=0x1d.0x0"
    assert len(set(addresses)) == 20
    assert [place for place in places if "multifunction" in place] == [places[0], places[8], places[16]]


def test_a_read_only_disk_cannot_be_written_to_and_the_other_is_never_flushed() -> None:
    words = words_of(*CASES["clone-with-disks"])
    nodes = {
        node["node-name"]: node
        for node in (json.loads(word) for word in words if word.startswith("{"))
        if "node-name" in node
    }
    assert nodes["x-packed0-0"]["read-only"] and nodes["x-packed0-0-file"]["read-only"]
    assert "read-only" not in nodes["x-scratch-0"] and nodes["x-scratch-0"]["cache"] == {"no-flush": True}


def test_a_disk_without_a_descriptor_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        words_of(replace(COLD, disks=DISKS), QEMU, LAUNCH)


def test_a_disc_is_part_of_the_hardware_and_further_disks_are_not() -> None:
    seeded = replace(COLD, seed=Path("/run/m/seed.iso"))
    assert hardware(seeded, QEMU, "max") != hardware(COLD, QEMU, "max")
    assert hardware(seeded, QEMU, "max") == hardware(replace(seeded, seed=Path("/templates/key/seed.iso")), QEMU, "max")
    assert hardware(replace(seeded, disks=(CHAINED,)), QEMU, "max") == hardware(seeded, QEMU, "max")


def test_few_workers_where_their_stacks_count() -> None:
    words = words_of(COLD, NEWEST_QEMU, replace(LAUNCH, workers=8))
    assert ("-object", "main-loop,id=main-loop,thread-pool-max=8") in pairwise(words)
    assert not any("main-loop" in word for word in words_of(COLD, NEWEST_QEMU, LAUNCH))
    assert not any("main-loop" in word for word in words_of(COLD, QEMU, replace(LAUNCH, workers=8)))


def test_a_device_state_has_the_address_that_this_qemu_takes_for_files() -> None:
    assert state_address(23, QEMU) == "fd:23"
    assert state_address("state", QEMU) == "fd:state"
    assert state_address(23, NEW_QEMU) == "file:/dev/fdset/23"
    assert state_address(23, NEW_QEMU, is_stream=True) == "fd:23"
