"""What a card is plugged into, and that a template does not care."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.hypervisor.test_cmdline import COLD, LAUNCH, QEMU

from belljar.host.guard.egress import Egress
from belljar.hypervisor import DomainSpec, Frame, Nic
from belljar.hypervisor.devices.card import CARD
from belljar.hypervisor.qemu import cmdline
from belljar.hypervisor.qemu.process.launch import Launch, Wiring, plug, prepare_draft
from belljar.hypervisor.qemu.template.folders import DISK, RAM
from belljar.hypervisor.qemu.template.making import freeze
from belljar.model import NetworkMode

MAC = "52:00:00:00:00:01"
USER = Nic(NetworkMode.USER, MAC)
BRIDGE, ISOLATED = (Nic(mode, MAC, has_line=True, fd=9) for mode in (NetworkMode.BRIDGE, NetworkMode.ISOLATED))


def card_words(nic: Nic, **ends: Any) -> list[str]:
    return CARD.words(replace(LAUNCH, spec=replace(COLD, nic=nic), **ends))


@pytest.mark.parametrize(
    ("nic", "backend"),
    [(USER, "user,id=net,ipv6=off"), (BRIDGE, "tap,id=net,vhost=off,fd=9"), (ISOLATED, "socket,id=net,fd=9")],
)  # fmt: skip
def test_a_machine_has_what_carries_its_frames(nic: Nic, backend: str) -> None:
    assert card_words(nic, network=nic.fd)[1] == backend


def test_a_guest_that_boots_a_template_gets_out_nowhere() -> None:
    assert card_words(USER, is_draft=True)[1].endswith(",restrict=on")
    assert card_words(BRIDGE, is_draft=True)[1] == "hubport,id=net,hubid=0"


def test_what_is_a_machines_own_is_no_part_of_its_templates_hardware() -> None:
    def hardware(nic: Nic) -> list[str]:
        return cmdline.hardware(replace(COLD, nic=nic), QEMU, "max")

    assert hardware(USER) == hardware(replace(USER, egress=Egress(resolvers=("192.0.2.1",)), mac="x"))
    assert hardware(BRIDGE) == hardware(replace(BRIDGE, fd=12)) == hardware(ISOLATED)
    assert hardware(USER) != hardware(BRIDGE)


# -- of a warm image that is prepared with a network -------------------------------------------------------------------

RULES = Egress(resolvers=("192.0.2.1",))
NOBODY = Nic(NetworkMode.NONE, MAC, has_line=True)


def prepared(nic: Nic, uplink: Nic = USER) -> DomainSpec:
    return replace(COLD, nic=nic, uplink=uplink, frame=Frame(1, COLD.memory, COLD.disk_size, 4, 4 * COLD.memory))


def card(words: list[str]) -> tuple[str, str]:
    """Its backend, and its device without the address, which is the machine's own."""
    at = words.index("-netdev")
    return words[at + 1], re.sub(r"mac=[^,]*", "", next(word for word in words if "netdev=net," in word))


def test_its_clones_have_one_template_and_its_card_in_whatever_network_they_are() -> None:
    backends, devices, hardware = set(), set(), set()
    for nic, line in ((USER, -1), (BRIDGE, 9), (ISOLATED, 9), (NOBODY, 10)):
        spec = prepared(nic)
        launch = replace(LAUNCH, spec=spec, network=line, incoming=7)
        backend, device = card(cmdline.command_line(launch, QEMU, "max"))
        backends.add(backend)
        devices.add(device)
        hardware.add(tuple(cmdline.hardware(spec.of_template, QEMU, "max")))
        assert "card" not in spec.growth
    assert len(backends) == 4 and "socket,id=net,fd=10" in backends
    assert len(devices) == len(hardware) == 1 and card(list(hardware.pop()))[1] in devices


@pytest.mark.parametrize("egress", [RULES, None])
def test_its_guest_is_in_a_network_by_the_rules_of_the_host(tmp_path: Path, egress: Egress | None) -> None:
    def draft(spec: DomainSpec) -> Launch:
        with Wiring((0, 0)) as wires:
            return prepare_draft(spec.of_template, tmp_path, wires)

    (tmp_path / DISK).write_bytes(b"QFI\xfb" + bytes(16))
    (tmp_path / RAM).touch()
    launch = draft(prepared(BRIDGE, uplink=replace(USER, egress=egress)))
    assert launch.egress == egress
    words = cmdline.command_line(launch, QEMU, "max")
    assert card(words) == ("hubport,id=net,hubid=0", card(cmdline.hardware(launch.spec, QEMU, "max"))[1])
    assert "user,id=uplink,ipv6=off" in words and "hubport,id=wire,hubid=0,netdev=uplink" in words
    frame = Frame(1, COLD.memory, 0, 4, 4, has_card=True)
    with_own_init = replace(COLD, nic=replace(USER, egress=RULES), frame=frame)
    launch = draft(with_own_init)
    assert launch.egress is None and card(cmdline.command_line(launch, QEMU, "max"))[0].endswith(",restrict=on")


def test_a_clone_in_no_network_sends_to_nobody() -> None:
    launch = Launch(prepared(NOBODY), (), incoming=7)
    ends = [socket.socket() for _ in range(3)]
    with Wiring((0, 0)) as wires, ends[0], ends[1], ends[2]:
        plug(launch, wires, dict(zip(("monitor", "channel", "console"), ends, strict=True)), "")
        assert launch.network in wires.fds
        with socket.socket(fileno=os.dup(launch.network)) as line:
            line.setblocking(False)
            for wrong in (ConnectionRefusedError, OSError):
                with pytest.raises(wrong):
                    line.send(b"frame")
            with pytest.raises(BlockingIOError):
                line.recv(1)


class Frozen:
    """A domain that only writes down what it is asked."""

    def __init__(self, has_uplink: bool) -> None:
        self.done: list[Any] = []
        self.has_uplink = has_uplink

    async def connect(self) -> None: ...

    async def pause(self) -> None:
        self.done.append("stop")

    async def call(self, command: str, arguments: Any = None, *, fds: Any = ()) -> Any:
        self.done.append((command, arguments) if command == "netdev_del" else command)
        return {"fdset-id": 1}

    async def migrate(self, state: str, *, timeout: float) -> None:
        self.done.append("migrate")

    async def quit(self, *, grace: float) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize("has_uplink", [True, False])
async def test_what_is_written_of_it_is_a_card_in_no_network(tmp_path: Path, has_uplink: bool) -> None:
    domain: Any = Frozen(has_uplink)
    await freeze(domain, tmp_path / "state", QEMU, timeout=1.0)
    assert domain.done[0] == "stop" and domain.done[-1] == "migrate"
    assert domain.done.count(("netdev_del", {"id": "uplink"})) == has_uplink
