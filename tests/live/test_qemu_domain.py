"""Real QEMU, started cold: how it is confined, what is seen of its guest, and how it ends when something goes wrong."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.live import tiny
from tests.live.tiny import Talk, Tiny

from belljar.errors import BelljarError, HostError, ImageCorrupt, NoMemory, OverLimit, QmpTimeout
from belljar.hypervisor import Domain, DomainEvent, DomainSpec, EventKind, Nic, Settings
from belljar.hypervisor.qemu.driver import QemuHypervisor
from belljar.model import GIB, MIB, NetworkMode, Share

NOBODY = (65534, 65534)


@pytest.fixture(scope="module")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny.make(tmp_path_factory.mktemp("tiny"))


def new_id() -> str:
    return os.urandom(6).hex()


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@asynccontextmanager
async def ready(guests: Tiny) -> AsyncIterator[Talk]:
    """A guest of the plain kind."""
    guest = await guests.guest()
    try:
        yield guest
    finally:
        await guest.end()


@asynccontextmanager
async def booted(guests: Tiny, spec: DomainSpec) -> AsyncIterator[Talk]:
    """A guest of another kind, started cold."""
    guest = Talk(guests.hypervisor.start(spec))
    try:
        assert await guest.line() == "ready"
        yield guest
    finally:
        await guest.end()


async def events(domain: Domain) -> list[DomainEvent]:
    async with asyncio.timeout(tiny.LONGEST):
        return [event async for event in domain.events()]


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# -- confinement -----------------------------------------------------------------------------------------------------


async def test_qemu_has_no_privilege_no_socket_and_no_file_but_its_own(guests: Tiny) -> None:
    spec = guests.fresh(new_id())
    os.chown(spec.disk, *NOBODY)
    async with booted(guests, replace(spec, owner=NOBODY)) as guest:
        facts, pid = status_of(guest.domain.pid), guest.domain.pid
        assert facts["Uid"].split() == ["65534"] * 4 and facts["Gid"].split() == ["65534"] * 4
        assert facts["Groups"] == ""
        assert {facts[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
        assert listening(pid) == []
        assert {name for name in open_files(pid) if name.startswith(str(guests.folder))} <= {
            str(spec.disk),
            str(guests.base),
            str(guests.folder / "initrd"),
        }
        assert await guest.ask("hello") == "heard hello"


def open_files(pid: int) -> set[str]:
    return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}


def listening(pid: int) -> list[str]:
    """Sockets of the process that anybody can find: with a name, or on the network."""
    inodes = {name[8:-1] for name in open_files(pid) if name.startswith("socket:")}
    unix = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
    found = [words[-1] for words in unix if words[6] in inodes and len(words) > 7]
    for table in ("tcp", "tcp6", "udp", "udp6"):
        rows = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
        found += [row[1] for row in rows if row[9] in inodes]
    return found


async def test_the_signals_of_a_terminal_or_a_batch_system_do_not_reach_qemu(guests: Tiny) -> None:
    async with ready(guests) as guest:
        for number in (1, 2, 3, 10, 12, 13, 14, 15, 20, 21, 22, 24, 25):
            os.kill(guest.domain.pid, number)
        assert await guest.ask("still there") == "heard still there"


def test_qemu_dies_with_the_process_that_started_it(guests: Tiny) -> None:
    """Killed with -9, the starter runs nothing of ours any more: the kernel does it."""
    spec = guests.fresh(new_id())
    program = f"""
import asyncio, pathlib, sys
from belljar.hypervisor import *
from belljar.hypervisor import load
async def main():
    spec = DomainSpec(id={spec.id!r}, cpus=1, memory={spec.memory}, image_digest="tiny", boot=Boot(), disk=pathlib.Path({str(spec.disk)!r}),
                      disk_size={spec.disk_size}, accelerator=Accelerator.TCG, folder=pathlib.Path({str(spec.folder)!r}), owner={spec.owner!r})
    domain = load(Settings(), pathlib.Path({str(guests.folder / "store")!r})).start(spec)
    await domain.connect()
    print(domain.pid, flush=True)
    await asyncio.get_running_loop().create_future()
