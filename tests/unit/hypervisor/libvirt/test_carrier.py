"""The process that carries a machine's frames, with a program in QEMU's place: how it ends, and who is told."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.hypervisor.libvirt.test_xml import COLD

from belljar.errors import CommandMissing, NetworkFailed
from belljar.hypervisor import DomainSpec, Nic
from belljar.hypervisor.libvirt.domain import Carrier
from belljar.model import NetworkMode

NIC = Nic(NetworkMode.ISOLATED, "52:01:02:03:04:05", has_line=True)


@pytest.fixture
def spec(tmp_path: Path) -> DomainSpec:
    return replace(COLD, folder=tmp_path, owner=(os.geteuid(), os.getegid()), nic=NIC)


def program(folder: Path, text: str) -> str:
    path = folder / "qemu"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


async def test_one_that_ends_is_told_with_its_last_words(spec: DomainSpec, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    told: asyncio.Future[NetworkFailed] = asyncio.get_running_loop().create_future()
    binary = program(tmp_path, "echo first >&2; echo 'the tap is gone' >&2; exit 1")
    carrier = Carrier(spec, binary, theirs, told.set_result)
    async with asyncio.timeout(20):
        why = await told
        assert [item async for item in carrier.outside.traffic()] == []
    assert "the tap is gone" in why.message
    assert b"first" in (tmp_path / "qemu.log").read_bytes()
    ours.close()
    theirs.close()


async def test_one_that_is_ended_by_us_is_told_to_nobody(spec: DomainSpec, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    told: list[NetworkFailed] = []
    carrier = Carrier(spec, program(tmp_path, "exec sleep 1000"), theirs, told.append)
    theirs.close()
    carrier.close()
    carrier.close()
    async with asyncio.timeout(20):
        assert [item async for item in carrier.outside.traffic()] == []
    assert told == [] and ours.recv(1) == b""  # nobody has the other end
    ours.close()


async def test_a_program_that_is_missing_is_named_and_nothing_is_left_open(spec: DomainSpec, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    before = set(os.listdir("/proc/self/fd"))
    missing = replace(spec, owner=(0, 0)) if os.geteuid() == 0 else spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("belljar.hypervisor.qemu.process.launch.which", lambda name: None)
        with pytest.raises(CommandMissing, match="setpriv"):
            Carrier(missing, "/no/such/qemu", theirs, lambda why: None)
    assert set(os.listdir("/proc/self/fd")) == before
    ours.close()
    theirs.close()
