"""The memory of a running guest is moved into a second QEMU that has become what the first one is; either goes on."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from tests.live import tiny
from tests.live.tiny import Talk, Tiny

from belljar.errors import QmpError
from belljar.hypervisor import DomainSpec, Template
from belljar.hypervisor.qemu.domain import QemuDomain
from belljar.hypervisor.qemu.driver import QemuHypervisor
from belljar.hypervisor.qemu.process.launch import Launch, Wiring
from belljar.model import MIB

pytestmark = pytest.mark.slow
BOTH = "busybox md5sum /m/x; busybox nproc; busybox grep MemTotal /proc/meminfo"


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def template(guests: Tiny) -> Template:
    return asyncio.run(guests.template(grown(guests)))


def grown(guests: Tiny) -> DomainSpec:
    """A machine that is larger than its template."""
    spec = guests.spec(os.urandom(6).hex(), cpus=2, memory=768 * MIB)
    frame = guests.hypervisor.cloning.frame(spec, memory=256 * MIB, disk=tiny.DISK_SIZE)
    return replace(spec, frame=frame)


async def parent(guests: Tiny, template: Template) -> tuple[Talk, DomainSpec]:
    spec = grown(guests)
    talk = guests.clone(spec, template)
    await talk.domain.connect()
    await talk.do("mkdir /m; mount -t tmpfs none /m; busybox dd if=/dev/urandom of=/m/x bs=1M count=10")
    return talk, spec


def heir(guests: Tiny, spec: DomainSpec, incoming: int, *, is_stream: bool = True) -> Talk:
    """A QEMU that has all that the machine was given."""
    other = guests.fresh(os.urandom(6).hex(), cpus=spec.cpus, memory=spec.memory, frame=spec.frame)
    assert isinstance(guests.hypervisor, QemuHypervisor)
    with Wiring(other.owner) as wires:
        layers = (*wires.disk(other.disk).values(),)
        launch = Launch(other, layers, incoming=wires.lend(incoming), is_stream=is_stream, is_grown=True)
        return Talk(guests.hypervisor._run(launch, wires))


async def send(
    talk: Talk, end: int, *, switch: Callable[[], Awaitable[None]] | None = None, timeout: float = tiny.LONGEST
) -> None:
    assert isinstance(talk.domain, QemuDomain)
    await talk.domain.call("getfd", {"fdname": "heir"}, fds=[end])
    await talk.domain.migrate("fd:heir", timeout=timeout, with_memory=True, switch=switch)


async def test_a_grown_guest_is_moved_twice_and_goes_on_each_time(guests: Tiny, template: Template) -> None:
    talk, spec = await parent(guests, template)
    seen: list[str] = []

    async def look() -> None:
        assert isinstance(talk.domain, QemuDomain)
        seen.append((await talk.domain.call("query-status"))["status"])

    try:
        before = await talk.do(BOTH)
        for switch in (None, look):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                child = heir(guests, spec, theirs.fileno())
                await send(talk, ours.fileno(), switch=switch)
            try:
                await talk.domain.resume()
                await child.domain.connect()
                assert await talk.do(BOTH) == await child.do(BOTH) == before
            finally:
                await child.end()
        assert seen and seen[0] != "running"
    finally:
        await talk.end()


async def test_a_move_that_fails_leaves_the_guest_running(guests: Tiny, template: Template) -> None:
    talk, spec = await parent(guests, template)

    async def refuse() -> None:
        raise QmpError("no disk")

    try:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = heir(guests, spec, theirs.fileno())
            with pytest.raises(QmpError, match="no disk"):
                await send(talk, ours.fileno(), switch=refuse)
        await child.end()
        assert await talk.ask("still") == "heard still"
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(QmpError, match="within 2 s"):  # nobody reads there
            await send(talk, ours.fileno(), timeout=2)
        assert await talk.ask("and still") == "heard and still"
        ours, theirs = socket.socketpair()
        theirs.close()
        with ours, pytest.raises(QmpError, match="could not write its state"):
            await send(talk, ours.fileno())
        assert await talk.ask("again") == "heard again"
    finally:
        await talk.end()


async def test_a_guest_that_stands_still_is_written_to_a_file_and_loaded_from_it(
    guests: Tiny, template: Template
) -> None:
    talk, spec = await parent(guests, template)
    memory = spec.folder / "memory"
    try:
        before = await talk.do(BOTH)
        await talk.domain.pause()
        with open(memory, "xb") as file:  # noqa: ASYNC230
            await send(talk, file.fileno())
        await talk.domain.resume()
        assert await talk.ask("hello") == "heard hello"
        with open(memory, "rb") as file:  # noqa: ASYNC230
            child = heir(guests, spec, file.fileno(), is_stream=False)
        try:
            await child.domain.connect()
            assert await child.do(BOTH) == before
        finally:
            await child.end()
    finally:
        await talk.end()


async def test_a_running_guest_becomes_a_template_twice_and_its_clones_go_on_where_it_stood(
    guests: Tiny, template: Template
) -> None:
    talk, spec = await parent(guests, template)
    assert isinstance(guests.hypervisor, QemuHypervisor)
    clones: list[Talk] = []
    seen: list[str] = []
    try:
        before = await talk.do(BOTH)
        for number in range(2):
            await talk.do(
                f"echo word {number} > /m/word; echo disk {number} | busybox dd of=/dev/vda conv=notrunc; busybox sync"
            )
            layer, forked = spec.folder / f"layer{number}", replace(spec, fork=f"fork{number}")
            key = guests.hypervisor._key(forked)
            lock = guests.hypervisor.template_lock(forked)
            assert lock
            made, still = await guests.hypervisor.fork(talk.domain, forked, layer, seen.append)
            assert made.key == key and still < 30 and layer.exists()
            spec = replace(spec, disk=layer)
            await talk.do("echo own > /m/word; echo own disk | busybox dd of=/dev/vda conv=notrunc; busybox sync")
            for _ in range(2):
                child = guests.hypervisor.of_fork(guests.spec(os.urandom(6).hex()), key)
                there = guests.hypervisor.find_template(child)
                assert there == made
                clones.append(guests.clone(child, made))
                await clones[-1].domain.connect()
                assert await clones[-1].do("busybox cat /m/word; busybox head -c 6 /dev/vda; echo") == (
                    [f"word {number}", f"disk {number}"],
                    0,
                )
                assert await clones[-1].do(BOTH) == before
            assert await talk.do(BOTH) == before
    finally:
        for guest in (*clones, talk):
            await guest.end()