asyncio.run(main())
"""
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    descriptor = os.pidfd_open(int(starter.stdout.readline()))
    starter.kill()
    starter.wait()
    starter.stdout.close()
    import select

    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    assert poller.poll(10_000)
    os.close(descriptor)
    assert spec.id not in [id for id, _ in guests.hypervisor.alive()]


# -- what a guest may do by itself -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "kind"), [("off", EventKind.SHUTDOWN), ("reboot", EventKind.RESET), ("panic", EventKind.PANICKED)]
)
async def test_the_end_of_a_guest_is_told_with_its_kind(guests: Tiny, word: str, kind: EventKind) -> None:
    async with ready(guests) as guest:
        await guest.say(word)
        told = await events(guest.domain)
        assert [event.kind for event in told] == [kind, EventKind.EXITED]
        assert told[-1].status == 0


async def test_a_full_host_disk_stops_the_guest_and_is_told(guests: Tiny, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=8m", "belljar-test", str(small))
    try:
        spec = guests.fresh(new_id())
        moved = replace(spec, disk=small / "overlay.qcow2")
        spec.disk.rename(tmp_path / "overlay.qcow2")
        moved.disk.write_bytes((tmp_path / "overlay.qcow2").read_bytes())
        async with booted(guests, moved) as guest:
            await guest.say("do busybox dd if=/dev/zero of=/dev/vda bs=1M count=32 conv=fsync")
            async with asyncio.timeout(tiny.LONGEST):
                first = await anext(guest.domain.events())
            assert first.kind is EventKind.DISK_FULL
    finally:
        sh("umount", "-l", str(small))


async def test_the_console_is_heard(guests: Tiny) -> None:
    async with ready(guests) as guest:
        assert await guest.ask("shout a word to the console") == "shouted"
        await guest.heard(b"a word to the console")


async def test_a_paused_guest_does_nothing_until_it_is_resumed(guests: Tiny) -> None:
    async with ready(guests) as guest:
        await guest.domain.pause()
        await guest.say("hello")
        with pytest.raises(BlockingIOError):
            guest.domain.channel.recv(100)
        await guest.domain.resume()
        assert await guest.line() == "heard hello"


# -- a QEMU that does not work -----------------------------------------------------------------------------------------


async def test_a_qemu_that_stands_still_costs_deadlines_and_dies_all_the_same(guests: Tiny) -> None:
    hypervisor = QemuHypervisor(Settings(qmp_timeout=3.0), guests.folder / "store")
    domain = hypervisor.start(guests.fresh(new_id()))
    try:
        await domain.connect()
        os.kill(domain.pid, signal.SIGSTOP)
        with pytest.raises(QmpTimeout, match="stop within 3 s"):
            await domain.pause()
        before = asyncio.get_running_loop().time()
        assert os.waitstatus_to_exitcode(await domain.quit(grace=0.2)) == -signal.SIGKILL
        assert asyncio.get_running_loop().time() - before < 5
    finally:
        close(domain)


def close(domain: Domain) -> None:
    domain.kill()
    domain.channel.close()
    domain.console.close()


@pytest.mark.parametrize(
    ("changes", "settings", "kind"),
    [
        ({"memory": 1 << 50}, {}, (OverLimit, NoMemory)),
        ({"cpus": 5000}, {}, OverLimit),
        ({}, {"cpu": "no-such-processor"}, HostError),
    ],
    ids=["memory", "cpus", "processor"],
)
async def test_what_qemu_cannot_do_is_explained(
    guests: Tiny, changes: dict[str, Any], settings: dict[str, Any], kind: type[BelljarError]
) -> None:
    hypervisor = QemuHypervisor(Settings(**settings), guests.folder / "store")
    domain = hypervisor.start(
        guests.fresh(new_id(), **changes) if "memory" not in changes else replace(guests.fresh(new_id()), **changes)
    )
    try:
        with pytest.raises(kind) as caught:
            await domain.connect()
        assert "\n" not in caught.value.message and caught.value.hint
    finally:
        await domain.quit(grace=0.0)
        close(domain)


def address_space() -> int:
    """What this process has mapped, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


async def test_too_little_address_space_is_explained(guests: Tiny) -> None:
    import resource

    domain = None
    before = resource.getrlimit(resource.RLIMIT_AS)
    spec = guests.fresh(new_id())
    _ = guests.hypervisor.find_template(spec)  # so that QEMU's abilities are known
    # Enough to start a process from this one, however much it has mapped, and too little for the guest.
    mapped = address_space()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 512 * MIB, before[1]))
    try:
        domain = guests.hypervisor.start(replace(spec, memory=(mapped // GIB + 2) * GIB))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    try:
        with pytest.raises(NoMemory):
            await domain.connect()
    finally:
        await domain.quit(grace=0.0)
        close(domain)


async def test_a_disk_with_a_ruined_header_is_explained(guests: Tiny) -> None:
    spec = guests.fresh(new_id())
    content = bytearray(spec.disk.read_bytes())
    content[36:48] = b"\xff" * 12  # size and place of its L1 table
    spec.disk.write_bytes(content)
    domain = guests.hypervisor.start(spec)
    try:
        with pytest.raises(ImageCorrupt):
            await domain.connect()
    finally:
        await domain.quit(grace=0.0)
        close(domain)


async def test_two_machines_never_write_one_disk(guests: Tiny) -> None:
    spec = guests.fresh(new_id())
    first = guests.hypervisor.start(spec)
    await first.connect()
    second = guests.hypervisor.start(replace(spec, id=new_id()))
    try:
        with pytest.raises(HostError, match="lock"):
            await second.connect()
    finally:
        for domain in (first, second):
            await domain.quit(grace=0.0)
            close(domain)


# -- devices that are there only when asked for ------------------------------------------------------------------------


async def test_there_is_no_card_and_no_share_unless_asked(guests: Tiny) -> None:
    async with ready(guests) as guest:
        lines, _ = await guest.do(
            "cat /sys/bus/pci/devices/*/device 2>/dev/null || busybox cat /sys/bus/pci/devices/*/device"
        )
        assert "0x1041" not in lines and "0x1049" not in lines


async def test_a_card_and_a_share_are_there_when_asked(guests: Tiny, tmp_path: Path) -> None:
    shared = tmp_path / "with, comma"
    shared.mkdir()
    (shared / "word").write_text("from the host\n")
    spec = guests.fresh(new_id())
    spec = replace(
        spec,
        nic=Nic(NetworkMode.USER, "52:01:02:03:04:05"),
        shares=(Share(str(shared), "/in", True),),
    )
    async with booted(guests, spec) as guest:
        lines, _ = await guest.do("busybox cat /sys/bus/pci/devices/*/device")
        assert "0x1041" in lines and "0x1049" in lines
        assert (
            await guest.do("mkdir /s; mount -t 9p -o trans=virtio,version=9p2000.L share0 /s; busybox cat /s/word")
        )[0] == ["from the host"]
        assert (await guest.do("echo no > /s/word"))[1] != 0
    assert (shared / "word").read_text() == "from the host\n"


@pytest.mark.parametrize("owner", [(0, 0), NOBODY], ids=["root", "nobody"])
async def test_what_the_guest_writes_to_a_share_belongs_to_qemus_user(
    guests: Tiny, tmp_path: Path, owner: tuple[int, int]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    os.chown(shared, *owner)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == "root" and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    spec = guests.fresh(new_id(), shares=(Share(str(shared), "/in", False),))
    async with booted(guests, replace(spec, owner=owner)) as guest:
        assert (
            await guest.do("mkdir /s; mount -t 9p -o trans=virtio,version=9p2000.L share0 /s; echo hello > /s/file")
        )[1] == 0
        if owner == (0, 0):
            kept = int(status_of(guest.domain.pid)["CapEff"], 16)
            assert kept == sum(1 << number for number in (0, 1, 2, 3, 4))  # chown, dac_*, fowner, fsetid
    facts = (shared / "file").stat()
    assert ((facts.st_uid, facts.st_gid), (shared / "file").read_text()) == (owner, "hello\n")
